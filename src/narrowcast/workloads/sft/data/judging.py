"""Which conversations are fit to learn from: refused, dropped and counted, or kept."""

from collections.abc import Iterable, Iterator

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.data.conversation import Conversation
from narrowcast.workloads.sft.data.report import Tally
from narrowcast.workloads.sft.data.settings import SftData

EMPTY = "no response to learn"
LONG_RESPONSE = "a response longer than response_max_length"
LONG_INSTRUCTION = "an instruction longer than instruction_max_length"


def filter_rows(
    conversations: Iterable[Conversation], data: SftData, tally: Tally
) -> Iterator[Conversation]:
    """Yield what is fit to learn from; count why the others are not, or refuse the first."""
    for conversation in conversations:
        require_characters(conversation)
        if wrong := _unanswered(conversation):
            if data.empty_response == "refuse":
                raise ConfigError(
                    f"{conversation.location}: {wrong}; mend the row, or write "
                    "data.empty_response=drop to leave such rows out"
                )
            tally.dropped[EMPTY] += 1
        elif why := _too_wordy(conversation, data):
            tally.dropped[why] += 1
        else:
            yield conversation


def _unanswered(conversation: Conversation) -> str:
    """Say what is missing for something to be learnt, if anything is."""
    if conversation.is_text:
        return "" if conversation.turns[0].text.strip() else "its text is empty"
    answers = [turn for turn in conversation.turns if turn.role == "assistant"]
    if not answers:
        return "nobody answers in it"
    if not all(turn.text.strip() for turn in answers):
        return "its response is empty"
    return "" if conversation.turns[-1].role == "assistant" else "nobody answers its last turn"


def _too_wordy(conversation: Conversation, data: SftData) -> str:
    limits = {
        "assistant": (data.response_max_length, LONG_RESPONSE),
        "user": (data.instruction_max_length, LONG_INSTRUCTION),
    }
    for turn in conversation.turns:
        most, why = limits.get(turn.role, (None, ""))
        if most is not None and len(turn.whole) > most:
            return why
    return ""


def require_characters(conversation: Conversation) -> None:
    """Refuse halves of characters, which JSON can name and no text can hold."""
    for turn in conversation.turns:
        try:
            turn.whole.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{conversation.location}: half a character (a lone surrogate) at {error.start} of "
                f"what the {turn.role} says; write the row anew"
            ) from error
