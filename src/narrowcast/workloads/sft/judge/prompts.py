"""Prompts as rendered in training, and how responses end."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from narrowcast.config.problems import shortened
from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.data.formats import Conversation, Conversations, Turn, detected
from narrowcast.workloads.sft.data.settings import Columns
from narrowcast.workloads.sft.data.sources import Row, read_rows
from narrowcast.workloads.sft.data.templates import (
    Piece,
    Template,
    Written,
    chat_pieces,
    special_texts,
)
from narrowcast.workloads.sft.data.tokenised import (
    TokenRows,
    first_tokens,
    learnt_tokens,
    require_characters,
)

ANSWER = "the-answer-stands-here"
"""Placeholder for a response, to find where it starts and what follows."""


class Question(NamedTuple):
    """A prompt and its reference answer."""

    prompt: tuple[int, ...]
    reference: str
    location: str


class Ending(NamedTuple):
    """How a template ends a response."""

    token: int | None
    """The special token, or None if text comes first."""
    text: str


def questions_from(path: Path, template: Template, *, most: int) -> list[Question]:
    """Return the first questions of a file in any training format."""
    read = iter(Conversations(_known(read_rows(path)), "auto", Columns()))
    return [make_question(each, template) for each in islice(read, most)]


def make_question(conversation: Conversation, template: Template) -> Question:
    """Return the prompt before the last response, and that response."""
    require_characters(conversation)
    *before, last = conversation.turns
    if last.role != "assistant" or not last.text.strip():
        raise ConfigError(
            f"{conversation.location} must end with an answer to compare with. Give rows of "
            "questions with answers."
        )
    requested = conversation._replace(turns=(*before, Turn("assistant", ANSWER)))
    return Question(_tokens_before(requested, template), last.text, conversation.location)


def response_ending(template: Template) -> Ending:
    """Return what follows a response, up to the end of the loss."""
    request = (Turn("user", "a"), Turn("assistant", ANSWER))
    pieces, at = _placed(Conversation(request, "a response"), template)
    ending = pieces[at].text.rpartition(ANSWER)[2]
    ending += "".join(piece.text for piece in takewhile(lambda p: p.learnt, pieces[at + 1 :]))
    signs = special_texts(template.tokenizer)
    first = min((sign for sign in signs if sign in ending), key=ending.index, default="")
    terms = (ending.partition(first)[0] if first else ending).strip()
    token = template.tokenizer.convert_tokens_to_ids(first) if first and not terms else None
    return Ending(token, terms)


def stop_tokens(template: Template) -> tuple[int, ...]:
    """Return the end-of-turn token, if any, and the eos token."""
    eos = int(template.tokenizer.eos_token_id)
    try:
        token = response_ending(template).token
    except ConfigError:  # accepted by data.loss_on=all, with an eos token at the end
        return (eos,)
    return (eos,) if token in (None, eos) else (int(token), eos)


def sample_questions(
    rows: TokenRows, tokenizer: Any, *, count: int, room: int | None
) -> list[Question]:
    """Return prompts and last responses of rows that fit; plain text is split in half."""
    fit = [
        split
        for number in range(len(rows))
        if (split := _split(rows, number)) and (room is None or split[1] <= room)
    ]
    count = min(count, len(fit))
    chosen = [fit[i * len(fit) // count] for i in range(count)]
    return [_shown(rows, tokenizer, number, at) for number, at in chosen]


def _known(rows: Iterable[Row]) -> Iterator[Row]:
    for row in rows:
        if detected(row.values) is None:
            columns = shortened(", ".join(map(str, row.values)) or "none", 200)
            raise ConfigError(
                f"{row.location} has no known format, got the columns {columns}. Name them "
                "question and answer."
            )
        yield row


def _shown(rows: TokenRows, tokenizer: Any, number: int, at: int) -> Question:
    tokens = rows.row(number)[0].tolist()
    reference = tokenizer.decode(tokens[at:], skip_special_tokens=True)
    return Question(tuple(tokens[:at]), str(reference).strip(), f"row {number + 1}")


def _split(rows: TokenRows, number: int) -> tuple[int, int] | None:
    """Return a row and the start of its last response."""
    _, learnt = rows.row(number)
    if learnt[1:].all():
        return (number, len(learnt) // 2) if len(learnt) > 1 else None
    edges = np.flatnonzero(np.diff(learnt.astype(np.int8), prepend=0, append=0))
    starts = edges[::2]
    return (number, int(starts[-1])) if starts[-1] else None


def _tokens_before(conversation: Conversation, template: Template) -> tuple[int, ...]:
    """Return the tokens before the last response, as in training.

    The text is tokenised with a placeholder after it: a trailing space of the prompt may belong to
    the first token of the response, as in "? Yes".
    """
    pieces, at = _placed(conversation, template)
    marked = tuple(Piece(piece.text, n == at) for n, piece in enumerate(pieces[: at + 1]))
    written = Written(marked, template.name != "chat")
    result = template.tokenizer(
        written.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    learnt = learnt_tokens(written, np.array(result["offset_mapping"], np.int64).reshape(-1, 2))
    first = first_tokens(template.tokenizer) if written.bare else ()
    return (*first, *result["input_ids"][: int(np.argmax(learnt))])


def _placed(conversation: Conversation, template: Template) -> tuple[list[Piece], int]:
    """Return the rendered pieces, and the index of the one with the last response."""
    pieces = list(_pieces(conversation, template))
    places = [n for n, piece in enumerate(pieces) if piece.learnt and ANSWER in piece.text]
    if not places:
        raise ConfigError(
            "The tokenizer's chat template changes the text of responses. Write "
            "data.template_format=chatml."
        )
    return pieces, places[-1]


def _pieces(conversation: Conversation, template: Template) -> Iterator[Piece]:
    if template.name == "chat":
        # A prompt ends where a response starts, whatever loss_on is.
        specials = special_texts(template.tokenizer)
        return chat_pieces(conversation, template.tokenizer, specials)
    return template.write(conversation)


def decode_answers(answers: Sequence[Sequence[int]], tokenizer: Any, ending: Ending) -> list[str]:
    """Return answers as text, up to the template's end of a response."""
    written = [str(tokenizer.decode(each, skip_special_tokens=True)) for each in answers]
    if ending.text:
        written = [text.partition(ending.text)[0] for text in written]
    return [text.strip() for text in written]
