"""Which conversations are fit to learn from: refused, dropped and counted, or kept."""

from collections.abc import Iterable, Iterator

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.data.conversation import Conversation
from narrowcast.workloads.sft.data.report import Tally
from narrowcast.workloads.sft.data.settings import SftData

EMPTY = "no response"
LONG_RESPONSE = "response longer than response_max_length"
LONG_INSTRUCTION = "instruction longer than instruction_max_length"


def filter_rows(
    conversations: Iterable[Conversation], data: SftData, tally: Tally
) -> Iterator[Conversation]:
    """Yield what is fit to learn from; count why the others are not, or refuse the first."""
    for conversation in conversations:
        require_characters(conversation)
        if wrong := _unanswered(conversation):
            if data.empty_response == "refuse":
                raise ConfigError(
                    f"{conversation.location}: {wrong}. Fix the row, or write "
                    "data.empty_response=drop to drop such rows."
                )
            tally.dropped[EMPTY] += 1
        elif why := _too_wordy(conversation, data):
            tally.dropped[why] += 1
        else:
            yield conversation


def _unanswered(conversation: Conversation) -> str:
    """Say what is missing for something to be learnt, if anything is."""
    if conversation.is_text:
        return "" if conversation.turns[0].text.strip() else "the text is empty"
    answers = [turn for turn in conversation.turns if turn.role == "assistant"]
    if not answers:
        return "there is no assistant message"
    if not all(turn.text.strip() for turn in answers):
        return "the response is empty"
    return (
        ""
        if conversation.turns[-1].role == "assistant"
        else "the last turn is not from the assistant"
    )


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
                f"{conversation.location}: the {turn.role} message has a lone surrogate at "
                f"character {error.start}. Fix the text of the row."
            ) from error
