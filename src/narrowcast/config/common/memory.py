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
        description="what the backward pass computes again: whole blocks, or all in them but "
        "products and attention (selective)",
    )
    offload: Annotated[
        tuple[Literal["optimizer", "activations"], ...], Field(max_length=MOST_ENTRIES)
    ] = Field(
        default=(),
        description="what waits in pinned host memory: the optimizer's moments, what blocks keep",
    )
    blocks: tuple[str, ...] = Field(
        default=(),
        max_length=MOST_ENTRIES,
        description="globs of the modules that are blocks; none: modules of one class in a list",
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
                "no block-wise memory saving is active; set activation_checkpointing=blocks too, "
                "or leave blocks out"
            )
            check_conflicts([(("blocks", "activation_checkpointing"), text)])
        return self
