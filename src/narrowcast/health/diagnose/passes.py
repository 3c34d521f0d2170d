"""Replays of a step's passes with every module recorded, in eager mode.

A skipped step changed no weight, so the same batches, loss scale and RNG state repeat it.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.hardware.randomness import RandomState, drawing_from
from narrowcast.health.diagnose.diagnosis import Diagnosis
from narrowcast.health.diagnose.inputs import (
    Extreme,
    Formats,
    Location,
    arguments_zeroed,
    find_extremes,
    written,
    zeroed,
)
from narrowcast.health.diagnose.recording import Recorder, Seen, weights_of_several_uses
from narrowcast.health.statistics.watched import probes_off
from narrowcast.precision.dtensor import local_part
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.step.prepared import Prepared
from narrowcast.precision.step.weight_swap import plan_tried

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


@dataclass(frozen=True, kw_only=True)
class Passes:
    """A step that can be taken again, without its update."""

    prepared: Prepared
    inputs: ReplayInputs
    loss_fn: Callable[[Any], Tensor]
    around: Around | None
    backward: Callable[[Tensor, int], None] | None

    def take(
        self,
        *,
        plan: Plan | None = None,
        zero: Collection[Extreme] = (),
        scales: Sequence[Tensor] | None = None,
        extremes: list[Extreme] | None = None,
    ) -> Diagnosis | None:
        """Replay the passes and return where they first go wrong, or None.

        `extremes` receives the bad inputs. If weights with several uses get bad gradients, a second
        replay separates the uses. Synchronises with the device after each micro-batch.
        """
        plan, scales = plan or self.prepared.plan, self.inputs.scales if scales is None else scales
        several: set[nn.Parameter] = set()
        # What FSDP gathers are no weights of the model.
        find = several if self.prepared.engine.weights.ranks is None else None
        verdict = self._taken(plan, zero, scales, extremes=extremes, find=find)
        if verdict is None or verdict.phase == "forward" or not several:
            return verdict
        try:
            return self._taken(plan, zero, scales, several=several) or verdict
        except torch.OutOfMemoryError:  # that something went wrong is known all the same
            torch.cuda.empty_cache()
            return verdict

    def _taken(
        self,
        plan: Plan,
        zero: Collection[Extreme],
        scales: Sequence[Tensor],
        *,
        several: Collection[nn.Parameter] = (),
        extremes: list[Extreme] | None = None,
        find: set[nn.Parameter] | None = None,
    ) -> Diagnosis | None:
        """Take the passes once; `find` gets the weights of several uses in those that failed."""
        prepared, engine = self.prepared, self.prepared.engine
        with contextlib.ExitStack() as stack:
            stack.enter_context(engine.isolated(scales))
            stack.enter_context(probes_off(prepared.model))
            stack.enter_context(drawing_from(self.inputs.random))
            stack.enter_context(eagerly())
            if plan is not prepared.plan:
                stack.enter_context(plan_tried(engine, plan))
            recorder = Recorder(prepared.model, Formats(plan))
            for number, batch in enumerate(self.inputs.batches, start=1):
                verdict = self._take_one(
                    recorder, batch, number, zero=zero, several=several, find=find
                )
                wanted = verdict is not None and extremes is not None
                own = find_extremes(batch, recorder.calls) if wanted else []
                verdict, suspects = self._agreed(verdict, own)
                if verdict is not None:
                    if extremes is not None:
                        extremes += suspects
                    return verdict
            verdict, _ = self._agreed(_look_at_sums(prepared, Formats(plan), self._count), [])
            # A shard of a sum is of the micro-batches of all ranks.
            return None if verdict is None else replace(verdict, rank=None)

    def _agreed(
        self, verdict: Diagnosis | None, extremes: list[Extreme]
    ) -> tuple[Diagnosis | None, list[Extreme]]:
        """Return the first rank's verdict, so that ranks of shards take the same passes."""
        ranks = self.prepared.engine.weights.ranks
        if ranks is None:
            return verdict, extremes
        each = ranks.gathered((verdict, extremes))
        bad = [rank for rank, (its, _) in enumerate(each) if its is not None]
        if not bad:
            return None, []
        first, suspects = each[bad[0]]
        return replace(first, rank=None if len(bad) == len(each) else bad[0]), suspects

    @property
    def _count(self) -> int:
        return len(self.inputs.batches)

    def _take_one(
        self,
        recorder: Recorder,
        batch: Any,
        number: int,
        *,
        zero: Collection[Extreme],
        several: Collection[nn.Parameter],
        find: set[nn.Parameter] | None,
    ) -> Diagnosis | None:
        settings = zeroed(batch, zero) if zero else batch
        faults = contextlib.nullcontext() if self.around is None else self.around(number)
        clean = arguments_zeroed(self.prepared.model, zero) if zero else contextlib.nullcontext()
        with faults, contextlib.ExitStack() as stack:  # in this order: a fault is to be seen
            with clean, self.prepared.autocast():
                stack.enter_context(recorder.watching(several))  # and what is zeroed, as zeros
                with recorder.forward():
                    loss = self.loss_fn(settings)
            recorder.see_loss(loss)
            self._backpropagate(loss)
        seen = recorder.read()
        first = _first(seen)
        if first is None:
            return None
        if find is not None:
            find |= weights_of_several_uses(self.prepared.model, loss)
        return Diagnosis(
            location=seen[first].location,
            amax=seen[first].amax,
            micro_batch=number,
            micro_batches=self._count,
            evidence=_evidence(seen, first),
            neighbour=_neighbour(seen, first),
        )

    def _backpropagate(self, loss: Tensor) -> None:
        if self.backward is None:
            self.prepared.backward(loss / self._count)
        else:
            self.backward(loss, self._count)


