"""Which sites compute with their components in a pass, at which rows, and with which masks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from narrowcast.kernels.launch import is_capturing
from narrowcast.workloads.decompose.components.masked import SiteMask, Source

Routing = Literal["all", "layerwise", "uniform_k_subset", "static_probability"]
Fixed = dict[Any, Tensor]
"""What passes read and never change, by what it was made from."""


@dataclass(frozen=True, eq=False)
class Route:
    """One pass: the sites that compute with components in it, and at which rows."""

    active: tuple[int, ...]
    """Other sites are as in the target."""
    routed: Tensor | None = None
    """Where each site computes with components, bool of (sites, seeds, rows); None: everywhere."""
    copies: int = 1
    """How many times the batch stands in the pass, one after another."""


def routes(
    routing: Routing,
    importance: Sequence[Tensor],
    *,
    probability: float = 0.0,
    batched: bool = False,
    stored: Fixed | None = None,
) -> list[Route]:
    """Return the passes of a routing: one, or for `layerwise` one per site unless `batched`."""
    sites, (seeds, rows, _) = len(importance), importance[0].shape
    device, every = importance[0].device, tuple(range(len(importance)))
    match routing:
        case "all":
            return [Route(every)]
        case "uniform_k_subset":
            return [Route(every, uniform_k_subset(sites, seeds, rows, device))]
        case "static_probability":
            return [Route(every, torch.rand(sites, seeds, rows, device=device) < probability)]
        case "layerwise" if batched and sites > 1:
            return [fixed_route(["layerwise"], importance, saved=stored)]
        case "layerwise":
            return [Route((site,)) for site in every]


def fixed_route(
    routings: Sequence[Literal["all", "layerwise"]],
    importance: Sequence[Tensor],
    *,
    saved: Fixed | None = None,
) -> Route:
    """Return one pass with a copy that all sites compute, or one copy per site.

    The route is kept in `saved`: a tensor made during CUDA graph capture is filled only on replay.
    """
    sites, (seeds, rows, _) = len(importance), importance[0].shape
    device = importance[0].device
    requested = (tuple(routings), sites, seeds, rows, device)
    if saved is None or torch.compiler.is_compiling():
        routed = _computed_by(*requested)
    elif requested in saved:
        routed = saved[requested]
    else:
        with torch.inference_mode(mode=False):  # kept for training too
            routed = _computed_by(*requested)
        if not is_capturing(device):
            saved[requested] = routed
    return Route(tuple(range(sites)), routed, copies=routed.shape[-1] // rows)


def _computed_by(
    routings: tuple[Routing, ...], sites: int, seeds: int, rows: int, device: torch.device
) -> Tensor:
    """Return which rows of all copies each site computes, (sites, seeds, copies · rows)."""
    one = torch.eye(sites, dtype=torch.bool, device=device)
    every = torch.ones(sites, 1, dtype=torch.bool, device=device)
    copies = torch.cat([every if routing == "all" else one for routing in routings], 1)
    whole = copies[:, None, :, None].expand(sites, seeds, copies.shape[1], rows)
    return whole.reshape(sites, seeds, -1)


def uniform_k_subset(sites: int, seeds: int, rows: int, device: torch.device) -> Tensor:
    """Draw a number of sites from 1 to all per row, and then which."""
    count = torch.randint(1, sites + 1, (seeds, rows), device=device)
    # What sorts random numbers is a permutation, all of them with even chances.
    order = torch.rand(sites, seeds, rows, device=device).argsort(0)
    return order < count


def site_masks(
    route: Route,
    importance: Sequence[Tensor],
    sources: Sequence[Source],
    deltas: Sequence[Source | None],
) -> list[SiteMask | None]:
    """Return the masks of a pass, for as many copies of the batch as it has."""
    masks: list[SiteMask | None] = [None] * len(importance)
    for site in route.active:
        masks[site] = SiteMask(
            _repeated(importance[site], route.copies),
            _repeated(sources[site], route.copies),
            _repeated(deltas[site], route.copies),
            None if route.routed is None else route.routed[site],
        )
    return masks


MaskInputs = TypeVar("MaskInputs", Tensor, Source, Source | None)


def _repeated(inputs: MaskInputs, copies: int) -> MaskInputs:
    """Repeat rows once per copy; what broadcasts over rows stays."""
    if copies == 1 or not isinstance(inputs, Tensor) or inputs.shape[1] == 1:
        return inputs
    return inputs.repeat(1, copies, *[1] * (inputs.dim() - 2))
