"""Conversations as rows of tokens with a loss mask, in flat arrays."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.workloads.sft.data.formats import Conversation
from narrowcast.workloads.sft.data.settings import SftData
from narrowcast.workloads.sft.data.templates import Template, Written, special_texts

EMPTY = "no response"
LONG_RESPONSE = "response longer than response_max_length"
LONG_INSTRUCTION = "instruction longer than instruction_max_length"
Tokens = NDArray[np.int32]
Learnt = NDArray[np.bool_]
TOGETHER = 512
"""Conversations per call of the tokenizer, enough for its threads."""
TOO_LONG = "more tokens than max_seq_length"
NOTHING_LEFT = "no response within max_seq_length"


@dataclass
class Tally:
    """Counts of what happened to rows."""

    formats: set[str] = field(default_factory=set)
    rows_read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    with_signs: int = 0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "formats": sorted(self.formats), "dropped": dict(self.dropped)}


def filter_rows(
    conversations: Iterable[Conversation], data: SftData, tally: Tally
) -> Iterator[Conversation]:
    """Yield usable conversations; count the others, or raise for the first."""
    for conversation in conversations:
        if why := drop_reason(conversation, data):
            tally.dropped[why] += 1
        else:
            yield conversation


def drop_reason(conversation: Conversation, data: SftData) -> str:
    """Return why a conversation is dropped, or an empty string; raise if it may not be."""
    require_characters(conversation)
    wrong = _unanswered(conversation)
    if wrong and data.empty_response == "refuse":
        raise ConfigError(
            f"{conversation.location}: {wrong}. Fix the row, or write data.empty_response=drop to "
            "drop such rows."
        )
    return EMPTY if wrong else _too_wordy(conversation, data)


def _unanswered(conversation: Conversation) -> str:
    """Return why there is nothing to learn, or an empty string."""
    if conversation.is_text:
        return "" if conversation.turns[0].text.strip() else "the text is empty"
    answers = [turn for turn in conversation.turns if turn.role == "assistant"]
    if not answers:
        return "there is no assistant message"
    if not all(turn.text.strip() or turn.calls for turn in answers):
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
    """Raise for lone surrogates, which JSON allows but text does not."""
    for turn in conversation.turns:
        try:
            turn.whole.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{conversation.location}: the {turn.role} message has a lone surrogate at "
                f"character {error.start}. Fix the text of the row."
            ) from error


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenRows:
    """Token rows in flat arrays."""

    tokens: Tokens
    learnt: Learnt
    """Whether a token has a loss; never the first of a row."""
    offsets: NDArray[np.int64]
    """Start of each row and end of the last."""

    @classmethod
    def joined(cls, rows: Sequence[tuple[Tokens, Learnt]]) -> "TokenRows":
        lengths = [len(tokens) for tokens, _ in rows]
        empty: tuple[Tokens, Learnt] = (np.empty(0, np.int32), np.empty(0, np.bool_))
        return cls(
            tokens=np.concatenate([empty[0], *(tokens for tokens, _ in rows)]),
            learnt=np.concatenate([empty[1], *(learnt for _, learnt in rows)]),
            offsets=np.cumsum([0, *lengths], dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, number: int) -> tuple[Tokens, Learnt]:
        """Return the tokens and the loss mask of a row."""
        span = slice(int(self.offsets[number]), int(self.offsets[number + 1]))
        return self.tokens[span], self.learnt[span]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def taken(self, numbers: Iterable[int]) -> "TokenRows":
        """Return the given rows."""
        return TokenRows.joined([self.row(number) for number in numbers])

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {"tokens": self.tokens, "learnt": self.learnt, "offsets": self.offsets}


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Tokenises conversations."""

    template: Template
    data: SftData
    first: tuple[int, ...]
    """Tokens that the tokenizer puts before any text."""
    signs: re.Pattern[str]
    """Matches the texts of special tokens."""

    @classmethod
    def of(cls, template: Template, data: SftData) -> "Encoder":
        tokenizer = template.tokenizer
        if not tokenizer.is_fast:
            raise UnsupportedError(
                f"{type(tokenizer).__name__} does not return character offsets of tokens. Use a "
                "tokenizer with a tokenizer.json."
            )
        signs = re.compile("|".join(map(re.escape, sorted(special_texts(tokenizer)))))
        return cls(template=template, data=data, first=first_tokens(tokenizer), signs=signs)

    def rows(
        self, conversations: Iterable[Conversation], tally: Tally
    ) -> Iterator[tuple[Tokens, Learnt]]:
        """Yield one row per conversation that fits or can be cut; count the others."""
        waiting = iter(conversations)
        while some := list(islice(waiting, TOGETHER)):
            written = [self.template.written(each) for each in some]
            for each, row in zip(some, self.encoded(written), strict=True):
                fitted = self.fitted(row, each.location, tally)
                if fitted is not None:
                    tally.with_signs += self.has_signs(each)
                    yield fitted

    def has_signs(self, conversation: Conversation) -> bool:
        """Return whether a conversation contains the text of a special token."""
        return any(self.signs.search(turn.whole) for turn in conversation.turns)

    def encoded(self, written: Sequence[Written]) -> Iterator[tuple[Tokens, Learnt]]:
        """Yield the tokens and the loss mask of each text."""
        result = self.template.tokenizer(
            [each.text for each in written],
            add_special_tokens=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        for each, ids, spans in zip(
            written, result["input_ids"], result["offset_mapping"], strict=True
        ):
            learnt = learnt_tokens(each, np.array(spans, np.int64).reshape(-1, 2))
            first = self.first if each.bare else ()
            tokens = np.array([*first, *ids], np.int32)
            marks = np.concatenate([np.zeros(len(first), np.bool_), learnt])
            marks[:1] = False
            yield tokens, marks

    def fitted(
        self, row: tuple[Tokens, Learnt], location: str, tally: Tally
    ) -> tuple[Tokens, Learnt] | None:
        """Return a row of at most `max_seq_length` tokens, or None if it is dropped."""
        tokens, learnt = row
        most = self.data.max_seq_length
        if len(tokens) > most:
            if self.data.too_long == "refuse":
                raise ConfigError(
                    f"{location} must fit into data.max_seq_length={most}, got {len(tokens)} "
                    f"tokens. Write data.max_seq_length={len(tokens)}, or data.too_long=drop or "
                    "cut."
                )
            if self.data.too_long == "drop":
                tally.dropped[TOO_LONG] += 1
                return None
            tokens, learnt = tokens[:most], learnt[:most]
            if learnt.any():
                tally.cut += 1
        if not learnt.any():
            tally.dropped[NOTHING_LEFT] += 1
            return None
        return tokens, learnt


def learnt_tokens(written: Written, spans: NDArray[np.int64]) -> Learnt:
    """Return which tokens contain a character with a loss, given the span of each token."""
    pieces = written.pieces
    marks = np.repeat([piece.learnt for piece in pieces], [len(piece.text) for piece in pieces])
    if not len(spans) or not len(marks):
        return np.zeros(len(spans), np.bool_)
    before = np.concatenate([[0], np.cumsum(marks)])
    # Some tokenizers exclude leading spaces from spans, which leaves none for a token of spaces.
    # So a token starts where the previous ones ended.
    ends = np.maximum.accumulate(spans[:, 1])
    starts = np.minimum(spans[:, 0], np.concatenate([[0], ends[:-1]]))
    starts = np.minimum(starts, len(marks) - 1)
    learnt: Learnt = before[np.maximum(spans[:, 1], starts + 1)] > before[starts]
    return learnt


def padding_token(tokenizer: Any) -> int:
    """Return a padding token; any works, because padding has no loss."""
    own = tokenizer.pad_token_id
    return int(tokenizer.eos_token_id if own is None else own)


def first_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that the tokenizer puts before any text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start])
    return ()
