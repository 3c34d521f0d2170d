"""Who takes part: a contender is a name, a kind of builder, and the options it is built with."""

import difflib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from narrowcast.errors import RecipeError

POLICY_SEPARATOR = "|"
"""Between two policies in one word: a policy itself has commas, semicolons and colons."""

COPY = "device-copy"
"""The contender whose rate is the ceiling of all that only move memory."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One row of a table."""

    name: str
    kind: str
    """What builds it, a key of the bench's builders."""
    options: Mapping[str, Any] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    """Modules of which one must be importable; none: nothing but torch is needed."""
    distribution: str = ""
    """The package whose version the figures give."""
    note: str = ""
    """What a reader must know to compare it."""

    @property
    def missing(self) -> str:
        """Why it cannot be started here, or nothing."""
        if not self.requires or any(importlib.util.find_spec(m) for m in self.requires):
            return ""
        return f"{self.distribution or self.requires[0]} is not installed"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self) | {"options": dict(self.options), "requires": list(self.requires)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Contender":
        """Return the contender that `to_json` described."""
        return cls(**{**found, "requires": tuple(found["requires"])})


def policies_from(text: str) -> tuple[str, ...]:
    """Take apart `bf16 | bf16, params=bf16, master=split`; `none` stands for no policy."""
    if text.strip() in ("", "none"):
        return ()
    return tuple(part.strip() for part in text.split(POLICY_SEPARATOR) if part.strip())


def chosen(text: str, known: Mapping[str, Contender]) -> tuple[Contender, ...]:
    """Return the contenders named in `a,b,…`; `all` stands for all, `none` for none."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words in (["none"], []):
        return ()
    if words == ["all"]:
        return tuple(known.values())
    return tuple(_named(word, known) for word in words)


def ours(policies: Iterable[str], *, kind: str = "narrowcast") -> tuple[Contender, ...]:
    """Return one contender for each policy."""
    return tuple(
        Contender(name=f"narrowcast {text}", kind=kind, options={"policy": text})
        for text in policies
    )


def unlike(contenders: Sequence[Contender]) -> tuple[Contender, ...]:
    """Refuse an empty list; number contenders of one name, so that each has a row of its own."""
    if not contenders:
        raise RecipeError("nothing to measure: both --peers and --policies are none; name one")
    seen: dict[str, int] = {}
    told = []
    for contender in contenders:
        seen[contender.name] = times = seen.get(contender.name, 0) + 1
        name = contender.name if times == 1 else f"{contender.name} ({times})"
        told.append(Contender(**{**vars(contender), "name": name}))
    return tuple(told)


def baseline_of(contenders: Sequence[Contender], asked: str | None) -> Contender:
    """Return the contender called `asked`, or the first one that can run here."""
    if asked is None:
        return next((c for c in contenders if not c.missing), contenders[0])
    by_name = {c.name: c for c in contenders}
    policy = f"narrowcast {asked}"
    return by_name[policy] if policy in by_name else _named(asked, by_name)


def _named(word: str, known: Mapping[str, Contender]) -> Contender:
    if word in known:
        return known[word]
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}"
    raise RecipeError(f"no contender is called {word!r}; {hint}")
