"""What a tuned policy may cost: `loss=0.5%, memory=20GiB, time=12ms`."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from narrowcast.errors import ConfigError

_SIZES = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "B": 1}
_SIZES |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = re.compile(r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-zA-Zµ%]*)")
EXAMPLES = {"loss": "loss=0.5%", "memory": "memory=20GiB", "time": "time=12ms or time=80%"}
"""How each term is written."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of a tuned policy; None leaves a quantity free."""

    loss: float | None = None
    """Share of the progress of a step that may be lost, and by how much the loss of the check run
    may be above that in fp32."""
    memory: int | None = None
    """Bytes on the device."""
    seconds: float | None = None
    """Seconds that the products of the linear layers may take per micro-batch."""
    time_share: float | None = None
    """The same, as a share of the time of the 16-bit preset."""

    def __str__(self) -> str:
        """Write the budget as it can be read again."""
        terms = []
        if self.loss is not None:
            terms.append(f"loss={self.loss * 100:.6g}%")
        if self.memory is not None:
            terms.append(f"memory={_size_text(self.memory)}")
        if self.seconds is not None:
            terms.append(f"time={self.seconds * 1e3:.6g}ms")
        if self.time_share is not None:
            terms.append(f"time={self.time_share * 100:.6g}%")
        return ", ".join(terms)

    @property
    def limits_time(self) -> bool:
        """Whether there is a limit on time."""
        return self.seconds is not None or self.time_share is not None

    @classmethod
    def parse(cls, text: "str | Budget | Iterable[str]") -> "Budget":
        """Read a budget: `loss=0.5%, memory=20GiB`, or several such texts."""
        if isinstance(text, Budget):
            return text
        texts = [text] if isinstance(text, str) else list(text)
        terms = [term for each in texts for term in re.split(r"[,\s]+", each) if term]
        if not terms:
            raise ConfigError(f"The budget is empty. Write e.g. {EXAMPLES['loss']}.")
        limits: dict[str, float] = {}
        for term in terms:
            name, equals, value = term.partition("=")
            if not equals or name not in EXAMPLES:
                raise ConfigError(
                    f"A budget has the terms {', '.join(EXAMPLES)}, got {term[:60]!r}. Write e.g. "
                    f"{EXAMPLES.get(name, EXAMPLES['loss'])}."
                )
            if name in limits or (name == "time" and {"seconds", "time_share"} & set(limits)):
                raise ConfigError(f"The budget sets {name} twice. Write it once.")
            key, limit = _limit(name, value, term)
            limits[key] = limit
        memory = limits.get("memory")
        return cls(
            loss=limits.get("loss"),
            memory=None if memory is None else round(memory),
            seconds=limits.get("seconds"),
            time_share=limits.get("time_share"),
        )


def _size_text(size: int) -> str:
    """Write a number of bytes in the largest unit that is exact."""
    for unit in ("TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB", "KB"):
        text = f"{size / _SIZES[unit.upper()]:.6g}"
        if "e" not in text and float(text) * _SIZES[unit.upper()] == size and float(text) >= 0.1:
            return text + unit
    return f"{size}B"


def _limit(name: str, value: str, term: str) -> tuple[str, float]:
    """Return which limit a term sets, and to what."""
    matched = _NUMBER.fullmatch(value.strip())
    number = float(matched[1]) if matched else math.nan
    unit = matched[2] if matched else ""
    if math.isfinite(number) and number > 0:
        if name == "loss" and unit == "%" and number < 100:
            return name, number / 100
        if name == "memory" and unit.upper() in _SIZES:
            return name, number * _SIZES[unit.upper()]
        if name == "time" and unit in _SECONDS:
            return "seconds", number * _SECONDS[unit]
        if name == "time" and unit == "%":
            return "time_share", number / 100
    raise ConfigError(f"The budget {term[:60]!r} cannot be read. Write e.g. {EXAMPLES[name]}.")
