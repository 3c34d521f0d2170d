"""`explain`: a diagnosis of given micro-batches, for your own loop.

Cause and remedy are tried, not guessed: the passes are repeated without the suspected values, with
a lower loss scale, and in wider formats.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.health.diagnose.diagnosis import Diagnosis, Remedy
from narrowcast.health.diagnose.inputs import Extreme, Location
from narrowcast.health.diagnose.passes import Around, Passes, ReplayInputs
from narrowcast.precision.plan.fusing import AUTO, NONE
from narrowcast.precision.plan.gains import WHOLE, in_fp32, widened
from narrowcast.precision.plan.plan import Plan, make_plan
from narrowcast.precision.plan.policy import Policy
from narrowcast.precision.step.prepared import Prepared

TRIES = 8
"""Policies that are tried for one verdict, each of which takes about as long as a step or two."""

RANKS = {"fp32": 2, "bf16": 1, "tf32": 1}
"""Formats by what they can hold; all others are below."""


def find_remedy(verdict: Diagnosis, passes: Passes) -> Remedy | None:
    """Return the smallest change that makes the passes finite, or None. Synchronises."""
    trials = Trials(passes, verdict)
    if verdict.phase == "backward" and trials.lower_scale_helps():
        return Remedy(scale=trials.about_scale)
    whole = passes.prepared.plan.policy
    everything = in_fp32(whole)
    if everything == whole:
        return None
    if passes.prepared.engine.weights.ranks is not None:
        # Not tried: a rank that runs out of memory in wider formats would stop the others.
        return Remedy() if verdict.outgrew_format else None
    if trials.of(everything) is not None:
        return None
    policy, current, tries = whole, verdict, 0
    while tries < TRIES:
        for candidate in _candidates(policy, current):
            tries += 1
            again = trials.of(candidate)
            if again is None:
                return trials.remedy(candidate)
            if not again.has_same_location(current):
                policy, current = candidate, again  # that one is healed, and shows the next
                break
        else:
            break
    return trials.remedy(everything)


class Trials:
    """Passes in other formats, with the smallest loss scale: what that heals, no format need."""

    def __init__(self, passes: Passes, verdict: Diagnosis) -> None:
        self._passes, self._plan, self._verdict = passes, passes.prepared.plan, verdict
        settings, scales = passes.prepared.loss_scale, passes.inputs.scales
        smallest = None if settings is None else settings.min_scale if settings.dynamic else 1.0
        self._lowest = [scale.clamp(max=smallest) for scale in scales]
        pairs = zip(self._lowest, scales, strict=True)
        self._can_be_lower = not all(torch.equal(low, scale) for low, scale in pairs)
        dynamic = settings is not None and settings.dynamic
        self.about_scale: Literal["gives way", "too high"] = "gives way" if dynamic else "too high"

    def lower_scale_helps(self) -> bool:
        """Return whether the passes are finite in the formats in force with the smallest scale."""
        return self._can_be_lower and self._passes.take(scales=self._lowest) is None

    def of(self, policy: Policy) -> Diagnosis | None:
        """Take the passes under a policy; where they cannot be, they are what they were."""
        try:
            return self._passes.take(plan=self._planned(policy), scales=self._lowest)
        except (RuntimeError, UnsupportedError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return self._verdict  # a kernel may take 16 bits only

    def remedy(self, policy: Policy) -> Remedy:
        """Return a policy that was found to help, and whether the loss scale must help it."""
        before = self._plan.policy
        whole = replace(policy, exceptions=()) != replace(before, exceptions=())
        fresh = {g: text for g, text in policy.exceptions if (g, text) not in before.exceptions}
        if whole:  # on the way there a module may have become an exception to what it was
            same = {g for g, text in fresh.items() if text == policy.forward}
            others = [pair for pair in policy.exceptions if pair[0] not in same]
            policy = replace(policy, exceptions=tuple(others))
        alone = not (policy.needs_loss_scale and self._can_be_lower)
        alone = alone or self._passes.take(plan=self._planned(policy)) is None
        return Remedy(
            scale="" if alone else self.about_scale,
            policy=policy,
            exceptions={} if whole else fresh,
        )

    def _planned(self, policy: Policy) -> Plan:
        model, plan = self._passes.prepared.model, self._plan
        # What is named but cannot be here is no reason to refuse a remedy.
        fuse = NONE if plan.fuse == NONE else AUTO
        return make_plan(
            model,
            policy,
            hardware=plan.hardware,
            emulate=plan.emulate or None,
            fuse=fuse,
            memory=plan.memory.requested,
            execution=plan.execution,
        )


def _candidates(policy: Policy, verdict: Diagnosis) -> Iterator[Policy]:
    """Yield policies that may heal a verdict, those that change least first."""
    for wider in ("bf16", "fp32"):
        for name in _suspects(verdict):
            if _rank(policy, name) < RANKS[wider]:
                yield widened(policy, name, wider)


def _suspects(verdict: Diagnosis) -> list[str]:
    """Return the modules whose formats a bad number may have been made in, the likeliest first."""
    module, around = verdict.module, verdict.module.rpartition(".")[0]
    made_before = [] if verdict.neighbour is None else [verdict.neighbour]
    if verdict.role == "loss":
        names = []
    elif verdict.kind == "large" or verdict.role in ("output", "weight", "grad_weight"):
        names = [module, around]  # what it casts, or multiplies itself
    elif verdict.role == "grad_output":
        names = [*made_before, module, around]
    else:
        names = [around, module]
    return list(dict.fromkeys([*filter(None, names), WHOLE]))


def _rank(policy: Policy, name: str) -> int:
    here = policy if name == WHOLE else policy.for_module(name)
    formats = (here.forward, here.grad_input, here.grad_weight, here.output_format)
    return min(RANKS.get(each, 0) for each in formats)


TENSORS = 6
"""Tensors with bad numbers that are each suspected alone."""


def replay(
    prepared: Prepared,
    replay_inputs: ReplayInputs,
    loss_fn: Callable[[Any], Tensor],
    *,
    around: Around | None = None,
    backward: Callable[[Tensor, int], None] | None = None,
) -> Diagnosis | None:
    """Replay a step without its update and return its diagnosis, or None if all is finite.

    Synchronises with the device.
    """
    passes = Passes(
        prepared=prepared, inputs=replay_inputs, loss_fn=loss_fn, around=around, backward=backward
    )
    extremes: list[Extreme] = []
    verdict = passes.take(extremes=extremes)
    if verdict is None:
        return None
    verdict = replace(verdict, wording=prepared.engine.log.wording)
    if verdict.role == "weight" and verdict.kind != "large":
        return verdict
    try:
        cause = _cause(verdict, passes, extremes)
        if cause is not None:
            return replace(
                verdict, location=Location("", "batch"), amax=abs(cause.value), extreme=cause
            )
        return replace(verdict, remedy=find_remedy(verdict, passes))
    except torch.OutOfMemoryError:
        # Wider formats hold more. What came first is known all the same.
        torch.cuda.empty_cache()
        return replace(verdict, remedy=Remedy())


def _cause(verdict: Diagnosis, passes: Passes, extremes: list[Extreme]) -> Extreme | None:
    """Return which of the bad numbers that passes were given, if any, made them go wrong."""
    suspects = [[each] for each in extremes[:TENSORS]]
    if len(extremes) > 1:
        suspects.append(extremes)  # where each alone would have been enough
    for zero in suspects:
        again = passes.take(zero=zero)
        if again is None or not again.has_same_location(verdict):
            return zero[0]
    return None


def explain(
    prepared: Prepared,
    batches: Sequence[Any],
    loss_fn: Callable[[Any], Tensor],
    *,
    loss_scale: float | None = None,
) -> Diagnosis | None:
    """Replay a step and return where the first inf or NaN appeared.

    Call it before the weights change again. With sharded weights, every rank calls it with its own
    micro-batches, as many as the others, and the diagnosis names the rank. Weights, gradients,
    buffers, scales and RNG state stay unchanged.

    Args:
        prepared: The run that skipped the step.
        batches: The micro-batches of the step.
        loss_fn: Function that returns the loss of one micro-batch.
        loss_scale: Loss scale of the step, `outcome.loss_scale`. After an overflow the active scale
            is lower. None: the active scale.

    Returns:
        The diagnosis, or None if everything is finite.

    Raises:
        ConfigError: `batches` is not a list.

    Example:
        >>> if not outcome.applied:
        ...     print(nc.explain(run, [batch], loss_fn, loss_scale=outcome.loss_scale))
    """
    if not isinstance(batches, list | tuple):
        raise ConfigError(
            "explain() needs the micro-batches of the step as a list, got "
            f"{type(batches).__name__}. Write nc.explain(run, [batch], loss_fn)."
        )
    replay_inputs = ReplayInputs.before(prepared, batches)
    if loss_scale is not None and replay_inputs.scales:
        first, *others = replay_inputs.scales
        replay_inputs = replace(replay_inputs, scales=[torch.full_like(first, loss_scale), *others])
    return replay(prepared, replay_inputs, loss_fn)
