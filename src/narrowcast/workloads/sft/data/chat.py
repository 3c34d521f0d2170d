"""The tokenizer's own chat template, and which of its text is the assistant's.

A template says what is written, not who says it. So it is asked again and again: with the turns
before a response, and with the response. What the second adds to the first is what a model that is
given the first has to say.
"""

import json
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from jinja2 import TemplateError

from narrowcast.config.problems import shortened
from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.data.conversation import Conversation

TODAY = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}"
"""Some templates write the date; the same data would be other data tomorrow. This day is what
Llama's own template takes where it cannot ask."""


class Piece(NamedTuple):
    """Text, and whether a model is to learn to write it."""

    text: str
    learnt: bool


def has_chat_template(tokenizer: Any) -> bool:
    """Say whether the tokenizer came with a template of its own."""
    return bool(tokenizer.chat_template)


def chat_pieces(
    conversation: Conversation, tokenizer: Any, specials: Collection[str]
) -> Iterator[Piece]:
    """Write a conversation as the tokenizer's template does.

    A response is learnt with the special token that ends it. Where that is not the eos token, the
    last response is learnt to the end of the text, followed by the eos token: whoever loads only an
    adapter generates with the settings of its base, which may stop at no other token. A template
    that writes a turn in another way once others follow is refused: nobody could say what to learn.
    """
    messages = [{"role": turn.role, "content": turn.whole} for turn in conversation.turns]
    rendered = _Rendered(tokenizer, messages, conversation.location)
    done, last, eos = 0, len(conversation.turns) - 1, str(tokenizer.eos_token)
    for number, turn in enumerate(conversation.turns):
        if turn.role == "assistant":
            start, after, stop = rendered.response(number)
            tail = rendered.full[after:stop]
            ends = [tail.index(each) + len(each) for each in specials if each in tail]
            if not ends and not rendered.is_stable(number):
                raise rendered.unstable(number)
            stop = after + min(ends) if ends else stop
            if number == last and not rendered.full[:stop].endswith(eos):
                stop = len(rendered.full)
            yield Piece(rendered.full[done:start], False)
            yield Piece(rendered.full[start:stop], True)
            done = stop
    yield Piece(rendered.full[done:], False)
    if not rendered.full[:done].rstrip().endswith(eos):
        yield Piece(eos, True)


def chat_whole(conversation: Conversation, tokenizer: Any) -> Iterator[Piece]:
    """Write a conversation as the tokenizer's template does, all of it to be learnt."""
    messages = [{"role": turn.role, "content": turn.whole} for turn in conversation.turns]
    full = _Rendered(tokenizer, messages, conversation.location).full
    yield Piece(full, True)
    if not full.rstrip().endswith(tokenizer.eos_token):
        yield Piece(tokenizer.eos_token, True)


def special_texts(tokenizer: Any) -> frozenset[str]:
    """Return the texts of tokens that are signs, not words."""
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return frozenset(filter(None, (*tokenizer.all_special_tokens, *added)))


class _Rendered:
    """One conversation, written in full and up to each of its turns."""

    def __init__(self, tokenizer: Any, messages: list[dict[str, str]], location: str) -> None:
        self._tokenizer, self._messages, self._location = tokenizer, messages, location
        self._through: dict[int, str] = {}
        self.full = self._render(len(messages))
        self._check_nothing_is_left_out()

    def response(self, number: int) -> tuple[int, int, int]:
        """Return where a response begins, where its words end, and where its turn does."""
        prompt, bare = self._render(number, requested=True), self._render(number)
        terms = self._messages[number]["content"].strip()
        stop = _same(self.through(number), self.full)
        start = len(prompt)
        turn = self.full[start:stop]
        if not self.full.startswith(prompt) or terms not in turn:
            raise self.unstable(number)
        at = turn.index(terms) if turn.lstrip().startswith(terms) else turn.rindex(terms)
        if prompt == bare:
            # It has no words to ask for an answer with, so they are in the turn.
            start, turn, at = start + at, turn[at:], 0
        return start, start + at + len(terms), stop

    def through(self, number: int) -> str:
        """Return the text of all turns up to this one."""
        if number == len(self._messages) - 1:
            return self.full
        if number not in self._through:
            self._through[number] = self._render(number + 1)
        return self._through[number]

    def is_stable(self, number: int) -> bool:
        """Say whether a turn stays as it is when others follow."""
        return self.full.startswith(self.through(number))

    def unstable(self, number: int) -> ConfigError:
        return ConfigError(
            f"{self._location}, turn {number + 1}: the tokenizer's chat template renders this "
            "response differently when other turns follow, so its tokens cannot be located. Write "
            "data.template_format=chatml, or data.loss_on=all."
        )

    def _check_nothing_is_left_out(self) -> None:
        """Raise for a message that the template does not write; some have no place for a system's.

        Templates strip messages, and write those of tools as JSON. A response is checked where it
        is looked for.
        """
        for message in self._messages:
            text = message["content"].strip()
            forms = (text, json.dumps(text, ensure_ascii=False)[1:-1])
            if message["role"] != "assistant" and not any(form in self.full for form in forms):
                raise ConfigError(
                    f"{self._location}: the tokenizer's chat template leaves the {message['role']} "
                    f"message out, got {shortened(text)!r}. Write data.template_format=chatml, or "
                    "remove the message from the row."
                )

    def _render(self, count: int, *, requested: bool = False) -> str:
        try:
            template = self._tokenizer.get_chat_template()
            text = self._tokenizer.apply_chat_template(
                self._messages[:count],
                chat_template=TODAY + template if "strftime_now" in template else template,
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


def _same(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    if other.startswith(one):
        return len(one)
    differing = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))
