"""A prepared run inside somebody else's training loop: Lightning, transformers or accelerate.

The host trainer owns the loop and calls `autocast`, `backward`, `clip_norm` and `step` in its own
order. Nothing here waits for the device unless the host trainer reads a number.
"""

import contextlib
import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from narrowcast.errors import ConfigError
from narrowcast.health.monitor import Monitor, monitor
from narrowcast.integrations.finding_text import sentence
from narrowcast.precision.plan.policy import AnyPolicy, Policy, policy_from, suggestion
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepared import Prepared, prepare

log = logging.getLogger("narrowcast")

_TAKEN = ("model", "optimizer", "policy", "scheduler")
_ALLOWED = tuple(name for name in inspect.signature(prepare).parameters if name not in _TAKEN)


@dataclass(frozen=True)
class HostedSettings:
    """What a user asks of a plug-in. Plain values, so that it can be copied and pickled."""

    policy: AnyPolicy = "default"
    schedule: Mapping[int, AnyPolicy] = field(default_factory=dict)
    """Policies by the step at which they begin, counted from 0."""
    health_every: int = 0
    """Steps between readings of numeric statistics. 0: none."""
    prepare: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `narrowcast.prepare`."""

    def __post_init__(self) -> None:
        for name in self.prepare:
            if name not in _ALLOWED:
                hint = suggestion(name, (*_ALLOWED, "policy", "schedule", "health_every"))
                raise ConfigError(f"{name} is not a setting of the precision plug-in{hint}.")
        for step, policy in self.schedule.items():
            if not isinstance(step, int) or step < 0:
                raise ConfigError(
                    f"schedule must map steps to policies, got the key {step!r}. Write "
                    "schedule={100: 'bf16'}."
                )
            if isinstance(policy, str):
                policy_from(policy)
        if isinstance(self.policy, str):
            policy_from(self.policy)
        if self.health_every < 0:
            raise ConfigError(
                f"health_every must be at least 0, got {self.health_every}. It is the number of "
                "steps between readings; 0 turns them off."
            )

    def policy_at(self, step: int) -> AnyPolicy:
        """Return the policy of a step."""
        begun = [start for start in self.schedule if start <= step]
        return self.schedule[max(begun)] if begun else self.policy


@final
class HostedRun:
    """A `Prepared` that another trainer's loop drives."""

    def __init__(
        self,
        settings: HostedSettings,
        model: nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    ) -> None:
        widen_trained(model)
        self.settings = settings
        policy = settings.policy_at(0)
        self.run: Prepared = prepare(model, optimizers, policy=policy, **settings.prepare)
        self._own_clip_norm = self.run.engine.clip_norm
        self._monitor = self._begin_monitor(policy)
        self._schedulers: list[_HeldScheduler] = []
        self._unread: list[Outcome] = []
        self.outcome: Outcome | None = None
        """The outcome of the last step."""
        self.findings_count = 0

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context manager for forward passes and losses."""
        return self.run.autocast()

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Add the gradients of a loss, scaled if the policy needs it."""
        self.run.backward(loss, retain_graph=retain_graph)

    def clip_norm(self, max_norm: float | None) -> None:
        """Clip the gradients of the next step to this norm, in the same pass as the update.

        Without a call the `clip_norm` of `prepare` applies.
        """
        engine = self.run.engine
        engine.clip_norm = self._own_clip_norm if max_norm is None else float(max_norm)

    def unscale(self) -> None:
        """Divide the loss scale out of the gradients, so that the host may read or edit them."""
        if self.run.engine.weights.with_gradients():
            self.run.unscale()

    def step(self) -> Outcome:
        """Update the weights, or skip the step. Schedulers move for steps that are known by now."""
        self.sync_schedulers()
        if self._monitor is not None:
            self._report(self._monitor.step(self.run.steps_attempted + 1))
        try:
            self.outcome = self.run.step()
        finally:
            self.run.engine.clip_norm = self._own_clip_norm
        self._unread.append(self.outcome)
        for each in self._schedulers:
            each.outcomes.append(self.outcome)
        if self.run.engine.weights.device.type == "cpu":
            self.sync_schedulers()
        self._follow_schedule()
        return self.outcome

    def hold_scheduler(self, scheduler: Any) -> None:
        """Make `scheduler.step()`, which the host calls, move it only for applied steps."""
        if isinstance(scheduler, ReduceLROnPlateau):  # moved by a metric, not by steps
            return
        self._schedulers.append(_HeldScheduler(scheduler, sync=self.sync_schedulers))

    def sync_schedulers(self) -> None:
        """Wait for the steps so far. Move the schedulers, report skips and findings."""
        self.run.sync()
        unread, self._unread = self._unread, []
        for outcome in unread:
            if not outcome.applied:
                log.warning("step %d was skipped: %s", outcome.step, outcome.skip_reason)
        self._report(self.run.findings())
        for each in self._schedulers:
            each.catch_up()

    def logs(self) -> dict[str, float]:
        """Return the numbers that a host's logger records. Synchronises with the device."""
        self.sync_schedulers()
        stats = self.run.engine.log.stats
        numbers = {"skipped_steps": float(stats.skipped), "findings": float(self.findings_count)}
        if self.run.engine.scales.value is not None and stats.scale_history:
            numbers["loss_scale"] = stats.scale_history[-1][1]
        if stats.lost_updates is not None:
            numbers["lost_updates"] = stats.lost_updates
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values, which `torch.load(weights_only=True)` reads."""
        self.sync_schedulers()
        return self.run.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict()`, with the policy that the schedule has for its step."""
        saved = state.get("stats", {}).get("steps", 0)
        if self.settings.schedule:
            self._set_policy(self.settings.policy_at(int(saved)))
        self.run.load_state_dict(state)

    def release(self) -> nn.Module:
        """Return the plain fp32 model; schedulers belong to the host again."""
        self.sync_schedulers()
        for each in self._schedulers:
            each.release()
        self._schedulers.clear()
        if self._monitor is not None:
            self._report(self._monitor.close())
            self._monitor = None
        return self.run.release()

    def _begin_monitor(self, policy: AnyPolicy) -> Monitor | None:
        if not self.settings.health_every:
            return None
        named = policy if isinstance(policy, str | Policy) else self.run.plan.policy
        return monitor(self.run.model, policy=named, every=self.settings.health_every)

    def _follow_schedule(self) -> None:
        step = self.run.steps_attempted
        if step in self.settings.schedule:
            self._set_policy(self.settings.schedule[step])

    def _set_policy(self, policy: AnyPolicy) -> None:
        if self._monitor is not None:  # its statistics refer to the formats of one plan
            self._report(self._monitor.close())
        changes = self.run.set_policy(policy)
        self._monitor = self._begin_monitor(policy)
        if changes:
            log.info("step %d: %d modules change precision", self.run.steps_attempted, len(changes))

    def _report(self, findings: Iterable[Any]) -> None:
        for finding in findings:
            self.findings_count += 1
            log.warning("%s", sentence(finding))


