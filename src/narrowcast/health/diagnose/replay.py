"""A step taken again, aside, with every module watched: which number was first not finite.

A skipped step has moved no weight, so its micro-batches, its loss scale and its random numbers give
the same passes again. They are made in eager mode, and leave no trace in the run.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowcast.hardware.randomness import RandomState, drawing_from
from narrowcast.health.diagnose.places import Formats, Place
from narrowcast.health.diagnose.recording import Recorder, Seen
from narrowcast.health.diagnose.verdict import Verdict, written
from narrowcast.health.statistics.watched import probes_off
from narrowcast.precision.nested import tensors_in
from narrowcast.precision.step.prepared import Prepared

Around = Callable[[int], contextlib.AbstractContextManager[Any]]
"""What holds over the passes of a micro-batch, by its number: the faults of a rehearsal."""


@dataclass(frozen=True, kw_only=True)
class ReplayInputs:
    """What a step was given: all that is needed to take it again while its weights are there."""

    batches: Sequence[Any]
    scales: Sequence[Tensor]
    random: RandomState

    @classmethod
    def before(cls, prepared: Prepared, batches: Sequence[Any]) -> "ReplayInputs":
        """Return what a step that is about to be taken is given. Waits for nothing."""
        device = next(prepared.model.parameters()).device
        scales = prepared.engine.scale_values()
        return cls(batches=batches, scales=scales, random=RandomState.now(device))


def replay(
    prepared: Prepared,
    replay_inputs: ReplayInputs,
    loss_of: Callable[[Any], Tensor],
    *,
    around: Around | None = None,
    backward: Callable[[Tensor, int], None] | None = None,
) -> Verdict | None:
    """Take a step again without its update, and say where it went wrong; None where it does not.

    `backward` is given each loss and the number of micro-batches; left out, the loss is of one
    piece. Waits for the device after each micro-batch, and ends with the first that went wrong.
    """
    backward = backward or (lambda loss, count: prepared.backward(loss / count))
    recorder = Recorder(prepared.model, Formats(prepared.plan))
    count = len(replay_inputs.batches)
    aside = prepared.engine.isolated(replay_inputs.scales)
    with aside, probes_off(prepared.model), drawing_from(replay_inputs.random), eagerly():
        for number, batch in enumerate(replay_inputs.batches, start=1):
            if verdict := _look_at_batch(batch, number, count):
                return verdict
            faults = contextlib.nullcontext() if around is None else around(number)
            with faults, recorder.watching():  # in this order: a fault is to be seen
                with prepared.compute(), recorder.forward():
                    loss = loss_of(batch)
                recorder.see_loss(loss)
                backward(loss, count)
            seen = recorder.read()
            first = next((i for i, each in enumerate(seen) if each.is_bad), None)
            if first is not None:
                return Verdict(
                    place=seen[first].place,
                    amax=seen[first].amax,
                    micro_batch=number,
                    micro_batches=count,
                    evidence=_evidence(seen, first),
                )
        return _look_at_sums(prepared, Formats(prepared.plan), count)


def eagerly() -> contextlib.AbstractContextManager[Any]:
    """Let compiled models run as they are written, inside the block."""
    # Nothing is compiled where the compiler was never loaded, which takes seconds.
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _look_at_batch(batch: Any, number: int, count: int) -> Verdict | None:
    """Find the first sample of a batch that holds a NaN or an infinity; a mask may hold -inf."""
    for tensor in tensors_in(batch):
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        bad = tensor.isnan() | tensor.isposinf()
        if not bad.any():
            continue
        # In the order of samples, which share the first dimension.
        samples = bad.reshape(bad.shape[0], -1) if bad.dim() else bad.view(1, 1)
        first = int(samples.any(1).nonzero()[0])
        row = tensor.reshape(samples.shape)[first]
        return Verdict(
            place=Place("", "batch"),
            amax=math.nan if row.isnan().any() else math.inf,
            micro_batch=number,
            micro_batches=count,
            sample=first,
        )
    return None


def _look_at_sums(prepared: Prepared, formats: Formats, count: int) -> Verdict | None:
    """Find gradients that were fine in each micro-batch, and are not all together."""
    found: list[tuple[Place, Tensor]] = []
    for name, module in prepared.model.named_modules():
        for parameter in module.parameters(recurse=False):
            if parameter.grad is not None:
                norm = torch.linalg.vector_norm(parameter.grad.detach(), dtype=torch.float32)
                found.append((formats.place(name, "grad_weight"), norm))
    if not found:
        return None
    norms = torch.stack([norm for _, norm in found]).tolist()
    if math.isfinite(sum(norm * norm for norm in norms)) and max(norms) ** 2 < 3.4e38:
        return None
    largest = max(range(len(norms)), key=lambda i: _badness(norms[i]))
    return Verdict(
        place=found[largest][0],
        amax=norms[largest],
        micro_batch=count,
        micro_batches=count,
        evidence="each micro-batch was finite, and the norm of their sum is not",
    )


def _badness(norm: float) -> float:
    return math.inf if math.isnan(norm) else norm


def _evidence(seen: Sequence[Seen], first: int) -> str:
    """Say what was seen around the first bad number."""
    place, before = seen[first].place, seen[:first]
    match place.role:
        case "input":
            last = _last(before, roles=("output",))
            return f"made between {last.place.module or 'the model'} and it" if last else ""
        case "output":
            parts = [
                f"{role} of {written(amax)}"
                for role in ("input", "weight")
                if (amax := _largest(before, place.module, role)) is not None
            ]
            return f"from {' and '.join(parts)}, both finite" if len(parts) == 2 else ""
        case "loss":
            return "every output before it was finite"
        case "grad_weight":
            amax = _largest(before, place.module, "grad_output")
            return "" if amax is None else f"from a grad_output of {written(amax)}"
        case "grad_output":
            return "every gradient nearer the loss was finite"
        case _:
            return ""


def _last(seen: Sequence[Seen], *, roles: Iterable[str]) -> Seen | None:
    return next((each for each in reversed(seen) if each.place.role in roles), None)


def _largest(seen: Sequence[Seen], module: str, role: str) -> float | None:
    found = [s.amax for s in seen if s.place.module == module and s.place.role == role]
    return max(found) if found else None
