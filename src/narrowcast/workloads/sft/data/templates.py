"""How conversations become text, and which of it has a loss.

Some chat templates mark responses with `{% generation %}`. For others, text is rendered with and
without each response.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jinja2 import TemplateError

from narrowcast.config.problems import shortened
from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.data.formats import Conversation, Turn
from narrowcast.workloads.sft.data.settings import INSTRUCTION_TEMPLATE, TemplateChoice

TODAY = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}"
"""Date for templates that write one (Llama's default), so that tokens do not change daily."""
ALPACA = "Below is an instruction that describes a task"
ALPACA_PAIRED = ", paired with an input that provides further context"
ALPACA_REQUEST = ". Write a response that appropriately completes the request."
END_OF_TURN = "<|im_end|>"
MARKS = re.compile(r"{%-?\s*generation\s*-?%}")
"""What a template begins a response with, if it marks responses."""


class Piece(NamedTuple):
    """Text, and whether it has a loss."""

    text: str
    learnt: bool


def chat_pieces(
    conversation: Conversation, tokenizer: Any, specials: Collection[str]
) -> Iterator[Piece]:
    """Render with the tokenizer's chat template, with a loss on responses and their end tokens.

    If the end token is not eos, an eos token follows: generation may stop only there.
    """
    rendered = _Rendered(tokenizer, conversation)
    if rendered.has_marks:
        yield from _marked_pieces(rendered, conversation, str(tokenizer.eos_token))
        return
    done, last, eos = 0, len(conversation.turns) - 1, str(tokenizer.eos_token)
    for number, turn in enumerate(conversation.turns):
        if turn.role == "assistant":
            start, after, stop = rendered.response(number)
            tail = rendered.full[after:stop]
            ends = [tail.index(each) + len(each) for each in specials if each in tail]
            if turn.calls:  # which may contain special tokens; the last one ends it
                ends = [max((tail.rindex(s) + len(s) for s in specials if s in tail), default=0)]
                ends = [end for end in ends if end]
            if not ends and not rendered.is_stable(number):
                raise rendered.unstable(number)
            stop = after + min(ends) if ends else stop
            if number == last and not rendered.full[:stop].endswith(eos):
                stop = len(rendered.full)
            yield Piece(rendered.full[done:start], False)
            yield Piece(rendered.full[start:stop], turn.learnt)
            done = stop
    yield Piece(rendered.full[done:], False)
    if not rendered.full[:done].rstrip().endswith(eos):
        yield Piece(eos, True)


def _marked_pieces(rendered: "_Rendered", conversation: Conversation, eos: str) -> Iterator[Piece]:
    """Return the pieces of a template that marks its responses, as transformers locates them."""
    done, first = 0, rendered.start_of_learnt(conversation)
    for start, stop in rendered.marked():
        yield Piece(rendered.full[done:start], False)
        yield Piece(rendered.full[start:stop], start >= first)
        done = stop
    # As without marks, the end of the text is learnt if an eos token must follow it.
    ends = rendered.full.rstrip().endswith(eos)
    yield Piece(rendered.full[done:] + ("" if ends else eos), not ends)


def chat_whole(conversation: Conversation, tokenizer: Any) -> Iterator[Piece]:
    """Render with the tokenizer's chat template, with a loss on everything."""
    full = _Rendered(tokenizer, conversation).full
    yield Piece(full, True)
    if not full.rstrip().endswith(tokenizer.eos_token):
        yield Piece(tokenizer.eos_token, True)


def special_texts(tokenizer: Any) -> frozenset[str]:
    """Return the texts of special tokens."""
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return frozenset(filter(None, (*tokenizer.all_special_tokens, *added)))


class _Rendered:
    """A conversation rendered in full and up to each turn."""

    def __init__(self, tokenizer: Any, conversation: Conversation) -> None:
        self._tokenizer, self._location = tokenizer, conversation.location
        self._messages = [
            {"role": turn.role, "content": turn.whole, **(turn.extra or {})}
            for turn in conversation.turns
        ]
        self._tools = list(conversation.tools) or None
        self.full = self._render(len(self._messages))
        self._check_nothing_is_left_out()
        self._check_tools(conversation)

    @property
    def has_marks(self) -> bool:
        """Whether the template marks responses itself."""
        return MARKS.search(self._tokenizer.get_chat_template(tools=self._tools)) is not None

    def marked(self) -> list[tuple[int, int]]:
        """Return start and end of each response that the template marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._tokenizer.get_chat_template(tools=self._tools)
        rendered: Any = render_jinja_template(
            [self._messages],
            tools=self._tools,
            chat_template=_dated(template),
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        _, (spans,) = rendered
        return [(int(start), int(stop)) for start, stop in spans]

    def start_of_learnt(self, conversation: Conversation) -> int:
        """Return where the turns with a loss begin; turns without one come before."""
        count = next((n for n, turn in enumerate(conversation.turns) if turn.learnt), 0)
        before = self._render(count) if count else ""
        if not self.full.startswith(before):
            raise self.unstable(count)
        return len(before)

    def response(self, number: int) -> tuple[int, int, int]:
        """Return where a response starts, where its text ends, and where its turn ends."""
        prompt, bare = self._render(number, requested=True), self._render(number)
        terms = self._messages[number]["content"].strip()
        stop = _same(self.through(number), self.full)
        start = len(prompt)
        turn = self.full[start:stop]
        if not self.full.startswith(prompt) or terms not in turn:
            raise self.unstable(number)
        at = turn.index(terms) if turn.lstrip().startswith(terms) else turn.rindex(terms)
        if prompt == bare:
            # Without a generation prompt, the header is part of the turn.
            start, turn, at = start + at, turn[at:], 0
        return start, start + at + len(terms), stop

    def through(self, number: int) -> str:
        """Return the text up to and including a turn."""
        last = number == len(self._messages) - 1
        return self.full if last else self._render(number + 1)

    def is_stable(self, number: int) -> bool:
        """Return whether later turns leave the rendering of this one unchanged."""
        return self.full.startswith(self.through(number))

    def unstable(self, number: int) -> ConfigError:
        return ConfigError(
            f"{self._location}, turn {number + 1}: the tokenizer's chat template renders this "
            "response differently when other turns follow, so its tokens cannot be located. Write "
            "data.template_format=chatml, or data.loss_on=all."
        )

    def _check_nothing_is_left_out(self) -> None:
        """Raise if a message is missing from the text; templates strip text and may write JSON."""
        for message in self._messages:
            text = message["content"].strip()
            forms = (text, json.dumps(text, ensure_ascii=False)[1:-1])
            if message["role"] != "assistant" and not any(form in self.full for form in forms):
                raise ConfigError(
                    f"{self._location}: the tokenizer's chat template leaves the {message['role']} "
                    f"message out, got {shortened(text)!r}. Write data.template_format=chatml, or "
                    "remove the message from the row."
                )

    def _check_tools(self, conversation: Conversation) -> None:
        """Raise if the template leaves out a tool, or the name of a function that is called."""
        functions = [tool.get("function", tool) for tool in conversation.tools]
        functions += [call for turn in conversation.turns for call in turn.calls]
        for name in (str(function.get("name", "")) for function in functions):
            if name not in self.full:
                raise ConfigError(
                    f"{self._location}: the tokenizer's chat template leaves the tool {name} out. "
                    "Use a model whose template renders tools, or remove tools and tool calls."
                )

    def _render(self, count: int, *, requested: bool = False) -> str:
        try:
            template = self._tokenizer.get_chat_template(tools=self._tools)
            text = self._tokenizer.apply_chat_template(
                self._messages[:count],
                tools=self._tools,
                chat_template=_dated(template),
                tokenize=False,
                add_generation_prompt=requested,
            )
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise ConfigError(
                f"{self._location}: the tokenizer's chat template fails: "
                f"{shortened(str(error), 300)}. Fix the row or the template, or write "
                "data.template_format=chatml."
            ) from error
        return str(text)


def _dated(template: str) -> str:
    """Return a template that always writes the same date."""
    return TODAY + template if "strftime_now" in template else template


def _same(one: str, other: str) -> int:
    """Return the length of the common prefix."""
    if other.startswith(one):
        return len(one)
    differing = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


class Written(NamedTuple):
    """A conversation as text."""

    pieces: tuple[Piece, ...]
    bare: bool
    """Whether the tokenizer's first tokens are added; chat templates write them."""

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, kw_only=True)
class Template:
    """Renders conversations for one tokenizer."""

    name: str
    identity: str
    """Everything the text depends on besides the tokenizer."""
    tokenizer: Any
    write: Callable[[Conversation], Iterator[Piece]]
    all_learnt: bool

    def written(self, conversation: Conversation) -> Written:
        """Render a conversation; plain text has a loss on everything."""
        if self.name != "chat" and (
            conversation.tools or any(turn.extra for turn in conversation.turns)
        ):
            raise ConfigError(
                f"{conversation.location}: tools need a chat template, got template_format="
                f"{self.name}. Write data.template_format=chat, or remove such rows."
            )
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
    """Return the requested template, or the default for the tokenizer."""
    require_end(tokenizer)
    chat = bool(tokenizer.chat_template)
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
    """Raise if the tokenizer has no usable eos token."""
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
        learnt = turn.role == "assistant" and turn.learnt
        # The base model's generation settings may stop only at its eos token.
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
        yield Piece(f"{answer.text}{end}", answer.learnt)


def _basic(conversation: Conversation, template: str, end: str) -> Iterator[Piece]:
    prompt, _, tail = template.partition("{response}")
    before, _, after = prompt.partition("{instruction}")
    system, pairs = _paired(conversation, "basic")
    for number, (request, answer) in enumerate(pairs):
        head = "\n\n" if number else f"{system}\n\n" if system else ""
        yield Piece(f"{head}{before}{request.whole}{after}", False)
        # The text after {response} ends a response.
        yield Piece(f"{answer.text}{tail}{end}", answer.learnt)


def _paired(conversation: Conversation, name: str) -> tuple[str, list[tuple[Turn, Turn]]]:
    """Return the system message and pairs of question and answer."""
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
