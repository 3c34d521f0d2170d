"""A prepared run inside the training loop of Lightning, transformers or accelerate.

The host trainer owns the loop and calls `autocast`, `backward`, `clip_norm` and `step` in its own
order. Nothing here waits for the device unless the host trainer reads a number.
"""

import contextlib
import copy
import functools
import inspect
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.hooks import RemovableHandle

from narrowcast.errors import CheckpointError, ConfigError, UnsupportedError
from narrowcast.health.monitor import Monitor, monitor
from narrowcast.integrations.finding_text import sentence
from narrowcast.precision.nested import copy_tensors
from narrowcast.precision.plan.policy import AnyPolicy, Policy, policy_from, suggestion
from narrowcast.precision.step.checks import check_loss, explaining_dtypes
from narrowcast.precision.step.engine import add_gradients, look_at_gradients
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepared import Prepared, prepare
from narrowcast.precision.step.saved_state import rows_of_saved
from narrowcast.precision.step.step_log import Stats

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
        self.known_outcome: Outcome | None = None
        """The newest outcome that can be read without waiting for the device."""
        self.findings_count = 0
        self._save_hooks: list[RemovableHandle | _SavePretrained] = []

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

    def unscale(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Divide the loss scale out of the gradients, so that the host may read or edit them.

        With `optimizer`, only out of those of its weights.
        """
        if any(p.grad is not None for p in self.weights(optimizer)):
            with self._other_gradients_aside(optimizer):
                self.run.unscale()

    def weights(self, optimizer: torch.optim.Optimizer | None = None) -> list[nn.Parameter]:
        """Return the weights of the model that an optimizer updates; all of them without one."""
        weights = self.run.engine.weights
        return weights.all if optimizer is None else weights.held[optimizer]

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> Outcome:
        """Update the weights, or skip the step. Schedulers move for steps that are known by now.

        With `optimizer`, only its weights are updated. Gradients of others stay, under the loss
        scale of the next step.
        """
        if self._is_one_of_several(optimizer) and (self.run.has_ema or self.run.has_lookahead):
            raise UnsupportedError(
                "ema_decay and lookahead need one step of all optimizers, but these optimizers "
                "step one at a time. Leave them out, and average the weights with a callback."
            )
        self.sync_schedulers()
        if self._monitor is not None:
            self._report(self._monitor.step(self.run.steps_attempted + 1))
        try:
            with self._other_gradients_aside(optimizer):
                self.outcome = self.run.step()
        finally:
            self.run.engine.clip_norm = self._own_clip_norm
        self._unread.append(self.outcome)
        for each in self._schedulers:
            if not self._is_one_of_several(optimizer) or each.follows(optimizer):
                each.outcomes.append(self.outcome)
        if self.run.engine.weights.device.type == "cpu":
            self.sync_schedulers()
        self._follow_schedule()
        return self.outcome

    def hold_scheduler(self, scheduler: Any) -> None:
        """Make `scheduler.step()`, which the host calls, move it only for applied steps."""
        if isinstance(scheduler, ReduceLROnPlateau):  # moved by a metric, not by steps
            return
        if any(each.scheduler is scheduler for each in self._schedulers):
            return
        self._schedulers.append(_HeldScheduler(scheduler, sync=self.sync_schedulers))

    def sync_schedulers(self) -> None:
        """Wait for the steps so far. Move the schedulers, report skips and findings."""
        self.run.sync()
        unread, self._unread = self._unread, []
        for outcome in unread:
            self.known_outcome = outcome
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

    def save_full_weights(self) -> None:
        """Make `model.state_dict()` return fp32 master weights instead of 16-bit weights.

        Whatever the host or a callback saves then loads into the plain model without a loss.
        """
        model = self.run.model
        pretrained = [each for each in model.modules() if _names_dtype_in_config(each)]
        for each in dict.fromkeys([model, *pretrained]):
            self._save_hooks.append(each.register_state_dict_post_hook(_FullWeights(self.run)))
        if self.run.plan.policy.params != "fp32" or self.settings.schedule:
            self._save_hooks += [_SavePretrained(each) for each in pretrained]

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values, which `torch.load(weights_only=True)` reads."""
        self.sync_schedulers()
        return self.run.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict()`, with the policy that the schedule has for its step."""
        step = int(state.get("stats", {}).get("steps", 0))
        with self._policy_of_checkpoint(state.get("policy"), step):
            self.run.load_state_dict(state)

    def progress(self) -> dict[str, Any]:
        """Return the part of `state_dict()` that neither fp32 weights nor optimizers hold."""
        self.sync_schedulers()
        engine = self.run.engine
        average = engine.weights.average
        state = {
            "policy": str(engine.plan.policy),
            "scales": engine.scales.state_dict(),
            "amax": engine.fp8.state_dict(),
            "applied_before": engine.first_scales.applied_before,
            "rows": engine.plan.rows.to_json(),
            "stats": engine.log.stats.state_dict(),
            "average": None if average is None else average.averages,
        }
        return copy.deepcopy(state)

    def load_progress(self, state: dict[str, Any]) -> None:
        """Restore a `progress()` of a run with the same policy and model."""
        engine, stats = self.run.engine, Stats.from_state(state["stats"])
        saved = self._policy_of_checkpoint(state["policy"], stats.steps)
        with saved, rows_of_saved(engine, state):
            engine.scales.load_state_dict(state["scales"])
            engine.fp8.load_state_dict(state["amax"])
            if engine.weights.average is not None and state["average"] is not None:
                copy_tensors(engine.weights.average.averages, state["average"])
            engine.log.stats, engine.steps_begun = stats, stats.steps
            engine.begin_first_scales(step=0, applied_before=int(state["applied_before"]))

    @contextlib.contextmanager
    def _policy_of_checkpoint(self, saved: str | None, step: int) -> Iterator[None]:
        """Use the policy that a checkpoint of this step was written with while it is loaded.

        The schedule may change the policy at this very step, and the saved run need not have.
        """
        schedule, engine = self.settings.schedule, self.run.engine
        continued = self.settings.policy_at(step)
        for policy in (continued, self.settings.policy_at(step - 1)) if schedule else ():
            self._set_policy(policy)
            if str(engine.plan.policy) == saved:
                break
        if saved is not None and str(engine.plan.policy) != saved:
            if schedule:
                self._set_policy(continued)
            raise CheckpointError(
                f"The checkpoint of step {step} was written with the policy {saved!r}, but this "
                f"run uses {str(engine.plan.policy)!r}. Use the policy of the checkpoint, and "
                f"schedule={{{step}: ...}} to continue with another one."
            )
        yield
        if schedule:
            self._set_policy(continued)

    def release(self) -> nn.Module:
        """Return the plain fp32 model; schedulers belong to the host again."""
        self.sync_schedulers()
        for hook in self._save_hooks:
            hook.remove()
        self._save_hooks.clear()
        for each in self._schedulers:
            each.release()
        self._schedulers.clear()
        if self._monitor is not None:
            self._report(self._monitor.close())
            self._monitor = None
        return self.run.release()

    def _is_one_of_several(self, optimizer: torch.optim.Optimizer | None) -> bool:
        return optimizer is not None and len(self.run.optimizers) > 1

    @contextlib.contextmanager
    def _other_gradients_aside(self, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
        """Leave only the gradients of one optimizer's weights inside the block."""
        if not self._is_one_of_several(optimizer):
            yield
            return
        engine, own = self.run.engine, set(self.weights(optimizer))
        others = [i for i in engine.weights.with_gradients() if engine.weights.all[i] not in own]
        before = engine.scales.inv_scale(others) if others else None

        @torch.no_grad()
        def rescale() -> None:
            after = engine.scales.inv_scale(others)
            if before is not None and after is not None:  # powers of two, so this is exact
                engine.weights.multiply_gradients(others, before / after)

        with engine.weights.ownership.gradients.set_aside(others, rescale=rescale):
            yield

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
class _FullWeights:
    """A hook of `state_dict()` that replaces 16-bit weights by fp32; without effect in a copy."""

    def __init__(self, run: Prepared | None = None) -> None:
        self._run = run

    def __reduce__(self) -> Any:
        """Be copied without the run: a copy of the model has fp32 weights."""
        return _FullWeights, ()

    def __call__(self, model: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Widen the weights in `state`, except parameters of a `keep_vars` call."""
        if self._run is None:
            return
        weights = self._run.engine.weights
        get_value, trained = weights.ownership.stand_in or weights.full, set(weights.all)
        for name, p in model.named_parameters(remove_duplicate=False):
            value: Any = state.get(prefix + name)
            is_copy = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            if is_copy and p in trained and value.dtype != torch.float32:
                state[prefix + name] = get_value(p).detach()


def _names_dtype_in_config(module: nn.Module) -> bool:
    """Return whether this is a model of transformers, which saves a config with its dtype."""
    kind: Any = type(module)
    if not hasattr(kind, "save_pretrained") or not hasattr(kind, "dtype"):
        return False
    return "save_directory" in inspect.signature(kind.save_pretrained).parameters


@final
class _SavePretrained:
    """`save_pretrained` of a transformers model, with the dtype of the saved weights in the config.

    transformers writes the dtype of the model, and `from_pretrained` would round fp32 weights to
    it. Copies and pickles of the model have their own method.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._call: Any = model.save_pretrained
        functools.update_wrapper(self, self._call)
        model.__dict__["save_pretrained"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._call(*args, **kwargs)
        inputs = inspect.signature(self._call).bind(*args, **kwargs).arguments
        weights = (inputs.get("state_dict") or {}).values()
        floats = [w.dtype for w in weights if isinstance(w, Tensor) and w.is_floating_point()]
        dtype = floats[0] if floats else torch.float32
        path = Path(inputs["save_directory"]) / "config.json"
        if inputs.get("is_main_process", True) and path.exists():
            config = json.loads(path.read_text())
            for name in {"dtype", "torch_dtype"} & config.keys():
                config[name] = str(dtype).removeprefix("torch.")
            path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self._model)]
        return MethodType(type(copied).save_pretrained, copied)

    def __reduce__(self) -> Any:
        return getattr, (self._model, "save_pretrained")

    def remove(self) -> None:
        """Give the model its own method back."""
        if self._model.__dict__.get("save_pretrained") is self:
            del self._model.__dict__["save_pretrained"]


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

    def follows(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Whether it sets the learning rate of this optimizer."""
        return getattr(self.scheduler, "optimizer", optimizer) is optimizer

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


@torch.no_grad()
def gradient_norm(hosted: HostedRun) -> Tensor:
    """Return the total norm of the unscaled gradients, on the device. Does not wait for it."""
    engine = hosted.run.engine
    present = engine.weights.with_gradients()
    if not present:
        return torch.zeros((), device=engine.weights.device)
    checked, _ = look_at_gradients(present, engine.scales, engine.weights)
    if engine.weights.fused is not None:
        engine.weights.fused.norms.taken_places()  # gradients may move before the step
    return checked.norm


def backward_through(
    runs: Sequence[HostedRun], loss: Tensor, *, retain_graph: bool = False
) -> None:
    """Add the gradients of a loss to every run whose weights it reaches.

    Each run has its own loss scale. A loss that reaches several is scaled by the smallest of their
    scales, and the gradients of each run are then multiplied up to its own, which is exact.
    """
    check_loss(loss)
    reached = runs if len(runs) == 1 else _reached(loss, runs)
    if len(reached) <= 1:
        (reached or runs)[0].backward(loss, retain_graph=retain_graph)
        return
    engines = [each.run.engine for each in reached]
    if any(engine.scales.per_loss or engine.scales.parts for engine in engines):
        raise UnsupportedError(
            f"A loss that reaches {len(engines)} prepared models needs one loss scale per model, "
            "got several. Leave out scale_groups and named loss scales."
        )
    scales = [
        engine.scales.value if engine.scales.value is not None else torch.ones_like(loss.float())
        for engine in engines
    ]
    smallest = torch.stack([scale.reshape(()) for scale in scales]).amin()
    earlier: list[list[Tensor | None]] = []
    with contextlib.ExitStack() as stack:
        for engine in engines:
            engine.weights.ownership.gradients.before_backward(
                scaled=engine.scales.value is not None
            )
            earlier.append([p.grad for p in engine.weights.all])
            engine.weights.forget_gradients()
            stack.enter_context(explaining_dtypes(engine.model))
            stack.enter_context(engine.buffers.passes_again())
        first = engines[0]
        add_gradients(
            loss.float() * (smallest / scales[0]),
            name="loss",
            retain_graph=retain_graph,
            scales=first.scales,
            weights=first.weights,
            entry=first.entry,
        )
    for engine, scale, before in zip(engines, scales, earlier, strict=True):
        with torch.no_grad():
            fresh = [p.grad for p in engine.weights.all if p.grad is not None]
            if fresh:
                torch._foreach_mul_(fresh, scale / smallest)
            for p, grad in zip(engine.weights.all, before, strict=True):
                if grad is not None:
                    p.grad = grad if p.grad is None else p.grad.add_(grad)
        engine.weights.ownership.gradients.after_backward(scaled=engine.scales.value is not None)


def _reached(loss: Tensor, runs: Sequence[HostedRun]) -> list[HostedRun]:
    """Return the runs whose weights a loss depends on, by its graph."""
    owners = {id(p): i for i, run in enumerate(runs) for p in run.run.engine.weights.all}
    reached: set[int] = set()
    seen: set[Any] = set()
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().startswith("CheckpointFunction"):
            return list(runs)  # reentrant checkpointing hides the weights that it uses
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in owners:
            reached.add(owners[id(variable)])
        nodes.extend(following for following, _ in node.next_functions)
    return [runs[i] for i in sorted(reached)]


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
