"""A target with components in the place of its sites; what a pass does is said where it is called.

Modules are replaced once, where they are, and no hook is set: a pass hands its masks over for as
long as it lasts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.components.masked import (
    Draw,
    SiteMask,
    has_kernels,
    new_seed,
    product,
)
from narrowcast.workloads.decompose.components.module import Cache, ComponentModule, Line, Pass
from narrowcast.workloads.decompose.components.sites import IDENTITY, Site
from narrowcast.workloads.decompose.components.weights import make_components


@dataclass(frozen=True)
class Passed:
    """What a pass gave."""

    output: Tensor
    inputs: list[Tensor]
    """Of each site (seeds, rows, d_in), or tokens of (seeds, rows); empty where none was kept."""
    acts: list[Tensor]
    """Of each site's components (seeds, rows, C); empty where none was kept."""


class Decomposition(nn.Module):
    """A frozen target, and components that can compute its sites instead."""

    def __init__(
        self,
        target: nn.Module,
        sites: Sequence[Site],
        *,
        seeds: int = 1,
        tied: Mapping[str, str] | None = None,
        output: Callable[[Any], Tensor] | str | None = None,
    ) -> None:
        """Replace the modules of `target` in place.

        `tied` names sites that are the transpose of another, whose components they share. `output`
        says what of the target's result is compared: an attribute, `idx_0`, a function, or all.
        """
        super().__init__()
        self.sites = tuple(sites)
        self.seeds = seeds
        self.target = target.requires_grad_(False).eval()
        self._output = output
        self._line = Line()
        self.fixed: dict[Any, Tensor] = {}
        """What passes read and never change, such as routes; made once, by whoever asks first."""
        self._replace()
        named = {site.name: site for site in self.sites}
        device = self.module(self.sites[0]).weight.device
        self.components = make_components(named, seeds, tied=tied or {}, device=device)

    def train(self, mode: bool = True) -> "Decomposition":
        """Train components; the target computes as where it is used."""
        super().train(mode)
        self.target.eval()
        return self

    def module(self, site: Site) -> ComponentModule:
        """Return what stands in a site's place."""
        result = self.target.get_submodule(site.name)
        assert isinstance(result, ComponentModule)
        return result

    def forward(
        self,
        *args: Any,
        masks: Sequence[SiteMask | None] | None = None,
        cache: Cache = "none",
        frozen: bool = False,
        seed: Tensor | None = None,
        **kwargs: Any,
    ) -> Passed:
        """Call the target with components where there is a mask; without any it is the target.

        Components that are `frozen` get no gradient, and none is computed: for passes whose masks
        alone are looked for. Kernels draw from `seed`, where a pass is to draw what another did.
        """
        if masks is not None and len(masks) != len(self.sites):
            raise ConfigError(
                f"masks must be one per site, got {len(masks)} for {len(self.sites)} sites."
            )
        chosen = [None] * len(self.sites) if masks is None else list(masks)
        drawn = _seed(chosen) if seed is None else seed
        current = Pass(chosen, self._pairs(frozen), cache, drawn)
        self._line.current = current
        try:
            raw = self.target(*args, **kwargs)
        finally:
            self._line.current = None
        self._check_visits(current)
        return Passed(_taken(raw, self._output), _ordered(current.inputs), _ordered(current.acts))

    def deltas(self) -> list[Tensor]:
        """Return what components leave of each weight, (seeds, d_out, d_in), in fp32 or wider."""
        weights = [self.module(site).weight_t for site in self.sites]
        with torch.autocast(weights[0].device.type, enabled=False):
            return [
                (_wide(weight) - product(_wide(each.V), _wide(each.U))).mT
                for weight, each in zip(weights, self.components.values(), strict=True)
            ]

    def _pairs(self, frozen: bool) -> list[tuple[Tensor, Tensor]]:
        pairs = [(each.V, each.U) for each in self.components.values()]
        return [(V.detach(), U.detach()) for V, U in pairs] if frozen else pairs

    def _check_visits(self, current: Pass) -> None:
        for index, (site, mask) in enumerate(zip(self.sites, current.masks, strict=True)):
            if index not in current.visited and (mask is not None or current.cache != "none"):
                raise ConfigError(
                    f"The target does not call {site.name} in a forward pass. Remove it from the "
                    "sites."
                )

    def _replace(self) -> None:
        for index, site in enumerate(self.sites):
            if site.kind != "identity":
                self._insert(site.name).index = index
        for index, site in enumerate(self.sites):
            if site.kind == "identity":
                self._precede(index, site)

    def _insert(self, name: str) -> ComponentModule:
        """Return what stands at a name, put there if the target's own module still is."""
        matched = self.target.get_submodule(name)
        if isinstance(matched, ComponentModule):
            return matched
        placed = ComponentModule.of(name, matched, seeds=self.seeds, line=self._line)
        parent, _, last = name.rpartition(".")
        setattr(self.target.get_submodule(parent), last, placed)
        return placed

    def _precede(self, index: int, site: Site) -> None:
        after = self._insert(site.name.removesuffix(f".{IDENTITY}"))
        placed = ComponentModule.identity(
            site.name, site.d_in, after.weight, seeds=self.seeds, line=self._line
        )
        placed.index = index
        setattr(after, IDENTITY, placed)


def _seed(masks: Sequence[SiteMask | None]) -> Tensor | None:
    """Return one seed for all sites that draw in kernels."""
    for mask in masks:
        drawn = mask is not None and (isinstance(mask.source, Draw) or isinstance(mask.delta, Draw))
        if mask is not None and drawn and has_kernels(mask.importance.device.type):
            return new_seed(mask.importance.device)
    return None


def _ordered(stored: dict[int, Tensor]) -> list[Tensor]:
    return [stored[index] for index in sorted(stored)]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _taken(raw: Any, output: Callable[[Any], Tensor] | str | None) -> Tensor:
    """Return the tensor of a target's result that is compared."""
    result = raw
    if callable(output):
        result = output(raw)
    elif output is not None and output.startswith("idx_"):
        result = raw[int(output.removeprefix("idx_"))]
    elif output is not None:
        result = getattr(raw, output, None)
    if not isinstance(result, Tensor):
        raise ConfigError(
            f"output={output!r} must name a tensor of the target's {type(raw).__name__}. Name the "
            "attribute that is one, such as logits, or idx_0 for the first of several."
        )
    return result
