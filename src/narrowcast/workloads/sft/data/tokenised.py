"""Conversations as tokens, each of them marked whether it is learnt; all rows in flat arrays."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.training.checkpoints.data_identity import fingerprint
from narrowcast.workloads.sft.data.chat import special_texts
from narrowcast.workloads.sft.data.conversation import Conversation
from narrowcast.workloads.sft.data.report import Tally
from narrowcast.workloads.sft.data.settings import SftData
from narrowcast.workloads.sft.data.templates import Template, Written

Tokens = NDArray[np.int32]
Learnt = NDArray[np.bool_]
TOGETHER = 512
"""Conversations that the tokenizer is given at once, enough for its threads."""
TOO_LONG = "more tokens than max_seq_length"
NOTHING_LEFT = "no response within max_seq_length"


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenRows:
    """Rows of tokens, one after another."""

    tokens: Tokens
    learnt: Learnt
    """Whether a token is to be predicted; never the first of a row, which nothing comes before."""
    offsets: NDArray[np.int64]
    """Where each row begins, and where the last one ends."""

    @classmethod
    def joined(cls, rows: Sequence[tuple[Tokens, Learnt]]) -> "TokenRows":
        """Lay rows end to end."""
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
        """Return the tokens of a row and which of them are learnt."""
        span = slice(int(self.offsets[number]), int(self.offsets[number + 1]))
        return self.tokens[span], self.learnt[span]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row."""
        return np.diff(self.offsets)

    def taken(self, numbers: Iterable[int]) -> "TokenRows":
        """Return some of the rows, in the order they are named."""
        return TokenRows.joined([self.row(number) for number in numbers])

    def digest(self) -> str:
        """Return a text that is another one for other tokens, rows or marks."""
        return fingerprint(self.tokens, self.learnt, self.offsets)


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Makes tokens of conversations as a recipe asks."""

    template: Template
    data: SftData
    first: tuple[int, ...]
    """Tokens that the tokenizer puts before any text."""
    signs: re.Pattern[str]
    """Finds the texts of special tokens."""

    @classmethod
    def of(cls, template: Template, data: SftData) -> "Encoder":
        """Look at the tokenizer; one that cannot say where its tokens are or end is refused."""
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
        """Yield a row for each conversation that fits, or as far as it does; count the others."""
        waiting = iter(conversations)
        while some := list(islice(waiting, TOGETHER)):
            written = [self.template.written(each) for each in some]
            for each, row in zip(some, self._encoded(written), strict=True):
                fitted = self._fitted(row, each.location, tally)
                if fitted is not None:
                    tally.with_signs += any(self.signs.search(turn.whole) for turn in each.turns)
                    yield fitted

    def _encoded(self, written: Sequence[Written]) -> Iterator[tuple[Tokens, Learnt]]:
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

    def _fitted(
        self, row: tuple[Tokens, Learnt], location: str, tally: Tally
    ) -> tuple[Tokens, Learnt] | None:
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
    """Say which tokens hold a character that is learnt; `spans` are where each begins and ends.

    A token that straddles the edge of a response is learnt: else a part of the response were not.
    """
    pieces = written.pieces
    marks = np.repeat([piece.learnt for piece in pieces], [len(piece.text) for piece in pieces])
    if not len(spans) or not len(marks):
        return np.zeros(len(spans), np.bool_)
    before = np.concatenate([[0], np.cumsum(marks)])
    # Some tokenizers leave the space before a word out of its span, and a token of nothing but
    # spaces has none left. So a token reaches from where those before it ended.
    ends = np.maximum.accumulate(spans[:, 1])
    starts = np.minimum(spans[:, 0], np.concatenate([[0], ends[:-1]]))
    starts = np.minimum(starts, len(marks) - 1)
    learnt: Learnt = before[np.maximum(spans[:, 1], starts + 1)] > before[starts]
    return learnt


def padding_token(tokenizer: Any) -> int:
    """Return a token to fill rows with; any will do, as what is filled is never looked at."""
    own = tokenizer.pad_token_id
    return int(tokenizer.eos_token_id if own is None else own)


def first_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Return what the tokenizer puts before any text, such as a token for its beginning."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start])
    return ()
