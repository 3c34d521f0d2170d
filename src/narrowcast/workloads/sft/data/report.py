"""Summary of the prepared data, in numbers and in sentences."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Tally:
    """What happens to rows on their way, counted as it happens."""

    formats: set[str] = field(default_factory=set)
    rows_read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    with_signs: int = 0

    @staticmethod
    def is_sound(value: Any) -> bool:
        """Say whether `to_json` could have returned it."""
        match value:
            case {
                "formats": list(formats),
                "rows_read": int(),
                "dropped": dict(dropped),
                "cut": int(),
                "with_signs": int(),
            }:
                texts = [*formats, *dropped]
                counts = all(isinstance(count, int) for count in dropped.values())
                return len(value) == 5 and counts and all(isinstance(each, str) for each in texts)
            case _:
                return False

    def to_json(self) -> dict[str, Any]:
        """Return what a `DataReport` takes of it."""
        return {**asdict(self), "formats": sorted(self.formats), "dropped": dict(self.dropped)}


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """Rows read, dropped and kept, and what they hold."""

    formats: tuple[str, ...]
    """How rows were read; one for each kind of source."""
    template: str
    rows_read: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Rows that are not used, by why."""
    cut: int = 0
    """Rows that lost their end to max_seq_length."""
    with_signs: int = 0
    """Rows whose words hold the text of a special token, which the tokenizer reads as that."""
    train_rows: int = 0
    validation_rows: int = 0
    repeated_rows: int = 0
    """Rows to validate on that are trained on too."""
    tokens: int = 0
    """To train on."""
    learnt_tokens: int = 0
    packs: int = 0
    """Rows of tokens to train on, of one conversation or of several."""
    efficiency: float = 1.0
    """The share of rows of full width that is not filling."""
    cached: bool = False
    """The tokens were read from a file that an earlier run wrote."""
    notes: tuple[str, ...] = ()
    """What was decided, where it might surprise."""

    @property
    def response_share(self) -> float:
        """The share of tokens that are learnt."""
        return self.learnt_tokens / max(self.tokens, 1)

    def to_json(self) -> dict[str, Any]:
        """Return it as a file keeps it."""
        return {**asdict(self), "response_share": self.response_share}

    def lines(self) -> list[str]:
        """Return the summary as sentences."""
        formats = ", ".join(self.formats)
        said = [
            f"{self.rows_read:,} rows read as {formats}, rendered with template {self.template}: "
            f"{self.train_rows:,} training rows, {self.validation_rows:,} validation rows",
            f"{self.tokens:,} training tokens, loss on {self.response_share:.1%} of them",
        ]
        if self.packs < self.train_rows:
            said.append(f"packed into {self.packs:,} rows, {self.efficiency:.1%} full")
        said += [f"{count:,} rows dropped: {why}" for why, count in self.dropped.items()]
        if self.cut:
            said.append(
                f"{self.cut:,} rows truncated at max_seq_length, which cuts their responses"
            )
        if self.with_signs:
            said.append(
                f"{self.with_signs:,} rows contain the text of special tokens, which the tokenizer "
                "reads as special tokens"
            )
        if self.repeated_rows:
            said.append(f"{self.repeated_rows:,} validation rows are also training rows")
        return [*said, *self.notes]
