"""How far masked passes are from the target's output, or from its activations on the way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.kernels.launch import is_capturing
from narrowcast.workloads.decompose.components.fused import has_kernels, new_seed
from narrowcast.workloads.decompose.components.mask import Draw, Source
from narrowcast.workloads.decompose.importance.masks import Route, Routing, routes, site_masks
from narrowcast.workloads.decompose.losses.divergence import wide
from narrowcast.workloads.decompose.losses.terms import Loss, Step


@dataclass(frozen=True, kw_only=True)
class Masked(Loss):
    """A term of masked passes."""

    recompute: bool = False
    """Whether the backward pass computes the passes again, and keeps none of their activations."""

    def run(self, step: Step, passed: Callable[..., Tensor], *, draws: bool) -> Tensor:
        """Return what `passed` does, given the seed to draw from, or None for any."""
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
        """Return how far one pass is from the target, for every seed."""

        def passed(seed: Tensor | None) -> Tensor:
            masks = site_masks(route, step.lower, sources, deltas)
            made = step.masked(masks, copies=route.copies, seed=seed).output
            return step.output_divergence(made, copies=route.copies)

        return self.run(step, passed, draws=isinstance(sources[0], Draw))


@dataclass(frozen=True, kw_only=True)
class Routed(Masked):
    """A term of one or more masked passes, in which some sites compute with components."""

    routing: Routing = "all"
    """Which sites, at which rows: all, one at a time, random subsets, or each by chance."""
    probability: float | None = None
    """Of a site to compute with components, with `static_probability`."""
    batched: bool | None = False
    """Whether `layerwise` is one pass of as many copies of the batch as there are sites.

    None: where there are kernels. What they save in launches a CPU never had to spend.
    """

    @property
    def name(self) -> str:
        """What it is called in records, as in recipes: its kind, and where not all sites, which."""
        ends = {"all": "", "layerwise": "_layerwise"}
        return f"{self.kind}{ends.get(self.routing, '_subset')}"

    def check(self) -> None:
        """Refuse a probability that is none, and options of another routing."""
        if (self.probability is not None) != (self.routing == "static_probability"):
            raise ConfigError(
                f"{self.name}: routing: static_probability and probability must be set together. "
                "Write both, or neither."
            )
        if self.probability is not None and not 0 < self.probability <= 1:
            raise ConfigError(
                f"{self.name}: probability must be above 0, got {self.probability}. Write e.g. 0.5."
            )
        if self.batched and self.routing != "layerwise":
            raise ConfigError(
                f"{self.name}: batched needs routing: layerwise, got {self.routing}. Leave it out."
            )

    def routes(self, step: Step) -> list[Route]:
        """Return the passes of the term; random ones are drawn anew."""
        chance = self.probability or 0.0
        return routes(
            self.routing,
            step.lower,
            probability=chance,
            batched=self.is_batched(step),
            stored=step.decomposition.fixed,
        )

    def is_batched(self, step: Step) -> bool:
        """Say whether `layerwise` is one pass."""
        by_default = self.batched is None
        return has_kernels(step.lower[0].device.type) if by_default else bool(self.batched)

    def mean(
        self, step: Step, sources: Sequence[Source], deltas: Sequence[Source | None]
    ) -> Tensor:
        """Return the mean over the term's passes."""
        separate = [self.divergence(step, route, sources, deltas) for route in self.routes(step)]
        return separate[0] if len(separate) == 1 else torch.stack(separate).mean(0)


@dataclass(frozen=True, kw_only=True)
class Stochastic(Routed):
    """What is not important takes part at random, and so does what components leave."""

    kind: ClassVar[str] = "stochastic"

    def __call__(self, step: Step, ascents: int = 1) -> Tensor:
        """Return the divergence under masks drawn anew."""
        return self.mean(step, *drawn(step))


@dataclass(frozen=True, kw_only=True)
class ImportanceMasked(Routed):
    """Only what is important takes part: to be watched, for who minimises it cheats."""

    kind: ClassVar[str] = "importance_masked"

    def __call__(self, step: Step, ascents: int = 1) -> Tensor:
        """Return the divergence where masks are the importances."""
        return self.mean(step, [0.0] * len(step.lower), [None] * len(step.lower))


@dataclass(frozen=True, kw_only=True)
class Unmasked(Masked):
    """All components take part, and nothing of what they leave."""

    kind: ClassVar[str] = "unmasked"

    def __call__(self, step: Step, ascents: int = 1) -> Tensor:
        """Return the divergence of the sums of components."""
        everything, none = [1.0] * len(step.lower), [None] * len(step.lower)
        (route,) = routes("all", step.lower)
        return self.divergence(step, route, everything, none)


@dataclass(frozen=True, kw_only=True)
class HiddenActivations(Masked):
    """The mean squared error of what sites are given, where masks are drawn at random."""

    kind: ClassVar[str] = "hidden_activations"

    def __call__(self, step: Step, ascents: int = 1) -> Tensor:
        """Return the squares over all sites by their number; tokens are never wrong."""
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
    """Run a pass that the backward pass computes again, with the same draws."""
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
    """Return the sources of a stochastic pass: what components leave is drawn evenly, always."""
    sites = len(step.lower)
    delta = Draw("continuous") if step.delta else None
    return [Draw(step.sampling)] * sites, [delta] * sites