@final
class _HeldScheduler:
    """A scheduler whose `step()` counts only if a step since its last call was applied.

    The class of the object is a subclass for as long as it is held. Calls wait here until the
    outcomes of their steps are known, so `step()` does not wait for the device.
    """

    def __init__(self, scheduler: Any, *, sync: Any) -> None:
        self.scheduler, self._kind = scheduler, type(scheduler)
        self.outcomes: list[Outcome] = []
        """Outcomes since the host's last call of `step()`."""
        self._calls: list[tuple[list[Outcome], tuple[Any, ...], dict[str, Any]]] = []
        kind, held = self._kind, self

        def step(self: Any, *args: Any, **kwargs: Any) -> None:
            held._calls.append((held.outcomes, args, kwargs))
            held.outcomes = []
            held.catch_up()

        def state_dict(self: Any) -> Any:
            sync()
            return kind.state_dict(self)

        def get_last_lr(self: Any) -> Any:
            sync()
            return kind.get_last_lr(self)

        own: dict[str, Any] = {"step": step, "state_dict": state_dict, "get_last_lr": get_last_lr}
        own |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        scheduler.__class__ = type(kind.__name__, (kind,), own)

    def catch_up(self) -> None:
        """Make the moves whose steps are known."""
        while self._calls:
            outcomes, args, kwargs = self._calls[0]
            if any(not outcome.known for outcome in outcomes):
                return
            self._calls.pop(0)
            if not outcomes or any(outcome.applied for outcome in outcomes):
                self._kind.step(self.scheduler, *args, **kwargs)

    def release(self) -> None:
        self.scheduler.__class__ = self._kind


def widen_trained(model: nn.Module) -> int:
    """Convert trainable 16-bit weights to fp32 in place, which is exact; return how many.

    transformers loads checkpoints in the dtype they were saved in. The policy decides afterwards
    in which format weights are stored.
    """
    narrow = [
        p
        for p in model.parameters()
        if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)
    ]
    for p in narrow:
        p.data = p.data.float()
    if narrow:
        log.info("%d trainable 16-bit weights were converted to fp32", len(narrow))
    return len(narrow)
