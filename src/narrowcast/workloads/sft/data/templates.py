"""How a conversation is written: pieces of text, each to be learnt or only read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.data.chat import (
    Piece,
    chat_pieces,
    chat_whole,
    has_chat_template,
    special_texts,
)
from narrowcast.workloads.sft.data.conversation import Conversation, Turn
from narrowcast.workloads.sft.data.settings import INSTRUCTION_TEMPLATE, TemplateChoice

ALPACA = "Below is an instruction that describes a task"
ALPACA_PAIRED = ", paired with an input that provides further context"
ALPACA_REQUEST = ". Write a response that appropriately completes the request."
END_OF_TURN = "<|im_end|>"


class Written(NamedTuple):
    """A conversation as text."""

    pieces: tuple[Piece, ...]
    bare: bool
    """It begins as any text does, so that the tokenizer puts its first token before it; a chat
    template writes that itself."""

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, kw_only=True)
class Template:
    """A way to write conversations, for one tokenizer."""

    name: str
    identity: str
    """All that its texts depend on beside the tokenizer."""
    tokenizer: Any
    write: Callable[[Conversation], Iterator[Piece]]
    all_learnt: bool

    def written(self, conversation: Conversation) -> Written:
        """Write a conversation; a text is learnt as it stands, and its end with it."""
        if conversation.is_text:
            pieces = iter([Piece(conversation.turns[0].text + self.tokenizer.eos_token, True)])
        else:
            pieces = self.write(conversation)
        marked = (Piece(each.text, each.learnt or self.all_learnt) for each in pieces)
        return Written(tuple(marked), conversation.is_text or self.name != "chat")


def select_template(
    choice: TemplateChoice,
    tokenizer: Any,
    *,
    instruction_template: str = INSTRUCTION_TEMPLATE,
    loss_on: Literal["response", "all"] = "response",
) -> Template:
    """Return the template that is asked for, or the one that suits the tokenizer."""
    require_end(tokenizer)
    chat = has_chat_template(tokenizer)
    name = choice if choice != "auto" else "chat" if chat else "basic"
    if name == "chat" and not chat:
        raise ConfigError(
            "data.template_format=chat needs a chat template, but the tokenizer has none. Write "
            "data.template_format=chatml, alpaca or basic."
        )
    end = tokenizer.eos_token
    specials = special_texts(tokenizer)
    writers: dict[str, Callable[[Conversation], Iterator[Piece]]] = {
        "chat": lambda conversation: (
            chat_pieces(conversation, tokenizer, specials)
            if loss_on == "response"
            else chat_whole(conversation, tokenizer)
        ),
        "chatml": lambda conversation: _chatml(conversation, end),
        "alpaca": lambda conversation: _alpaca(conversation, end),
        "basic": lambda conversation: _basic(conversation, instruction_template, end),
    }
    used = {"chat": tokenizer.chat_template, "basic": instruction_template}.get(name, "")
    return Template(
        name=name,
        identity=f"{name} {loss_on} {used}",
        tokenizer=tokenizer,
        write=writers[name],
        all_learnt=loss_on == "all",
    )


def require_end(tokenizer: Any) -> None:
    """Refuse a tokenizer that has no token to end a text with."""
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "The tokenizer has no eos token, so the model cannot learn where a response ends. Set "
            "eos_token in its tokenizer_config.json."
        )
    result = tokenizer(tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    if result != [tokenizer.eos_token_id]:
        raise ConfigError(
            f"The tokenizer splits its eos token {tokenizer.eos_token} into {len(result)} tokens. "
            "Add it to the special tokens of its tokenizer.json."
        )


def _chatml(conversation: Conversation, end: str) -> Iterator[Piece]:
    for number, turn in enumerate(conversation.turns, 1):
        learnt = turn.role == "assistant"
        # Generation settings of the base model may stop at its eos token only.
        ends = learnt and number == len(conversation.turns) and end != END_OF_TURN
        yield Piece(f"<|im_start|>{turn.role}\n", False)
        yield Piece(f"{turn.whole}{END_OF_TURN}", learnt)
        yield Piece(f"\n{end}" if ends else "\n", ends)


def _alpaca(conversation: Conversation, end: str) -> Iterator[Piece]:
    system, pairs = _paired(conversation, "alpaca")
    for number, (requested, answer) in enumerate(pairs):
        paired = ALPACA_PAIRED if requested.context else ""
        head = "\n\n" if number else f"{system or ALPACA + paired + ALPACA_REQUEST}\n\n"
        inputs = f"### Input:\n{requested.context}\n\n" if requested.context else ""
        yield Piece(f"{head}### Instruction:\n{requested.text}\n\n{inputs}### Response:\n", False)
        yield Piece(f"{answer.text}{end}", True)


def _basic(conversation: Conversation, template: str, end: str) -> Iterator[Piece]:
    prompt, _, tail = template.partition("{response}")
    before, _, after = prompt.partition("{instruction}")
    system, pairs = _paired(conversation, "basic")
    for number, (request, answer) in enumerate(pairs):
        head = "\n\n" if number else f"{system}\n\n" if system else ""
        yield Piece(f"{head}{before}{request.whole}{after}", False)
        # What the template has after a response is how a response ends.
        yield Piece(f"{answer.text}{tail}{end}", True)


def _paired(conversation: Conversation, name: str) -> tuple[str, list[tuple[Turn, Turn]]]:
    """Return the system's text and questions with their answers, for templates of pairs."""
    first, *others = conversation.turns
    turns = others if first.role == "system" else [first, *others]
    roles = [turn.role for turn in turns]
    if roles != ["user", "assistant"] * (len(turns) // 2):
        raise ConfigError(
            f"{conversation.location}: template_format={name} needs user and assistant in turn, "
            f"got {', '.join(roles)}. Write data.template_format=chat or chatml."
        )
    system = first.text if first.role == "system" else ""
    return system, list(zip(turns[::2], turns[1::2], strict=True))
