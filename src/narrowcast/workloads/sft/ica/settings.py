"""The `ica` section of a recipe: which functional networks, and what is done with them."""

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
"""Tokens of a sequence that are left out: the first is an attention sink in many models. It is 99 %
of component 0 of SmolLM2-135M, and none of any component once it is left out."""

MaskMode: TypeAlias = Literal["lesion", "preserve", "scale"]
OLD_NAMES: dict[str, MaskMode] = {"key": "lesion", "complement": "preserve"}
"""What an earlier system calls them."""


class IcaSection(Section):
    """Functional networks: silenced, kept alone, made louder or frozen in training."""

    mask_mode: Literal["lesion", "preserve", "scale", "freeze", "key", "complement"] | None = Field(
        default=None,
        description="lesion (silence the networks), preserve (silence all else), scale (multiply "
        "them), freeze (their rows do not move; as freeze=true alone); none: nothing; key and "
        "complement are old names of lesion and preserve",
    )
    scale: float | None = Field(
        default=None, ge=-LOUDEST, le=LOUDEST, description="factor of mask_mode=scale"
    )
    freeze: bool = Field(
        default=False,
        description="keep the rows of the networks from moving, beside any mask_mode",
    )
    ica_components: int = Field(
        default=5, ge=1, le=MOST_COMPONENTS, description="components to look for"
    )
    ica_percentile: float = Field(
        default=98.0,
        ge=0,
        lt=100,
        description="channels of a network: those with a loading at or above this percentile",
    )
    ica_zscore: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="instead: those so many standard deviations above the mean",
    )
    ica_two_sided: bool = Field(
        default=False, description="with ica_zscore: also those as far below it"
    )
    ica_top_k: int | None = Field(
        default=None, ge=1, le=MOST_CHANNELS, description="instead: so many, the heaviest"
    )
    ica_mask_layers: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="layers that are looked at and masked, such as 0,3,7 or 0:4,9:; none: all",
    )
    ica_dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = Field(
        default=None, description="what signals are stored in; none: float32"
    )
    ica_component_ids: (
        Annotated[
            tuple[Annotated[int, Field(ge=0, le=MOST_COMPONENTS)], ...],
            Field(min_length=1, max_length=MOST_COMPONENTS),
        ]
        | None
    ) = Field(default=None, description="components whose networks are used; none: 0")
    ica_template_path: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="file of networks, of `narrowcast ica build`; none: look for them in the model "
        "as it is when the run begins",
    )
    samples: int = Field(
        default=100,
        ge=1,
        le=MOST_SAMPLES,
        description="rows of the training data that the search listens to",
    )
    skip_first: int = Field(
        default=SKIP_FIRST,
        ge=0,
        le=MOST_TOKENS,
        description="first tokens of each row that the search leaves out: attention sinks",
    )
    clip_activations: float | None = Field(
        default=None,
        gt=50,
        lt=100,
        description="clip each channel to between its percentiles 100 - p and p, such as 99, so "
        "that loud rows do not decide the components; none: no clipping",
    )
    max_iter: int = Field(
        default=200, ge=1, le=MOST_ITERATIONS, description="iterations of the ICA solver at most"
    )
    site: Literal["mlp_output", "down_input"] = Field(
        default="mlp_output",
        description="channels: what MLPs put out, or the neurons inside them, layer by layer",
    )

    @property
    def required_files(self) -> Mapping[str, tuple[str, ...]]:
        """The file of networks."""
        return {"ica_template_path": tuple(filter(None, [self.ica_template_path]))}

    @property
    def mode(self) -> MaskMode | None:
        """What masks do, by its name of today."""
        if self.mask_mode is None or self.mask_mode == "freeze":
            return None
        return OLD_NAMES.get(self.mask_mode) or self.mask_mode  # type: ignore[return-value]

    @property
    def freezes(self) -> bool:
        """Whether rows are kept from moving."""
        return self.freeze or self.mask_mode == "freeze"

    @property
    def wanted(self) -> bool:
        """Whether networks are needed at all."""
        return self.mode is not None or self.freezes

    @property
    def component_ids(self) -> tuple[int, ...]:
        """The components whose networks are used."""
        return (0,) if self.ica_component_ids is None else self.ica_component_ids

    @model_validator(mode="after")
    def _is_obeyed(self) -> Self:
        """Refuse a setting that another one would leave without effect."""
        conflicts: list[tuple[tuple[str, ...], str]] = []
        if (self.scale is None) is (self.mode == "scale"):
            text = "mask_mode=scale and a factor, scale, go together; write both, or neither"
            conflicts.append((("mask_mode", "scale"), text))
        fields = type(self).model_fields
        inputs = [name for name in fields if getattr(self, name) != fields[name].default]
        if not self.wanted:
            unused = [name for name in inputs if name not in ("mask_mode", "scale", "freeze")]
            if unused:
                text = (
                    f"nothing is done with networks; write mask_mode or freeze=true, or leave "
                    f"{', '.join(unused)} out"
                )
                conflicts.append((("mask_mode", *unused), text))
        if self.ica_template_path is not None:
            for name in (*_OF_THE_SEARCH, *_SELECTORS):
                if name in inputs:
                    text = f"ica_template_path has networks; leave {name} out, or the path"
                    conflicts.append((("ica_template_path", name), text))
        if len(selectors := [name for name in _SELECTORS[:3] if name in inputs]) > 1:
            text = f"{' and '.join(selectors)} select channels in different ways; keep one"
            conflicts.append((tuple(selectors), text))
        if self.ica_two_sided and self.ica_zscore is None:
            text = "ica_two_sided is for ica_zscore; write that, or leave it out"
            conflicts.append((("ica_two_sided", "ica_zscore"), text))
        check_conflicts(conflicts)
        return self


_OF_THE_SEARCH = (
    "ica_components",
    "ica_dtype",
    "samples",
    "skip_first",
    "clip_activations",
    "max_iter",
    "site",
)
_SELECTORS = ("ica_percentile", "ica_zscore", "ica_top_k", "ica_two_sided")
