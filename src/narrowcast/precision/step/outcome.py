"""The result of a step: applied or skipped, and why. Reading it synchronises with the device."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from narrowcast.hardware.transfers import AsyncCopy

NO_MODULE = "no single module (the sum of all gradients overflowed)"
"""In the place of a module's name."""


def pack(
    *,
    finite: Tensor,
    norm: Tensor,
    scale: Tensor,
    next_scale: Tensor,
    lost: Tensor,
    at_floor: Tensor,
    norms: Tensor,
    bad_rank: Tensor,
    mixed: Tensor,
) -> Tensor:
    """Return the numbers of one step as one tensor, on the device."""
    numbers = [finite, norm, scale, next_scale, lost, at_floor, bad_rank, mixed]
    first = torch.stack([n.detach().float() for n in numbers])
    return torch.cat([first, norms.to(first.device)])  # weights may be on several devices


class _Numbers(NamedTuple):
    """What `pack` packs before the norms, on the host."""

    finite: float
    norm: float
    scale: float
    next_scale: float
    lost: float
    at_floor: float
    bad_rank: float
    mixed: float


_COUNT = len(_Numbers._fields)


@final
class Outcome:
    """Outcome of one step. Properties wait for the device; `step`, `lr`, `forward_only` do not."""

    def __init__(
        self,
        packed: Tensor,
        *,
        step: int,
        names: Sequence[tuple[int, str]],
        lr: float,
        metered: bool,
        sync: Callable[[], None],
        forward_only: bool = False,
    ) -> None:
        self.forward_only = forward_only
        """Whether the step had no backward pass: its gradient norm is NaN."""
        self.step, self.lr = step, lr
        """The learning rate is that of the first parameter group; NaN where it has none."""
        self.sync = sync
        """Makes the host catch up with the device, this step included."""
        self._packed = packed
        self._copy: AsyncCopy | None = AsyncCopy(packed)
        self._names, self._metered = names, metered
        self._arrived: _Numbers | None = None
        self._norms: list[float] = []
        """Of each gradient, if the step was skipped."""
        self._why = ""

    def __repr__(self) -> str:
        """Return what is known without waiting for the device."""
        numbers = self._arrived
        if numbers is None:
            return f"<Outcome: step {self.step}, lr {self.lr:g}; still running on the device>"
        became = "applied" if numbers.finite else f"skipped: {self._why}"
        norm = f"grad norm {numbers.norm:.4g}, " if numbers.finite else ""
        message = f"{became}; {norm}loss scale {numbers.scale:g}, lr {self.lr:g}"
        return f"<Outcome: step {self.step} {message}>"

    @property
    def applied_on_device(self) -> Tensor:
        """Whether the weights changed, as a device tensor. Read it before the next step."""
        return self._packed[0] != 0

    @property
    def known(self) -> bool:
        """Whether the numbers are on the host, so that reading them does not wait."""
        return self._arrived is not None

    @property
    def grad_norm_on_device(self) -> Tensor:
        """Total norm before clipping, as a device tensor. Read it before the next step."""
        return self._packed[1]

    @property
    def applied(self) -> bool:
        """Whether the weights changed; False for a skipped step."""
        return bool(self._numbers.finite)

    @property
    def skip_reason(self) -> str:
        """Why the step was skipped; empty if it was applied."""
        self._numbers  # noqa: B018  # waits, so that the text is there
        return self._why

    @property
    def loss_scale(self) -> float:
        """Loss scale of this step."""
        return self._numbers.scale

    @property
    def next_scale(self) -> float:
        """Loss scale of the next step."""
        return self._numbers.next_scale

    @property
    def grad_norm(self) -> float:
        """Total norm of the unscaled gradients before clipping."""
        return self._numbers.norm

    @property
    def lost_updates(self) -> float | None:
        """Fraction of weights whose update rounded to zero; None if not measured or the LR is 0."""
        numbers = self._numbers
        return numbers.lost if self._metered and numbers.finite and self.lr != 0 else None

    @property
    def at_floor(self) -> bool:
        """Whether gradients overflowed at the smallest loss scale."""
        return bool(self._numbers.at_floor)

    @property
    def bad_rank(self) -> int | None:
        """The first rank whose loss is not finite; None if there is none or weights are whole."""
        rank = int(self._numbers.bad_rank)
        return None if rank < 0 else rank

    @property
    def bad_parameters(self) -> tuple[str, ...]:
        """Names of parameters with inf or NaN gradients, from input to output; empty if applied.

        A shared parameter has the name that is nearest the loss.
        """
        numbers = self._numbers
        if numbers.finite:
            return ()
        named = zip(self._names, self._norms, strict=True)
        bad = sorted(each for each, norm in named if not abs(norm) < float("inf"))
        return tuple(name for _, name in bad)

    @property
    def bad_module(self) -> str:
        """The module with bad gradients that is nearest the loss."""
        bad = self.bad_parameters
        if not bad:
            return NO_MODULE
        return bad[-1].rpartition(".")[0] or bad[-1]

    def arrive(self) -> None:
        """Read the numbers of the step from the device; the step log calls it in order."""
        assert self._copy is not None
        packed = self._copy.wait()
        self._arrived = _Numbers(*packed[:_COUNT].tolist())
        if not self._arrived.finite:
            self._norms = packed[_COUNT:].tolist()
        self._copy = None  # pinned memory is given back

    def mixed_weight(self) -> int | None:
        """Return the place of a sharded weight that had a gradient on some ranks only."""
        place = int(self._numbers.mixed)
        return None if place < 0 else place

    def explain(self, why: str) -> None:
        """Set why the step was skipped."""
        self._why = why

    @property
    def _numbers(self) -> _Numbers:
        if self._arrived is None:
            self.sync()
        assert self._arrived is not None
        return self._arrived
