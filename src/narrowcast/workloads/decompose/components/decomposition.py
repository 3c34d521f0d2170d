"""A target whose sites are replaced by components; masks are an argument of the call, not hooks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

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


class Components(nn.Module):
    """The components of a site: the columns of V, read from, and the rows of U, written to."""

    def __init__(self, site: Site, seeds: int, *, device: torch.device | None = None) -> None:
        super().__init__()
        count = site.components
        self.V = nn.Parameter(torch.randn(seeds, site.d_in, count, device=device) / site.d_in**0.5)
        self.U = nn.Parameter(torch.randn(seeds, count, site.d_out, device=device) / count**0.5)

    def pair(self, full: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
        """Return V and U from the full-precision weights, by the ids of parameters."""
        return full[id(self.V)], full[id(self.U)]


class TiedComponents(nn.Module):
    """The components of another site, transposed."""

    def __init__(self, of: Components) -> None:
        super().__init__()
        self._owner = (of,)  # in a tuple it is no submodule, whose weights would be kept again

    @property
    def V(self) -> Tensor:
        return self._owner[0].U.mT

    @property
    def U(self) -> Tensor:
        return self._owner[0].V.mT

    def pair(self, full: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
        V, U = self._owner[0].pair(full)
        return U.mT, V.mT


class ComponentDict(nn.Module):
    """Components by the names of their sites, in the order of these."""

    def __init__(self, components: Mapping[str, Components | TiedComponents]) -> None:
        super().__init__()
        self.names = tuple(components)
        for name, each in components.items():
            self.add_module(_key(name), each)

    def __getitem__(self, name: str) -> Components | TiedComponents:
        return cast(Components | TiedComponents, self._modules[_key(name)])

    def values(self) -> list[Components | TiedComponents]:
        return [self[name] for name in self.names]

    def items(self) -> list[tuple[str, Components | TiedComponents]]:
        return [(name, self[name]) for name in self.names]


def make_components(
    sites: Mapping[str, Site], seeds: int, *, tied: Mapping[str, str], device: torch.device
) -> ComponentDict:
    """Draw components for all sites but those that are tied to another's."""
    for name, other in tied.items():
        _check_tie(sites, name, other, tied)
    own = {
        name: Components(site, seeds, device=device)
        for name, site in sites.items()
        if name not in tied
    }
    return ComponentDict(
        {name: TiedComponents(own[tied[name]]) if name in tied else own[name] for name in sites}
    )


def _check_tie(sites: Mapping[str, Site], name: str, other: str, tied: Mapping[str, str]) -> None:
    for each in (name, other):
        if each not in sites:
            raise ConfigError(f"tied must name sites ({', '.join(sites)}), got {each}.")
    if other in tied:
        raise ConfigError(
            f"{name} is tied to {other}, which is itself tied to {tied[other]}. Tie both to "
            f"{tied[other]}."
        )
    one, two = sites[name], sites[other]
    turned = (two.d_out, two.d_in, two.components)
    if (one.d_in, one.d_out, one.components) != turned:
        raise ConfigError(
            f"{name} ({one.d_in} x {one.d_out}, {one.components} components) is not the transpose "
            f"of {other} ({two.d_in} x {two.d_out}, {two.components}). Tie a matrix to its "
            "transpose, with the same number of components, or write sites.tied=false."
        )


def _key(name: str) -> str:
    return name.replace(".", "/")


@dataclass(frozen=True)
class Passed:
    """The output of a pass, and what it cached."""

    output: Tensor
    inputs: list[Tensor]
    """Per site (seeds, rows, d_in), or tokens of (seeds, rows); empty if not cached."""
    acts: list[Tensor]
    """Per site (seeds, rows, C); empty if not cached."""


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
        """Replace the modules of `target` in place; `output` selects the tensor of its result."""
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
        super().train(mode)
        self.target.eval()
        return self

    def module(self, site: Site) -> ComponentModule:
        """Return the module of a site."""
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
        """Call the target with components where there is a mask; `frozen` ones get no gradient."""
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
        """Return the weight residual of each site, (seeds, d_out, d_in), in fp32 or wider."""
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
        """Return the component module at a name; insert it if it is not there."""
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
