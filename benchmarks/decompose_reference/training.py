"""A decomposition, step by step."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from decompose_reference import losses
from decompose_reference.components import ComponentModel, Mask
from decompose_reference.importance import KINDS, lower_leaky, upper_leaky
from decompose_reference.losses import Divergence, Draw


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Coefficients of the terms; None: the term is not there."""

    divergence: Divergence
    minimality: float
    p: float = 1.0
    p_end: float | None = None
    """p falls to this over the run."""
    stochastic: float | None = None
    layerwise: float | None = None
    subset: float | None = None
    pgd_subset: float | None = None
    pgd_steps: int = 1
    pgd_step_size: float = 1.0
    faithfulness: float | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All of a run."""

    patterns: Mapping[str, int]
    importance: str
    hidden: tuple[int, ...]
    objective: Objective
    lr: float
    steps: int
    cosine: bool = True
    bf16: bool = True
    tied: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """What the target and the importance functions made of a batch."""

    batch: Tensor
    target: Tensor
    lower: dict[str, Tensor]
    upper: dict[str, Tensor]


class Run:
    """Components and importance functions of a target, and the optimizer that trains them."""

    def __init__(
        self,
        target: nn.Module,
        settings: Settings,
        *,
        device: torch.device,
        output: Callable[..., Tensor] = lambda found: found,
    ) -> None:
        self.settings, self.device, self.taken = settings, device, 0
        self.model = ComponentModel(target, settings.patterns, output=output)
        sizes = {name: self.model.components(name).V.shape for name in self.model.names}
        kind = KINDS[settings.importance]
        self.functions = nn.ModuleDict(
            {name.replace(".", "-"): kind(*size, settings.hidden) for name, size in sizes.items()}
        )
        self.model.to(device)
        self.functions.to(device)
        for two, one in settings.tied.items():  # here: moving to a device takes memory apart
            self.model.tie(one, two)
        trained = [*self.model.by_key.parameters(), *self.functions.parameters()]
        self.optimizer = torch.optim.AdamW(trained, lr=settings.lr, weight_decay=0.0)

    def warm_up(self, steps: int, *, lr: float = 1e-2, weight_decay: float = 0.1) -> None:
        """Train components to sum to the target's weights, before anything else."""
        optimizer = torch.optim.AdamW(
            self.model.by_key.parameters(), lr=lr, weight_decay=weight_decay
        )
        for _ in range(steps):
            optimizer.zero_grad()
            losses.faithfulness(self.model.deltas()).backward()
            optimizer.step()

    def importances(self, inputs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], ...]:
        """Return lower and upper importances of each module."""
        logits = {}
        for name, x in inputs.items():
            function = self.functions[name.replace(".", "-")]
            reads = self.model.components(name).inner(x) if function.reads == "activations" else x
            logits[name] = function(reads)
        return (
            {name: lower_leaky(z) for name, z in logits.items()},
            {name: upper_leaky(z) for name, z in logits.items()},
        )

    def prepared(self, batch: Tensor) -> Prepared:
        """Run the target and the importance functions, under autocast."""
        with self.autocast():
            with torch.no_grad():
                target, inputs = self.model.with_inputs(batch)
            lower, upper = self.importances(inputs)
        return Prepared(batch, target, lower, upper)

    def autocast(self) -> torch.autocast:
        """Return the context of everything but deltas."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.bf16)

    def masks(
        self, made: Prepared, deltas: Mapping[str, Tensor], draw: Draw = torch.rand
    ) -> Iterator[tuple[str, float, dict[str, Mask]]]:
        """Yield each term that compares outputs: its name, coefficient and masks, drawn anew."""
        asked, lower = self.settings.objective, made.lower
        for name, coefficient in (("stochastic", asked.stochastic), ("layerwise", asked.layerwise)):
            if coefficient is not None:
                yield name, coefficient, losses.stochastic_masks(lower, deltas, draw)
        if asked.subset is not None:
            masks = losses.stochastic_masks(lower, deltas, draw)
            where = losses.subset_routing(lower, draw)
            yield "subset", asked.subset, losses.routed(masks, where)
        if asked.pgd_subset is not None:
            ascent = {"steps": asked.pgd_steps, "step_size": asked.pgd_step_size, "draw": draw}
            found = losses.adversarial_masks(
                self.model,
                made.batch,
                made.target,
                lower,
                deltas,
                asked.divergence,
                where=losses.subset_routing(lower, draw),
                **ascent,
            )
            yield "pgd_subset", asked.pgd_subset, found

    def reconstructed(self, name: str, made: Prepared, masks: Mapping[str, Mask]) -> Tensor:
        """Return a term that compares outputs."""
        compare = losses.layerwise if name == "layerwise" else losses.reconstruction
        divergence = self.settings.objective.divergence
        return compare(self.model, made.batch, made.target, masks, divergence)

    def terms(self, batch: Tensor, draw: Draw = torch.rand) -> dict[str, tuple[float, Tensor]]:
        """Return each term of the loss with its coefficient."""
        asked, deltas, made = self.settings.objective, self.model.deltas(), self.prepared(batch)
        with self.autocast():
            penalty = losses.importance_minimality(made.upper, self.p())
            found = {"minimality": (asked.minimality, penalty)}
            for name, coefficient, masks in self.masks(made, deltas, draw):
                found[name] = (coefficient, self.reconstructed(name, made, masks))
        if asked.faithfulness is not None:
            found["faithfulness"] = (asked.faithfulness, losses.faithfulness(deltas))
        return found

    def step(self, batch: Tensor) -> dict[str, float]:
        """Take one step; return every term, which waits for the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr()
        self.optimizer.zero_grad()
        terms = self.terms(batch)
        total = sum(coefficient * term for coefficient, term in terms.values())
        total.backward()
        logged = {name: term.item() for name, (_, term) in terms.items()}
        self.optimizer.step()
        self.taken += 1
        return logged | {"total": total.item()}

    def _progress(self) -> float:
        return min(self.taken / max(self.settings.steps, 1), 1.0)

    def p(self) -> float:
        """Return the power that the penalty has at this step."""
        asked = self.settings.objective
        end = asked.p if asked.p_end is None else asked.p_end
        return asked.p + (end - asked.p) * self._progress()

    def _lr(self) -> float:
        if not self.settings.cosine:
            return self.settings.lr
        return self.settings.lr * 0.5 * (1 + math.cos(math.pi * self._progress()))
