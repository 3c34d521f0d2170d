"""The error of an update under a policy, against the update in fp32 on the same batches.

Formats are emulated, so the numbers are the same on every machine. The second moments of Adam are
those of the fp32 gradients: in a run they average hundreds of steps. A few batches estimate them
for each weight and, by rows and columns, for each matrix; both estimates are mixed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.hardware import detect_hardware
from narrowcast.hardware.randomness import preserve_rng, seed_everything
from narrowcast.precision.plan.plan import make_plan
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.step.prepared import prepare
from narrowcast.training.task import LossParts
from narrowcast.tuning.optimizers import is_adaptive, learning_rates, preconditioner

LossFunction = Callable[[nn.Module, Any], Tensor | LossParts]

SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)
"""Loss scales that are tried for fp16, the usual first one first."""


@dataclass(frozen=True, kw_only=True)
class UpdateError:
    """How far an update is from that in fp32."""

    relative: float
    """Norm of the difference over the norm of the fp32 update; infinite if it is not finite."""
    cosine: float

    @property
    def lost(self) -> float:
        """The share of the step's progress that is lost: ½ · relative², about 1 − cosine.

        Errors of different products are independent, so their shares add up.
        """
        return self.relative**2 / 2

    def to_json(self) -> dict[str, float | None]:
        """Return plain data; an update that overflows has no numbers."""
        if not self.relative < float("inf"):
            return {"relative": None, "cosine": None}
        return {"relative": self.relative, "cosine": self.cosine}


OVERFLOW = UpdateError(relative=float("inf"), cosine=0.0)


@final
class UpdateMeter:
    """Measures updates of a model on a few batches. The model is restored by `close`."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        loss_fn: LossFunction,
        *,
        optimizer: torch.optim.Optimizer | None,
        seed: int,
    ) -> None:
        self._model, self._batches, self._loss_fn, self._seed = model, batches, loss_fn, seed
        self._weights = [p for p in model.parameters() if p.requires_grad]
        if not self._weights:
            raise ConfigError("The model has no weights to train. Set requires_grad on some.")
        self._device = self._weights[0].device
        self._hardware = detect_hardware(str(self._device))
        self._buffers = [buffer.clone() for buffer in model.buffers()]
        adaptive = is_adaptive(optimizer)
        rates = learning_rates(optimizer)
        # Its optimizer never steps: gradients are what is measured.
        self._run = prepare(
            model,
            torch.optim.SGD(self._weights, lr=0.0),
            policy=self._plan(Policy()),
            lost_updates_every=0,
        )
        try:
            reference, squares = self._reference()
            self._factors = [
                preconditioner(square, len(batches), optimizer, weight, adaptive=adaptive)
                * rates.get(id(weight), 1.0)
                for weight, square in zip(self._weights, squares, strict=True)
            ]
            self._updates = {
                count: [g * f for g, f in zip(gradients, self._factors, strict=True)]
                for count, gradients in reference.items()
            }
            if not all(bool(update.isfinite().all()) for update in self._updates[len(batches)]):
                raise ConfigError(
                    "The gradients of the model are inf or NaN in fp32. Check the batches and the "
                    "loss, for example with nc.explain."
                )
        except BaseException:
            self.close()
            raise

    def error(self, policy: Policy, *, batches: int | None = None) -> UpdateError:
        """Return the error of the update under a policy. Synchronises with the device.

        `batches` takes only so many of them: 1, or all.
        """
        count = batches or len(self._batches)
        for scale in SCALES if policy.needs_loss_scale else SCALES[:1]:
            result = self._error(policy, count, scale=scale)
            if result is not OVERFLOW:
                break  # a dynamic loss scale would have found this one too
        return result

    def _error(self, policy: Policy, count: int, *, scale: float) -> UpdateError:
        gradients = self._gradients(policy, count, scale=scale)
        reference = self._updates[count]
        with torch.no_grad():
            sums = torch.zeros(3, dtype=torch.float64, device=self._device)
            for gradient, factor, wanted in zip(gradients, self._factors, reference, strict=True):
                update = gradient.float() * factor
                sums += torch.stack(
                    [
                        (update - wanted).double().square().sum(),
                        (update.double() * wanted.double()).sum(),
                        update.double().square().sum(),
                    ]
                )
            difference, product, square = sums.tolist()
        norm = self._norm(count)
        if not difference < float("inf"):
            return OVERFLOW
        return UpdateError(
            relative=difference**0.5 / norm,
            cosine=product / max(norm * square**0.5, 1e-300),
        )

    def close(self) -> None:
        """Restore the model."""
        self._run.zero_grad()
        self._run.release()
        with torch.no_grad():
            for buffer, before in zip(self._model.buffers(), self._buffers, strict=True):
                buffer.copy_(before)

    def _plan(self, policy: Policy) -> Any:
        return make_plan(
            self._model,
            policy,
            hardware=self._hardware,
            emulate=True,
            skip_slow_fp8=False,
            fuse="none",
        )

    def _norm(self, count: int) -> float:
        squares = [update.double().square().sum() for update in self._updates[count]]
        norm = math.sqrt(float(torch.stack(squares).sum()))
        if norm == 0:
            raise ConfigError("All gradients of the model are zero. Check the batches and loss.")
        return norm

    def _reference(self) -> tuple[dict[int, list[Tensor]], list[Tensor]]:
        """Return the fp32 gradients of one batch and of all, and their mean squares."""
        squares = [torch.zeros_like(weight, dtype=torch.float32) for weight in self._weights]
        total = [torch.zeros_like(weight, dtype=torch.float32) for weight in self._weights]
        first: list[Tensor] = []
        for number in range(len(self._batches)):
            gradients = self._gradients(Policy(), 1, start=number)
            if not number:
                first = [gradient.clone() for gradient in gradients]
            for gradient, square, whole in zip(gradients, squares, total, strict=True):
                square += gradient.square() / len(self._batches)
                whole += gradient / len(self._batches)
        return {1: first, len(self._batches): total}, squares

    def _gradients(
        self, policy: Policy, count: int, *, start: int = 0, scale: float = 1.0
    ) -> list[Tensor]:
        """Return the mean gradients of some batches under a policy, with some loss scale."""
        if policy.needs_loss_scale:
            self._run.set_policy(self._plan(Policy()))  # forgets the scale of the last policy
        self._run.set_policy(self._plan(policy), loss_scale=scale)
        with preserve_rng(self._device), self._buffers_restored():
            for number in range(start, start + count):
                seed_everything(self._seed + number)
                with self._run.autocast():
                    loss = self._loss_fn(self._model, self._batches[number])
                self._run.backward(total_loss(loss) / count)
        self._run.unscale()
        gradients = [
            torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
            for weight in self._weights
        ]
        self._run.zero_grad()
        return gradients

    @contextmanager
    def _buffers_restored(self) -> Iterator[None]:
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in zip(self._model.buffers(), self._buffers, strict=True):
                    buffer.copy_(before)


def total_loss(loss: Tensor | LossParts) -> Tensor:
    """Return the loss that is trained."""
    return loss.total if isinstance(loss, LossParts) else loss
