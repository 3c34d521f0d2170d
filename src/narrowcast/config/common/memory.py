"""The section of a recipe that says what is done to need less memory on the device."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from narrowcast.config.limits import MOST_ENTRIES
from narrowcast.config.section import Section, check_conflicts


class MemorySection(Section):
    """What is computed again or kept on the host, to need less memory on the device."""

    activation_checkpointing: Literal["none", "blocks", "selective"] = Field(
        default="none",
        description=(
            "what the backward pass recomputes: none, whole blocks, or everything in them "
            "except matmuls and attention (selective)"
        ),
    )
    offload: Annotated[
        tuple[Literal["optimizer", "activations"], ...], Field(max_length=MOST_ENTRIES)
    ] = Field(
        default=(),
        description="what to keep in pinned host memory: optimizer state, activations",
    )
    blocks: tuple[str, ...] = Field(
        default=(),
        max_length=MOST_ENTRIES,
        description=(
            "globs of the modules that are blocks; empty: detect lists of modules of one class"
        ),
    )

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Refuse to name blocks by which nothing is done."""
        if (
            self.blocks
            and self.activation_checkpointing == "none"
            and "activations" not in self.offload
        ):
            text = (
                "blocks has no effect without block-wise memory saving. Set "
                "activation_checkpointing=blocks too, or leave blocks out"
            )
            check_conflicts([(("blocks", "activation_checkpointing"), text)])
        return self
