"""One decision of all ranks about a step whose weights are sharded over them.

Each rank looks at the gradients of its own shards. One collective gathers a few numbers of every
rank, from which all ranks compute the same norm and the same answer, in the same order. The host
does not wait. Ranks under DistributedDataParallel hold equal gradients and need none of this.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from narrowcast.precision.dtensor import as_sharded
from narrowcast.precision.gradients.check import Checked

_BITS = 32


def rank_group(weights: Sequence[Tensor], others: Iterable[Tensor]) -> "RankGroup | None":
    """Return the ranks that train these weights; None for one rank or a model that is not sharded.

    `others` are further weights of the model: adapters are trained beside a sharded, frozen base.
    """
    every = map(as_sharded, (*weights, *others))
    meshes = {w.device_mesh for w in every if w is not None}
    groups = _groups(meshes) if meshes else []
    if all(group.size() == 1 for group in groups):
        return None
    return RankGroup(weights, groups)


@final
class RankGroup:
    """The ranks that train one model together, and what this rank counts of its weights."""

    def __init__(self, weights: Sequence[Tensor], groups: Sequence[Any]) -> None:
        self._groups = groups
        self.size = math.prod(group.size() for group in groups)
        self._first = all(group.rank() == 0 for group in groups)
        self._count = len(weights)
        device = weights[0].device
        # A weight that several ranks hold is in the norm once.
        self._counted = torch.tensor([self._is_counted(w) for w in weights], device=device)
        self._replicated = [w for w in weights if as_sharded(w) is None]
        self._shifts = torch.arange(_BITS, device=device)
        self._bad_loss = torch.zeros((), dtype=torch.int32, device=device)

    def see_loss(self, loss: Tensor) -> None:
        """Note whether the loss of this rank is finite, so that a skip can name the rank."""
        self._bad_loss.logical_or_(~loss.detach().isfinite().all())

    @torch.no_grad()
    def check(self, norms: Tensor, inv_scales: Tensor | None, present: Sequence[int]) -> Checked:
        """Combine the gradient norms of all ranks, as `check_norms` does of one."""
        true_norms = norms if inv_scales is None else norms * inv_scales
        places = torch.tensor(list(present), device=norms.device)
        counted = self._counted[places]
        squares = torch.stack(
            [torch.where(counted, each.square(), 0).sum() for each in (true_norms, norms)]
        )
        bad = torch.zeros(self._count, dtype=torch.bool, device=norms.device)
        bad[places] = ~norms.isfinite()
        here = torch.zeros_like(bad)
        here[places] = True
        flags = (self._pack(bad), self._pack(here))
        message = torch.cat([squares.view(torch.int32), self._bad_loss.reshape(1), *flags])
        self._bad_loss.zero_()
        messages = self._gather(message)
        sums = messages[:, :2].contiguous().view(torch.float32)
        norm, total = sums[:, 0].sum().sqrt(), sums[:, 1].sum()
        bad_bits, here_bits = messages[:, 3:].chunk(2, dim=1)
        anywhere, present_on = self._unpack(bad_bits).any(0), self._unpack(here_bits)
        mixed = (present_on != present_on[0]).any(0)
        finite = (norm.square() + total < math.inf) & ~anywhere.any() & ~mixed.any()
        elsewhere = anywhere[places] & norms.isfinite()
        lost = messages[:, 2] != 0
        return Checked(
            norms=torch.where(elsewhere, math.inf, norms),
            norm=norm,
            finite=finite,
            bad_rank=torch.where(lost.any(), lost.float().argmax(), -1),
            mixed=torch.where(mixed.any(), mixed.float().argmax(), -1),
        )

    @torch.no_grad()
    def fill_replicated(self) -> None:
        """Add gradients of zero to weights that are not sharded and have none on this rank.

        Other ranks may have one, such as of an expert that none of this rank's tokens reached.
        """
        for weight in self._replicated:
            if weight.grad is None and weight.requires_grad:
                weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype or weight.dtype)

    @torch.no_grad()
    def average_replicated(self, *, dtype: torch.dtype) -> None:
        """Average the gradients of weights that are not sharded, which nothing else reduces."""
        gradients = [w.grad for w in self._replicated if w.grad is not None]
        if not gradients or self.size == 1:
            return
        flat = torch.cat([gradient.reshape(-1).to(dtype) for gradient in gradients])
        for group in self._groups:
            torch.distributed.all_reduce(flat, group=group)
        flat.div_(self.size)
        parts = flat.split([gradient.numel() for gradient in gradients])
        pairs = zip(parts, gradients, strict=True)
        torch._foreach_copy_(gradients, [part.view_as(gradient) for part, gradient in pairs])

    @torch.no_grad()
    def mean(self, number: Tensor) -> Tensor:
        """Return the mean of a number over all ranks."""
        return self._gather(number.reshape(1)).mean()

    def gathered(self, value: Any) -> list[Any]:
        """Return a value of every rank, in the order of the ranks. Synchronises."""
        values = [value]
        for group in self._groups:
            parts: list[Any] = [None] * group.size()
            torch.distributed.all_gather_object(parts, values, group=group)
            values = [each for part in parts for each in part]
        return values

    def _gather(self, message: Tensor) -> Tensor:
        """Return the messages of all ranks, one per row, in the order of the ranks."""
        messages = message.unsqueeze(0)
        for group in self._groups:
            shape = (group.size() * messages.shape[0], message.numel())
            every = torch.empty(shape, dtype=message.dtype, device=message.device)
            _all_gather(every, messages.contiguous(), group=group)
            messages = every
        return messages

    def _pack(self, flags: Tensor) -> Tensor:
        """Return flags as the bits of 32-bit numbers."""
        rows = torch.nn.functional.pad(flags, (0, -self._count % _BITS)).view(-1, _BITS)
        bits = (rows.to(torch.int64) << self._shifts).sum(1)
        return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)

    def _unpack(self, packed: Tensor) -> Tensor:
        bits = (packed.to(torch.int64).unsqueeze(-1) >> self._shifts) & 1
        return bits.view(len(packed), -1)[:, : self._count] != 0

    def _is_counted(self, weight: Tensor) -> bool:
        sharded = as_sharded(weight)
        if sharded is None:
            return self._first
        coordinate = sharded.device_mesh.get_coordinate()
        return coordinate is not None and all(
            index == 0 or not placement.is_replicate()
            for index, placement in zip(coordinate, sharded.placements, strict=True)
        )


def _all_gather(every: Tensor, own: Tensor, *, group: Any) -> None:
    # Renamed in torch 2.13, where the old name warns.
    gather = getattr(torch.distributed, "all_gather_single", None)
    (gather or torch.distributed.all_gather_into_tensor)(every, own, group=group)


def _groups(meshes: set[Any]) -> list[Any]:
    """Return the process groups over which one gather after the other reaches every rank."""
    every = {mesh: frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes}
    union = frozenset().union(*every.values())
    whole = [mesh for mesh in meshes if every[mesh] == union]
    if len(union) == torch.distributed.get_world_size() or not whole:
        return [torch.distributed.group.WORLD]
    mesh = min(whole, key=lambda each: each.ndim)
    return [mesh.get_group(dim) for dim in reversed(range(mesh.ndim))]
