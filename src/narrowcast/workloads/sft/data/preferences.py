"""Preference data: pairs of a chosen and a rejected response to one prompt, as batches.

Of a pair's two rows, the chosen one is first in `TokenRows`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from narrowcast.config.problems import shortened
from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.data.formats import (
    Conversation,
    Format,
    Turn,
    parse_tools,
    parse_turns,
)
from narrowcast.workloads.sft.data.packing import IGNORED, MULTIPLE
from narrowcast.workloads.sft.data.settings import FormatChoice
from narrowcast.workloads.sft.data.sources import Row
from narrowcast.workloads.sft.data.tokenised import (
    TOGETHER,
    Encoder,
    Learnt,
    Tally,
    TokenRows,
    Tokens,
    drop_reason,
)

SAME = "chosen and rejected are the same"
PAIRED = (
    Format("prompt+chosen+rejected", "prompt", chosen="chosen", rejected="rejected"),
    Format("chosen+rejected", chosen="chosen", rejected="rejected"),
)
"""Known formats: texts, or lists of messages."""


class Pair(NamedTuple):
    """Two conversations with the same prompt."""

    chosen: Conversation
    rejected: Conversation


class Pairs:
    """Rows of one source as pairs."""

    def __init__(self, rows: Iterable[Row], choice: FormatChoice) -> None:
        self._rows, self._choice = rows, choice
        self.format: Format | None = None
        """Known after the first row."""
        self.count = 0
        """Rows so far."""

    def __iter__(self) -> Iterator[Pair]:
        """Yield pairs; raise for a row with another format than the first."""
        for row in self._rows:
            self.count += 1
            form = self._format(row)
            if self.format not in (None, form):
                assert self.format is not None
                raise ConfigError(
                    f"{row.location} reads as {form.name}, but the rows before it read as "
                    f"{self.format.name}. Put each format into its own file."
                )
            self.format = form
            yield _pair(row, form)

    def _format(self, row: Row) -> Format:
        known = [each for each in PAIRED if self._choice in ("auto", each.name)]
        form = next((each for each in known if all(key in row.values for key in each.keys)), None)
        if form is None:
            columns = shortened(", ".join(map(str, row.values)) or "none", 200)
            raise ConfigError(
                f"{row.location} must have the columns {' or '.join(each.name for each in known)}, "
                f"got {columns}. Rename the columns, or remove dpo.loss_type to train on responses."
            )
        return form


def _pair(row: Row, form: Format) -> Pair:
    chosen, rejected = (_said(row, key) for key in (form.chosen, form.rejected))
    prompt: tuple[Turn, ...] = ()
    if form.instruction:
        prompt = _said(row, form.instruction, role="user")
    if chosen[0].role != "assistant" or rejected[0].role != "assistant":
        count = _shared_turns(chosen, rejected)
        if form.instruction and prompt[-1] not in chosen[:count]:
            raise ConfigError(
                f"{row.location}: {form.chosen} and {form.rejected} must start with the messages "
                f"of {form.instruction} or with a response, got a {chosen[0].role} message first. "
                f"Remove {form.instruction} if it is already in both."
            )
        prompt, chosen, rejected = chosen[:count], chosen[count:], rejected[count:]
    if not prompt:
        raise ConfigError(
            f"{row.location}: {form.chosen} and {form.rejected} must begin with the same messages, "
            "which are the prompt, or the row needs a column called prompt."
        )
    for name, answer in ((form.chosen, chosen), (form.rejected, rejected)):
        if not answer or answer[0].role != "assistant":
            raise ConfigError(
                f"{row.location}: {name} must answer the prompt with an assistant message, got "
                f"{answer[0].role if answer else 'no message'}."
            )
    tools = parse_tools(row)
    before = tuple(turn._replace(learnt=False) for turn in prompt)
    return Pair(
        Conversation((*before, *chosen), f"{row.location}, {form.chosen}", tools),
        Conversation((*before, *rejected), f"{row.location}, {form.rejected}", tools),
    )


def _said(row: Row, key: str, role: str = "assistant") -> tuple[Turn, ...]:
    match row.values[key]:
        case str() as text:
            return (Turn("user" if role == "user" else "assistant", text),)
        case list() as messages:
            return parse_turns(messages, f"{row.location}, {key}")
        case other:
            raise ConfigError(
                f"{row.location}: {key} must be text or a list of messages, got "
                f"{type(other).__name__}."
            )


def _shared_turns(one: Sequence[Turn], other: Sequence[Turn]) -> int:
    """Return how many first turns are equal, leaving at least one of each as the response."""
    most = min(len(one), len(other)) - 1
    return next((n for n in range(most) if one[n] != other[n]), most)


def pair_rows(
    pairs: Iterable[Pair], encoder: Encoder, tally: Tally
) -> Iterator[tuple[Tokens, Learnt]]:
    """Yield a chosen and a rejected row per pair of which both fit; count the others."""
    usable = _usable(pairs, encoder, tally)
    while some := list(islice(usable, TOGETHER // 2)):
        rows = encoder.encoded([encoder.template.written(each) for pair in some for each in pair])
        for pair in some:
            chosen = encoder.fitted(next(rows), pair.chosen.location, tally)
            other = next(rows)
            if chosen is None:
                continue
            rejected = encoder.fitted(other, pair.rejected.location, tally)
            if rejected is not None:
                tally.with_signs += any(map(encoder.has_signs, pair))
                yield chosen
                yield rejected


def _usable(pairs: Iterable[Pair], encoder: Encoder, tally: Tally) -> Iterator[Pair]:
    for pair in pairs:
        reasons = [drop_reason(each, encoder.data) for each in pair]
        same = SAME if pair.chosen.turns == pair.rejected.turns else ""
        if why := next(filter(None, [*reasons, same]), ""):
            tally.dropped[why] += 1
        else:
            yield pair


@dataclass(frozen=True, kw_only=True, eq=False)
class PairedRows:
    """Batches of pairs by number."""

    rows: TokenRows
    """The chosen and the rejected row of each pair in turn."""
    padding: int
    flat: bool = False
    """Whether all conversations of a batch are in one row, without padding between them."""
    first: int = 0
    """Number of the first pair in `pairs`: validation pairs follow the training pairs."""

    def __len__(self) -> int:
        return len(self.rows) // 2

    def __getitems__(self, numbers: list[int]) -> dict[str, Tensor]:
        """Return tokens, their positions, and which of them predict a token of a response.

        `input_ids` and `position_ids` are (rows, width): first all chosen, then all rejected rows.
        `places` and `targets` are (2, pairs, longest response). A place counts through all rows,
        and belongs to the token before the target. `pairs` has the numbers of the pairs.
        """
        order = [2 * number + side for side in (0, 1) for number in numbers]
        chosen = [self.rows.row(row) for row in order]
        lengths = [len(tokens) for tokens, _ in chosen]
        longest = sum(lengths) if self.flat else max(lengths)
        width = -(-longest // MULTIPLE) * MULTIPLE
        count = 1 if self.flat else len(chosen)
        tokens = np.full(count * width, self.padding, np.int64)
        positions = np.tile(np.arange(width), count)
        ends = np.cumsum(lengths)
        starts = ends - lengths if self.flat else np.arange(count) * width
        most = max(int(learnt.sum()) for _, learnt in chosen)
        # Targets that are filled in do not count. Their places differ, so that no two of them add
        # to the same gradient at once.
        wide = np.arange(-(-most // MULTIPLE) * MULTIPLE)
        places = (np.asarray(starts)[:, None] + wide) % (count * width)
        targets = np.full(places.shape, IGNORED, np.int64)
        for row, (start, (ids, learnt)) in enumerate(zip(starts, chosen, strict=True)):
            tokens[start : start + len(ids)] = ids
            positions[start : start + len(ids)] = np.arange(len(ids))
            where = np.flatnonzero(learnt)
            places[row, : len(where)] = start + where - 1
            targets[row, : len(where)] = ids[where]
        if self.flat:
            positions[ends[-1] :] = np.arange(width - ends[-1])
        arrays = {
            "input_ids": tokens.reshape(count, width),
            "position_ids": positions.reshape(count, width),
            "places": places.reshape(2, len(numbers), -1),
            "targets": targets.reshape(2, len(numbers), -1),
            "pairs": np.array(numbers, np.int64) + self.first,
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    @property
    def efficiency(self) -> float:
        """Share of non-padding tokens if all rows have the same width."""
        longest = int(self.rows.lengths.max(initial=1))
        return 1.0 if self.flat else len(self.rows.tokens) / (max(len(self.rows), 1) * longest)
