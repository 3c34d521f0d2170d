"""What every group of settings is, and how settings that exclude each other are reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from narrowcast.config.limits import LONGEST_TEXT, MOST_STEPS

Steps: TypeAlias = Annotated[int, Field(ge=1, le=MOST_STEPS)]
StepsOrZero: TypeAlias = Annotated[int, Field(ge=0, le=MOST_STEPS)]

Conflict: TypeAlias = tuple[tuple[str, ...], str]
"""Keys of settings that are fine alone but not together, relative to their section, and a fix."""


def check_conflicts(conflicts: list[Conflict]) -> None:
    """Raise, from a validator, if there is a conflict."""
    if conflicts:
        text = "; ".join(text for _, text in conflicts)
        raise PydanticCustomError("conflict", "{text}", {"text": text, "conflicts": conflicts})


class Section(BaseModel):
    """A group of settings: unknown keys raise, types are not converted, values are fixed."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        str_max_length=LONGEST_TEXT,
        defer_build=True,  # on first use: most commands never validate a recipe
    )

    def conflicts(self) -> Iterable[Conflict]:
        """Yield the conflicts between settings of this section."""
        return ()

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        check_conflicts(list(self.conflicts()))
        return self

    @property
    def depends_on_steps(self) -> bool:
        """Whether a step does something else when the run has another number of steps."""
        return False

    @property
    def required_files(self) -> Mapping[str, tuple[str, ...]]:
        """Paths and globs of local files a run reads, by setting; checked before it builds."""
        return {}
