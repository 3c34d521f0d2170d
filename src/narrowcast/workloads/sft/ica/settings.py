"""The `ica` section of a recipe: functional networks and what to do with them."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from narrowcast.config.section import Section, check_conflicts

MOST_COMPONENTS = 10_000
MOST_SAMPLES = 10**6
MOST_CHANNELS = 10**7
LOUDEST = 1e6
MOST_ITERATIONS = 10**6
MOST_TOKENS = 10**6
SKIP_FIRST = 1
"""Tokens to skip per sequence: the first is an attention sink (99 % of SmolLM2's component 0)."""

MaskMode: TypeAlias = Literal["lesion", "preserve", "scale"]
OLD_NAMES: dict[str, MaskMode] = {"key": "lesion", "complement": "preserve"}
"""Names in FunctionalNetworksSFT."""
_SELECTORS = ("ica_percentile", "ica_zscore", "ica_top_k")
_WITH_TEMPLATE = (
    "mask_mode", "scale", "freeze", "ica_mask_layers", "ica_component_ids", "ica_template_path",
)  # fmt: skip
"""Settings that apply to networks of a file, too."""


class IcaSection(Section):
    """Functional networks to silence, keep alone, scale or freeze during training."""

    mask_mode: Literal["lesion", "preserve", "scale", "freeze", "key", "complement"] | None = Field(
        default=None,
        description="lesion (silence the networks), preserve (silence all other channels), scale "
        "(multiply them), freeze (same as freeze=true); none: no masks; key and complement are old "
        "names of lesion and preserve",
    )
    scale: float | None = Field(
        default=None, ge=-LOUDEST, le=LOUDEST, description="factor for mask_mode=scale"
    )
    freeze: bool = Field(
        default=False,
        description="freeze the weight rows of the networks, in addition to mask_mode",
    )
    ica_components: int = Field(
        default=5, ge=1, le=MOST_COMPONENTS, description="number of components"
    )
    ica_percentile: float = Field(
        default=98.0,
        ge=0,
        lt=100,
        description="a network has the channels whose loading is at or above this percentile",
    )
    ica_zscore: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="instead: channels this many standard deviations above the mean loading",
    )
    ica_two_sided: bool = Field(
        default=False, description="with ica_zscore: also channels as far below the mean"
    )
    ica_top_k: int | None = Field(
        default=None,
        ge=1,
        le=MOST_CHANNELS,
        description="instead: number of channels, largest first",
    )
    ica_mask_layers: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="layers to analyse and mask, such as 0,3,7 or 0:4,9:; none: all",
    )
    ica_dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = Field(
        default=None, description="dtype in which signals are stored; none: float32"
    )
    ica_component_ids: (
        Annotated[
            tuple[Annotated[int, Field(ge=0, le=MOST_COMPONENTS)], ...],
            Field(min_length=1, max_length=MOST_COMPONENTS),
        ]
        | None
    ) = Field(default=None, description="components whose networks are used; none: component 0")
    ica_template_path: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="file written by `narrowcast ica build`; none: find the networks in the model "
        "when the run starts",
    )
    samples: int = Field(
        default=100,
        ge=1,
        le=MOST_SAMPLES,
        description="training rows used to find the networks",
    )
    skip_first: int = Field(
        default=SKIP_FIRST,
        ge=0,
        le=MOST_TOKENS,
        description="tokens to skip at the start of each row, because of attention sinks",
    )
    clip_activations: float | None = Field(
        default=None,
        gt=50,
        lt=100,
        description="clip each channel to its percentiles 100 - p and p, such as 99, so that "
        "outlier rows do not dominate the components; none: no clipping",
    )
    max_iter: int = Field(
        default=200, ge=1, le=MOST_ITERATIONS, description="maximum iterations of the ICA solver"
    )
    site: Literal["mlp_output", "down_input"] = Field(
        default="mlp_output",
        description="channels: MLP outputs, or the inputs of the down projections, layer by layer",
    )

    @property
    def required_files(self) -> Mapping[str, tuple[str, ...]]:
        """The networks file."""
        return {"ica_template_path": tuple(filter(None, [self.ica_template_path]))}

    @property
    def mode(self) -> MaskMode | None:
        """The mask mode, with old names translated."""
        if self.mask_mode is None or self.mask_mode == "freeze":
            return None
        return OLD_NAMES.get(self.mask_mode) or self.mask_mode  # type: ignore[return-value]

    @property
    def freezes(self) -> bool:
        """Whether rows are frozen."""
        return self.freeze or self.mask_mode == "freeze"

    @property
    def wanted(self) -> bool:
        """Whether networks are needed at all."""
        return self.mode is not None or self.freezes

    @property
    def component_ids(self) -> tuple[int, ...]:
        """Components whose networks are used."""
        return (0,) if self.ica_component_ids is None else self.ica_component_ids

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Check for settings that would have no effect."""
        conflicts: list[tuple[tuple[str, ...], str]] = []
        if (self.scale is None) is (self.mode == "scale"):
            text = "mask_mode=scale and the factor scale go together; write both or neither"
            conflicts.append((("mask_mode", "scale"), text))
        fields = type(self).model_fields
        inputs = [name for name in fields if getattr(self, name) != fields[name].default]
        if not self.wanted:
            unused = [name for name in inputs if name not in ("mask_mode", "scale", "freeze")]
            if unused:
                text = (
                    f"{', '.join(unused)} without mask_mode or freeze=true has no effect; add one "
                    "of them, or leave it out"
                )
                conflicts.append((("mask_mode", *unused), text))
        if self.ica_template_path is not None:
            for name in [each for each in inputs if each not in _WITH_TEMPLATE]:
                text = f"ica_template_path already has networks; leave {name} or the path out"
                conflicts.append((("ica_template_path", name), text))
        if len(selectors := [name for name in _SELECTORS if name in inputs]) > 1:
            text = f"{' and '.join(selectors)} select channels in different ways; keep one"
            conflicts.append((tuple(selectors), text))
        if self.ica_two_sided and self.ica_zscore is None:
            text = "ica_two_sided needs ica_zscore; set it, or leave ica_two_sided out"
            conflicts.append((("ica_two_sided", "ica_zscore"), text))
        check_conflicts(conflicts)
        return self
