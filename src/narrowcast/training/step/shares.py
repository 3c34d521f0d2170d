"""A step that several ranks share: the weight of each rank's loss, its gradients, its numbers.

DDP and FSDP average gradients over ranks, so each rank multiplies its loss by the share of its
samples: the gradient is that of the whole batch, however it is divided.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from signal import Signals
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from narrowcast.health.diagnose.investigator import StepDiagnosis
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.sharding import set_reduce_format
from narrowcast.runs import FindingRecord, Record
from narrowcast.training.data import Order
from narrowcast.training.parallel import RunRanks, is_sharded
from narrowcast.training.signals import STOPPING
from narrowcast.training.task import Batch, LossParts, Task


class Share(NamedTuple):
    """This rank's part of a micro-batch."""

    batch: Batch
    weight: Tensor | float
    """Factor on the mean loss of the part; 1 if all ranks have as much."""

    def weighted(self, loss: LossParts) -> LossParts:
        """Return a loss of the part times its weight."""
        if isinstance(self.weight, float) and self.weight == 1:
            return loss
        parts = {name: part * self.weight for name, part in loss.parts.items()}
        return LossParts(total=loss.total * self.weight, parts=parts)


@torch.no_grad()
def as_shares(
    batches: Sequence[Batch], task: Task, *, ranks: RunRanks, order: Order
) -> list[Batch]:
    """Return the micro-batches of a step with their weights. Does not synchronise with a GPU.

    Call it before the task's `prepare_microbatches`, whose weights are relative to this rank's.
    """
    if not ranks.several:
        return list(batches)
    if task.loss_terms is None:
        return [Share(batch, order.share) for batch in task.as_one_step(list(batches))]
    mine = torch.stack([torch.as_tensor(task.loss_terms(b)).float() for b in batches])
    if task.prepare_microbatches is not None:  # which weighs this rank's among each other
        mine = mine.sum().expand(len(batches))
    total = ranks.total(mine.clone()).clamp_min(1)
    weights = mine * ranks.size / total
    return [Share(batch, weights[i]) for i, batch in enumerate(task.as_one_step(list(batches)))]


@final
class Replica(DistributedDataParallel):
    """A model whose gradients are averaged over ranks; its attributes are those of the model."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def connected(model: nn.Module, ranks: RunRanks, plan: Plan) -> nn.Module:
    """Return the module to call so that gradients are averaged over ranks."""
    if not ranks.several or is_sharded(model):
        return model
    device = next(model.parameters()).device
    # Frozen weights of fp8, which gloo cannot send as they are.
    narrow = {
        name: tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.is_floating_point() and tensor.itemsize == 1
    }
    if narrow:
        ranks.broadcast_from_main(narrow.values())
        ignore: Any = Replica._set_params_and_buffers_to_ignore_for_model  # torch lacks its type
        ignore(model, list(narrow))
    # Buckets as gradients would be memory of DDP's that the engine cannot give back.
    replica = Replica(model, device_ids=[device] if device.type == "cuda" else None)
    set_reduce_format(replica, plan)
    return replica


def averaging(model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """Return a context that averages gradients in the `last` micro-batch of a step only."""
    if isinstance(model, Replica):
        return contextlib.nullcontext() if last else model.no_sync()
    return _sharded_averaging(model, last=last)


@contextlib.contextmanager
def _sharded_averaging(model: Any, *, last: bool) -> Iterator[None]:
    if is_sharded(model):
        model.set_requires_gradient_sync(last)
    yield


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """The numbers of a step that are sums over ranks."""

    losses: list[float]
    items: int
    stop: Signals | None
    """A signal that one of the ranks received before the step."""


def summed(losses: Tensor, *, items: int, stop: Signals | None, ranks: RunRanks) -> Tensor:
    """Return a step's losses, items and signal in one tensor, summed over ranks."""
    if not ranks.several:
        return losses
    flags = [float(stop == each) for each in STOPPING]
    others = torch.tensor([float(items), *flags], dtype=torch.float64)
    row = torch.cat([losses.double() / ranks.size, others.to(losses.device, non_blocking=True)])
    return ranks.total(row)


def read_numbers(row: Sequence[float], *, items: int, ranks: RunRanks) -> StepNumbers:
    """Return the numbers of a step from what `summed` returned."""
    if not ranks.several:
        return StepNumbers(losses=list(row), items=items, stop=None)
    cut = len(row) - len(STOPPING)
    stops = (each for each, count in zip(STOPPING, row[cut:], strict=True) if count)
    return StepNumbers(
        losses=[float(torch.tensor(loss).float()) for loss in row[: cut - 1]],
        items=int(row[cut - 1]),
        stop=next(stops, None),
    )


def agreed(diagnosis: StepDiagnosis, ranks: RunRanks) -> StepDiagnosis:
    """Return the diagnosis of a step from those of all ranks, each of which saw its own share."""
    if not ranks.several:
        return diagnosis
    each = ranks.gathered(diagnosis)
    first = next((d for d in each if d.explained), each[0])
    at = each.index(first)
    # If one has an explanation, the others did not see what was wrong.
    findings = [d.findings if d.explained or not first.explained else () for d in each]
    everywhere = all(d.why == first.why for d in each)
    why = first.why if everywhere or not first.why else f"{first.why}; on rank {at}"
    return replace(first, why=why, findings=_by_place(findings))


def merged(records: Sequence[Record], ranks: RunRanks) -> list[Record]:
    """Return this rank's records with the findings of all ranks instead of its own."""
    findings = [record for record in records if isinstance(record, FindingRecord)]
    others = [record for record in records if not isinstance(record, FindingRecord)]
    return [*others, *_by_place(ranks.gathered(findings))]


def _by_place(each: Sequence[Sequence[FindingRecord]]) -> list[FindingRecord]:
    """Return one finding per place and problem, with its first rank unless all ranks found it."""
    places: dict[tuple[str, str, str], dict[int, FindingRecord]] = {}
    for rank, findings in enumerate(each):
        for finding in findings:
            where = (finding.module, finding.role, finding.what)
            places.setdefault(where, {}).setdefault(rank, finding)
    return [
        finding if len(ranks) == len(each) else replace(finding, rank=rank)
        for ranks in places.values()
        for rank, finding in [next(iter(ranks.items()))]
    ]
