"""The same components, importances and masks in the reference and in narrowcast, term by term."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from decompose_reference import importance, losses
from decompose_reference.components import Mask
from decompose_reference.training import Prepared, Run
from narrowcast.workloads.decompose.components.decomposition import Decomposition
from narrowcast.workloads.decompose.components.masked import SiteMask
from narrowcast.workloads.decompose.components.sites import find_sites
from narrowcast.workloads.decompose.importance.functions import build_importance
from narrowcast.workloads.decompose.importance.networks import ComponentMLP, SharedMLP
from narrowcast.workloads.decompose.importance.squash import lower, upper
from narrowcast.workloads.decompose.losses.penalties import Faithfulness, Minimality
from narrowcast.workloads.decompose.losses.terms import Step


@dataclass(frozen=True)
class Term:
    """One term of the loss, computed twice."""

    name: str
    reference: float
    ours: float

    @property
    def apart(self) -> float:
        """By how much they differ."""
        return abs(self.reference - self.ours)

    @property
    def share(self) -> float:
        """The same as a share of the larger."""
        return self.apart / (max(abs(self.reference), abs(self.ours)) or 1.0)


def terms(
    run: Run, batch: Tensor, target: nn.Module, *, output: Callable[..., Tensor] | None = None
) -> Iterator[Term]:
    """Yield every term of the reference's objective, with what narrowcast makes of the same masks.

    `target` is the reference's; a copy of it is decomposed. Each side computes its own importances
    from the same weights; masks are made from those of the reference.
    """
    decomposition = Decomposition(
        copy.deepcopy(target),
        find_sites(target, run.settings.patterns),
        tied=run.settings.tied,
        output=output,
    )
    function = build_importance(
        run.settings.importance, decomposition.sites, seeds=1, hidden=run.settings.hidden
    ).to(run.device)
    with torch.no_grad():
        _take_over(run, decomposition, function)
    made, deltas = run.prepared(batch), run.model.deltas()
    step = _step(run, decomposition, function, made)
    with run.autocast():
        penalty = losses.importance_minimality(made.upper, run.p())
        yield Term(
            "minimality", penalty.item(), Minimality(coefficient=1.0, p=run.p())(step).item()
        )
        for name, _, masks in run.masks(made, deltas):
            reference = run.reconstructed(name, made, masks)
            yield Term(name, reference.item(), _reconstructed(name, step, masks).item())
    faithful = losses.faithfulness(deltas)
    yield Term("faithfulness", faithful.item(), Faithfulness(coefficient=1.0)(step).item())


def _step(run: Run, decomposition: Decomposition, function: nn.Module, made: Prepared) -> Step:
    with run.autocast():
        with torch.no_grad():
            passed = decomposition(made.batch, cache="inputs")
        acts = decomposition(made.batch, cache="acts").acts
        logits = function(passed.inputs, acts, length=1)
    return Step(
        decomposition=decomposition,
        args=(made.batch,),
        target=passed.output,
        lower=[lower(each) for each in logits],
        upper=[upper(each) for each in logits],
        progress=torch.tensor(0.0, device=run.device),
        divergence="kl" if run.settings.objective.divergence is losses.kl else "mse",
    )


def _reconstructed(name: str, step: Step, masks: dict[str, Mask]) -> Tensor:
    """Return a term of masks that are given."""
    if name != "layerwise":
        return step.output_divergence(
            step.masked([_site_mask(mask) for mask in masks.values()]).output
        )
    found = []
    for at, mask in enumerate(masks.values()):
        alone: list[SiteMask | None] = [None] * len(masks)
        alone[at] = _site_mask(mask)
        found.append(step.output_divergence(step.masked(alone).output))
    return torch.stack(found).mean(0)


def _site_mask(mask: Mask) -> SiteMask:
    """Say the same with a source of 0: then the mask is the importance."""
    assert mask.delta is not None
    return SiteMask(
        importance=mask.components.flatten(0, -2)[None],
        source=0.0,
        delta=mask.delta[1].flatten()[None],
        routed=None if mask.routed is None else mask.routed.flatten()[None],
    )


def _take_over(run: Run, decomposition: Decomposition, function: nn.Module) -> None:
    """Copy components and the weights of importance functions from the reference."""
    functions = list(function.functions)
    for at, (name, each) in enumerate(decomposition.components.items()):
        known = run.model.components(name)
        each.V.copy_(known.V[None])
        each.U.copy_(known.U[None])
        _copy_function(run.functions[name.replace(".", "-")], functions[at])


def _copy_function(known: nn.Module, ours: nn.Module) -> None:
    layers = [
        layer for layer in known.layers if isinstance(layer, nn.Linear | importance.ParallelLinear)
    ]
    *hidden, last = layers
    if isinstance(ours, SharedMLP):
        for one, two in zip(hidden, ours.layers, strict=True):
            two.weight.copy_(one.weight.T[None])
            two.bias.copy_(one.bias)
        ours.last.weight.copy_(last.weight.T[None])
        ours.last.bias.copy_(last.bias)
    elif isinstance(ours, ComponentMLP):
        ours.first.copy_(hidden[0].weight[:, 0][None])
        ours.first_bias.copy_(hidden[0].bias[None])
        for one, weight, bias in zip(hidden[1:], ours.middle, ours.middle_biases, strict=True):
            weight.copy_(one.weight[None])
            bias.copy_(one.bias[None])
        ours.last.copy_(last.weight[..., 0][None])
        ours.last_bias.copy_(last.bias[..., 0][None])