def eagerly() -> contextlib.AbstractContextManager[Any]:
    """Run compiled models in eager mode inside the block."""
    # Nothing is compiled where the compiler was never loaded, which takes seconds.
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _first(seen: Sequence[Seen]) -> int | None:
    """Return the place of the first bad value, or of the infinities that lead to it."""
    first = next((i for i, each in enumerate(seen) if each.is_bad), None)
    if first is None or seen[first].location.in_backward:
        return first
    flowing = [i for i in range(first) if seen[i].flows and seen[i].location.role != "weight"]
    for i in reversed(flowing):
        if math.isfinite(seen[i].amax):
            break
        first = i
    return first


def _look_at_sums(prepared: Prepared, formats: Formats, count: int) -> Diagnosis | None:
    """Find gradients that were fine in each micro-batch, and are not all together."""
    matches: list[tuple[Location, Tensor]] = []
    for parameter, name in formats.holders(prepared.model).items():
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(local_part(parameter.grad), dtype=torch.float32)
            matches.append((formats.location(name, "grad_weight"), norm))
    if not matches:
        return None
    norms = torch.stack([norm for _, norm in matches]).tolist()
    if math.isfinite(sum(norm * norm for norm in norms)) and max(norms) ** 2 < 3.4e38:
        return None
    largest = max(range(len(norms)), key=lambda i: _badness(norms[i]))
    return Diagnosis(
        location=matches[largest][0],
        amax=norms[largest],
        micro_batch=count,
        micro_batches=count,
        evidence="each micro-batch was finite, but the norm of their sum is not"
        if prepared.engine.weights.ranks is None
        else "outputs and their gradients were finite on all ranks",
    )


def _badness(norm: float) -> float:
    return math.inf if math.isnan(norm) else norm


def _evidence(seen: Sequence[Seen], first: int) -> str:
    """Return what was seen around the first bad number."""
    location, before = seen[first].location, seen[:first]
    match location.role:
        case "input":
            last = _last(before, roles=("output",))
            if last is None:
                return "it was already in the input"
            return f"made between {last.location.module or 'the model'} and it"
        case "output":
            return _operands(before, location.module)
        case "loss":
            return "every output before it was finite"
        case "grad_weight" if seen[first].summed:
            return "each use of this weight gave a finite gradient, but their sum is not"
        case "grad_weight":
            amax = _largest(before, location.module, "grad_output")
            return "" if amax is None else f"from a grad_output of {written(amax)}"
        case "grad_output":
            return "every gradient nearer the loss was finite"
        case _:
            return ""


def _operands(before: Sequence[Seen], module: str) -> str:
    """Return what a module made its output from."""
    results = {role: _largest(before, module, role) for role in ("input", "weight")}
    parts = [f"{role} of {written(amax)}" for role, amax in results.items() if amax is not None]
    if len(parts) < 2:
        return ""
    held = results["input"] is not None and not math.isfinite(results["input"])
    return f"from {' and '.join(parts)}" + ("" if held else ", both finite")


def _neighbour(seen: Sequence[Seen], first: int) -> str | None:
    """Return the module whose number of the kind was seen last before the first bad one."""
    role = seen[first].location.role
    last = _last(seen[:first], roles=("output",) if role == "input" else (role,))
    return None if last is None else last.location.module


def _last(seen: Sequence[Seen], *, roles: Iterable[str]) -> Seen | None:
    return next((each for each in reversed(seen) if each.location.role in roles), None)


def _largest(seen: Sequence[Seen], module: str, role: str) -> float | None:
    result = [s.amax for s in seen if s.location.module == module and s.location.role == role]
    return max(result) if result else None
