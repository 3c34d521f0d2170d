"""Reconstruction terms: masked passes compared with the target's output or activations."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.kernels.launch import is_capturing
from narrowcast.workloads.decompose.components.masked import Draw, Source, has_kernels, new_seed
from narrowcast.workloads.decompose.importance.masks import Route, Routing, routes, site_masks
from narrowcast.workloads.decompose.losses.divergence import wide
from narrowcast.workloads.decompose.losses.terms import Loss, Step
from narrowcast.workloads.decompose.settings import MaskedTerm


class Masked(Loss, MaskedTerm):
    """A term of masked passes."""

    def run(self, step: Step, passed: Callable[..., Tensor], *, draws: bool) -> Tensor:
        """Call `passed` with a seed for its draws, or None; recompute it in the backward pass."""
        if self.recompute and torch.is_grad_enabled() and not step.held:
            return _recomputed(passed, step, draws=draws)
        return passed(None)

    def divergence(
        self,
        step: Step,
        route: Route,
        sources: Sequence[Source],
        deltas: Sequence[Source | None],
    ) -> Tensor:
        """Return how far one pass is from the target, per seed."""

        def passed(seed: Tensor | None) -> Tensor:
            masks = site_masks(route, step.lower, sources, deltas)
            made = step.masked(masks, copies=route.copies, seed=seed).output
            return step.output_divergence(made, copies=route.copies)

        return self.run(step, passed, draws=isinstance(sources[0], Draw))


class Routed(Masked):
    """A term of one or more masked passes, in which some sites compute with components."""

    routing: Routing = "all"
    probability: float | None = None
    """Of a site to compute with components, with `static_probability`."""
    batched: bool | None = False
    """Whether `layerwise` is one pass of a larger batch; None: on devices with kernels."""

    @property
    def name(self) -> str:
        """The kind, with the routing unless it is all sites."""
        ends = {"all": "", "layerwise": "_layerwise"}
        return f"{self.kind}{ends.get(self.routing, '_subset')}"

    def routes(self, step: Step) -> list[Route]:
        return routes(
            self.routing,
            step.lower,
            probability=self.probability or 0.0,
            batched=self.is_batched(step),
            stored=step.decomposition.fixed,
        )

    def is_batched(self, step: Step) -> bool:
        """Return whether `layerwise` is one pass."""
        if self.batched is None:
            return bool(has_kernels(step.lower[0].device.type))
        return self.batched

    def mean(
        self, step: Step, sources: Sequence[Source], deltas: Sequence[Source | None]
    ) -> Tensor:
        separate = [self.divergence(step, route, sources, deltas) for route in self.routes(step)]
        return separate[0] if len(separate) == 1 else torch.stack(separate).mean(0)


class Stochastic(Routed):
    """Random masks for unimportant components and for weight residuals."""

    kind: ClassVar[str] = "stochastic"

    def __call__(self, step: Step, ascents: int = 1) -> Tensor:
        return self.mean(step, *drawn(step))


class ImportanceMasked(Routed):
    """Importances as masks. A metric to watch: minimising it alone is easy to game."""

    kind: ClassVar[str] = "importance_masked"

    def __call__(self, step: Step, ascents: int = 1) -> Tensor:
        return self.mean(step, [0.0] * len(step.lower), [None] * len(step.lower))


class Unmasked(Masked):
    """All components, and no weight residual."""

    kind: ClassVar[str] = "unmasked"

    def __call__(self, step: Step, ascents: int = 1) -> Tensor:
        everything, none = [1.0] * len(step.lower), [None] * len(step.lower)
        (route,) = routes("all", step.lower)
        return self.divergence(step, route, everything, none)


class HiddenActivations(Masked):
    """The mean squared error of the inputs of sites, with random masks."""

    kind: ClassVar[str] = "hidden_activations"

    def __call__(self, step: Step, ascents: int = 1) -> Tensor:
        known = step.inputs
        if not known:
            with torch.no_grad():
                known = step.masked([None] * len(step.lower), inputs=True).inputs
        (route,) = routes("all", step.lower)
        vectors = [index for index, each in enumerate(known) if each.is_floating_point()]
        if not vectors:
            raise ConfigError(
                f"{self.name}: every site is an embedding, whose inputs are tokens. Leave this "
                "loss out."
            )

        def passed(seed: Tensor | None) -> Tensor:
            masks = site_masks(route, step.lower, *drawn(step))
            made = step.masked(masks, inputs=True, seed=seed).inputs
            off = [wide(made[each]) - wide(known[each].detach()) for each in vectors]
            return torch.stack([each.square().sum((1, 2)) for each in off]).sum(0)

        squares = self.run(step, passed, draws=True)
        return squares / sum(known[each][0].numel() for each in vectors)


def _recomputed(passed: Callable[..., Tensor], step: Step, *, draws: bool) -> Tensor:
    """Run a pass that the backward pass recomputes, with the same draws."""
    device = step.lower[0].device
    seed = new_seed(device) if draws and _draws_in_kernels(step) else None
    by_torch = draws and seed is None
    if by_torch and is_capturing(device):
        raise UnsupportedError(
            "recompute=true cannot be used in a CUDA graph with embeddings or float64, because "
            "their masks are drawn without a kernel and cannot be drawn again. Write "
            "cuda_graph=false, or recompute=false."
        )
    result: Tensor = checkpoint(passed, seed, use_reentrant=False, preserve_rng_state=by_torch)
    return result


def _draws_in_kernels(step: Step) -> bool:
    vectors = all(site.kind != "embedding" for site in step.decomposition.sites)
    narrow = all(each.dtype != torch.float64 for each in (*step.lower, step.target))
    return vectors and narrow and has_kernels(step.target.device.type)


def drawn(step: Step) -> tuple[list[Source], list[Source | None]]:
    """Return the sources of a stochastic pass; those of residuals are always uniform."""
    sites = len(step.lower)
    delta = Draw("continuous") if step.delta else None
    return [Draw(step.sampling)] * sites, [delta] * sites
