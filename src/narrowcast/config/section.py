"""What every group of settings is, and how settings that exclude each other are refused."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

from narrowcast.config.limits import LONGEST_TEXT


def check_conflicts(conflicts: list[tuple[tuple[str, ...], str]]) -> None:
    """Raise, from a validator, for settings that are fine alone but not together.

    Each conflict is the keys that take part, relative to the section, and what to do about it. From
    the validator of a single setting no key is given: it is that one.
    """
    if conflicts:
        text = "; ".join(text for _, text in conflicts)
        raise PydanticCustomError("conflict", "{text}", {"text": text, "conflicts": conflicts})


class Section(BaseModel):
    """A group of settings: unknown keys are refused, types are not converted, values are fixed."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        str_max_length=LONGEST_TEXT,
        defer_build=True,  # on first use: most commands never validate a recipe
    )

    @property
    def depends_on_steps(self) -> bool:
        """Whether a step does something else when the run has another number of steps."""
        return False

    @property
    def required_files(self) -> Mapping[str, tuple[str, ...]]:
        """Paths and globs of local files a run reads, by setting; checked before it builds."""
        return {}
