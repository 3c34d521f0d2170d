"""accelerate: an `Accelerator` whose models train in a policy's precision.

The loop stays an accelerate loop. Each model is prepared together with its optimizers, before
accelerate wraps it in DDP or compiles it. Only `optimizer_step_was_skipped` and the methods that
read numbers wait for the device.
"""

import contextlib
import copy
import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from narrowcast.errors import CheckpointError, ConfigError, UnsupportedError
from narrowcast.integrations.hosted_run import (
    HostedRun,
    HostedSettings,
    backward_through,
    gradient_norm,
)
from narrowcast.precision.plan.policy import AnyPolicy, suggestion
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepared import Prepared, prepare

try:
    import accelerate  # type: ignore[import-untyped,import-not-found,unused-ignore]
    import accelerate.utils  # type: ignore[import-untyped,import-not-found,unused-ignore]
except ImportError as error:
    raise ImportError(
        "nc.Accelerator needs accelerate, which is not installed. Run: pip install accelerate"
    ) from error

_utils: Any = accelerate.utils
_Accelerator: Any = accelerate.Accelerator
_AcceleratedOptimizer: Any = accelerate.optimizer.AcceleratedOptimizer
_AcceleratedScheduler: Any = accelerate.scheduler.AcceleratedScheduler

_PART_OF_RUN = "narrowcast_part_of_run"
"""Key in the state of an optimizer whose run is saved with another optimizer."""

_UNSUPPORTED = {
    "fsdp_plugin": "Use DDP, or prepare a sharded model in a loop of your own with nc.prepare",
    "deepspeed_plugin": "Use DDP, with params=bf16 and a narrow optimizer state in the policy",
    "deepspeed_plugins": "Use DDP, with params=bf16 and a narrow optimizer state in the policy",
    "megatron_lm_plugin": "Use DDP",
    "torch_tp_plugin": "Use DDP",
    "parallelism_config": "Use DDP",
}
_UNSUPPORTED_VARIABLES = {
    "ACCELERATE_USE_FSDP": "fsdp_plugin",
    "ACCELERATE_USE_DEEPSPEED": "deepspeed_plugin",
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm_plugin",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}
_HANDLERS = {
    "GradScalerKwargs": "nc.Accelerator(loss_scale=nc.LossScale(init_scale=2.0**10))",
    "AutocastKwargs": "the format of each role in the policy, such as policy='bf16, reduce=bf16'",
}


class HostedOptimizer(_AcceleratedOptimizer):  # type: ignore[misc]
    """The optimizer in an accelerate loop; `step()` takes a step of its `HostedRun`.

    accelerate treats it as an optimizer that it has prepared already.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, hosted: HostedRun | None = None) -> None:
        super().__init__(optimizer, device_placement=False)
        self._is_accelerate_prepared = True
        self.hosted = hosted
        self._outcome: Outcome | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights or skip the step; does nothing while gradients accumulate."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.gradient_state.sync_gradients:
            return loss
        if self.hosted is None:
            raise ConfigError(
                f"The weights of this {type(self.optimizer).__name__} belong to no prepared model. "
                "Pass the model and the optimizer to accelerator.prepare()."
            )
        self._outcome = self.hosted.step(self.optimizer)
        return loss

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients; does nothing while they accumulate."""
        if self.gradient_state.sync_gradients:
            self.optimizer.zero_grad(set_to_none=set_to_none is not False)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped. Waits for the device."""
        return self._outcome is not None and not self._outcome.applied

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole run, weights included."""
        if self.hosted is None:
            state: dict[str, Any] = self.optimizer.state_dict()
            return state
        if self.hosted.run.optimizers[0] is not self.optimizer:
            return {_PART_OF_RUN: True}
        return self.hosted.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a `state_dict()`. Gradients of an unfinished accumulation are dropped."""
        if self.hosted is None:
            self.optimizer.load_state_dict(state_dict)
            return
        if state_dict.keys() == {"state", "param_groups"}:
            raise CheckpointError(
                "The checkpoint holds the state of a plain torch optimizer. Continue it with "
                "accelerate.Accelerator, or load only its weights before accelerator.prepare()."
            )
        if _PART_OF_RUN not in state_dict:
            self.hosted.run.zero_grad()
            self.hosted.load_state_dict(state_dict)


@final
class HostedScheduler(_AcceleratedScheduler):  # type: ignore[misc]
    """The scheduler in an accelerate loop; moves for applied steps, without a wait for them."""

    def __init__(
        self,
        scheduler: Any,
        optimizers: Any,
        *,
        find_run: Callable[[Any], HostedRun],
        step_with_optimizer: bool,
        split_batches: bool,
    ) -> None:
        super().__init__(
            scheduler,
            optimizers,
            step_with_optimizer=step_with_optimizer,
            split_batches=split_batches,
        )
        self._find_run = find_run
        self._is_accelerate_prepared = True
        self._moves = _Moves(scheduler, split_batches=split_batches)
        self._bound = not step_with_optimizer or isinstance(scheduler, ReduceLROnPlateau)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move if the last step was applied, once per process as accelerate does."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
        elif self.gradient_state.sync_gradients:
            self.bind()
            self._moves.step(*args, **kwargs)
        elif self.gradient_state.adjust_scheduler:
            self.scheduler._step_count += 1

    def bind(self) -> None:
        """Make the moves wait for the outcomes of a run."""
        if not self._bound:
            self._find_run(self.scheduler).hold_scheduler(self._moves)
            self._bound = True

    def get_last_lr(self) -> Any:
        """Return the learning rates. Waits for the steps so far."""
        return self._moves.get_last_lr()

    def state_dict(self) -> Any:
        """Return the state of the scheduler. Waits for the steps so far."""
        return self._moves.state_dict()


class _Moves:
    """What one applied step does to a scheduler: a move per process whose batch it used."""

    def __init__(self, scheduler: Any, *, split_batches: bool) -> None:
        self.scheduler, self._split_batches = scheduler, split_batches

    def step(self, *args: Any, **kwargs: Any) -> None:
        count = 1 if self._split_batches else accelerate.state.AcceleratorState().num_processes
        for _ in range(count):
            total = getattr(self.scheduler, "total_steps", None)  # a OneCycleLR raises beyond it
            if total is None or self._split_batches or self.scheduler._step_count <= total:
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> Any:
        return self.scheduler.get_last_lr()

    def state_dict(self) -> Any:
        return self.scheduler.state_dict()


class Accelerator(_Accelerator):  # type: ignore[misc]
    """`accelerate.Accelerator` that trains in a policy's precision.

    Keep your accelerate loop. Models run in the policy's precision when they are called and return
    fp32 outputs. Steps with inf or NaN gradients are skipped, and prepared schedulers wait.

    Args:
        policy: A preset name or policy text, a `Policy`, or a torch dtype.
        schedule: Policies by the optimizer step at which they begin, such as `{100: "bf16"}`.
        health_every: Steps between readings of numeric statistics. 0: none.
        settings: Further arguments of `accelerate.Accelerator` and of `narrowcast.prepare`, such as
            `gradient_accumulation_steps=4` and `ema_decay=0.999`.

    Raises:
        ConfigError: A setting is unknown, or accelerate's mixed precision is on.
        UnsupportedError: FSDP, DeepSpeed, Megatron or tensor parallelism is requested.

    Example:
        ```python
        accelerator = nc.Accelerator(policy="fp16", gradient_accumulation_steps=4)
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        ```
    """

    def __init__(
        self,
        policy: AnyPolicy = "default",
        *,
        schedule: Mapping[int, AnyPolicy] | None = None,
        health_every: int = 0,
        **settings: Any,
    ) -> None:
        theirs, ours = _split(settings)
        self._settings = HostedSettings(
            policy=policy, schedule=schedule or {}, health_every=health_every, prepare=ours
        )
        self._hosted: list[HostedRun] = []
        self._waiting: list[nn.Module] = []
        """Models without an optimizer: frozen ones, or their optimizer is still to come."""
        self._by_model: dict[int, tuple[HostedRun, str]] = {}
        """The run of each model, and the prefix of the model's names in it."""
        self._calls: dict[int, _ModelCall] = {}
        super().__init__(**{**theirs, "mixed_precision": "no"})

    @property
    def run(self) -> Prepared:
        """The prepared run, for its plan, EMA weights and counts. Raises if there are several."""
        if len(self._hosted) != 1:
            raise ConfigError(
                f"accelerator.run needs one prepared model, got {len(self._hosted)}. Call "
                "accelerator.prepare(model, optimizer) first, or loop over accelerator.runs."
            )
        return self._hosted[0].run

    @property
    def runs(self) -> tuple[Prepared, ...]:
        """The prepared runs, one per model and its optimizers, in the order of `prepare`."""
        return tuple(each.run for each in self._hosted)

    def precision_logs(self) -> dict[str, float]:
        """Return skipped steps, loss scale and findings, to pass to `accelerator.log`.

        Waits for the device. With several models, the names end with the index of the model.
        """
        if len(self._hosted) == 1:
            return self._hosted[0].logs()
        numbered = enumerate(each.logs() for each in self._hosted)
        return {f"{name}_{i}": value for i, logs in numbered for name, value in logs.items()}

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, data loaders and schedulers, as accelerate does.

        Pass a model and its optimizer in one call, or in separate calls in one process.
        """
        placements: list[Any] = device_placement or [None] * len(args)
        if len(placements) == len(args):  # otherwise accelerate raises
            pairs = list(zip(args, placements, strict=True))
            self._join(
                [(each, place) for each, place in pairs if isinstance(each, nn.Module)],
                [(each, place) for each, place in pairs if isinstance(each, torch.optim.Optimizer)],
            )
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> Any:
        """Prepare a model; its forward runs in the policy's precision from now on."""
        self._join([(model, device_placement)], [])
        wrapped = super().prepare_model(
            model, device_placement=device_placement, evaluation_mode=evaluation_mode
        )
        if wrapped is not model and isinstance(wrapped, torch._dynamo.OptimizedModule):
            # fp8 weights are cast outside of the compiled code.
            inner = _unwrap(model)
            forward = wrapped.forward

            def call(*args: Any, **kwargs: Any) -> Any:
                with self._get_autocast(inner):
                    return forward(*args, **kwargs)

            wrapped.__dict__["forward"] = call
        return wrapped

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        """Prepare an optimizer; its `step()` checks gradients, updates weights or skips."""
        made = self._join([], [(optimizer, device_placement)])
        return super().prepare_optimizer(made[0])

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler; its `step()` counts for applied steps only."""
        if getattr(scheduler, "_is_accelerate_prepared", False):
            return super().prepare_scheduler(scheduler)
        made = HostedScheduler(
            scheduler,
            self._optimizers,
            find_run=self._run_of_scheduler,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
        )
        self._schedulers.append(made)
        if any(self._follows(scheduler, each) for each in self._hosted):
            made.bind()
        return made

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of a loss, divided by the accumulation steps, scaled where needed."""
        retain_graph = bool(kwargs.pop("retain_graph", False))
        if kwargs:
            raise UnsupportedError(
                f"backward() supports retain_graph, got {', '.join(kwargs)}. For other gradients "
                "call torch.autograd.grad(loss, …)."
            )
        loss = loss / self.gradient_accumulation_steps
        if not self._hosted:
            loss.backward(retain_graph=retain_graph)
            return
        backward_through(self._hosted, loss, retain_graph=retain_graph)

    @contextlib.contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """Run code outside the model, such as a loss, in the policy's precision."""
        if autocast_handler is not None and not autocast_handler.enabled:
            with torch.autocast(self.device.type, enabled=False):
                yield
        elif self._hosted:
            with self._hosted[0].autocast():
                yield
        else:
            yield

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the loss scale out of the gradients, so that you can read or edit them."""
        if optimizer is None:
            runs = self._hosted
        else:
            several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
            runs = [r for r in self._hosted if any(self._owns(r, each) for each in several)]
        for each in runs:
            each.unscale()

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip the gradients of this step, and return their norm before it, on the device.

        While gradients accumulate it only returns the norm. The norm of all weights of a model is
        clipped in the update itself.
        """
        selected = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        chosen, runs = set(selected), self._runs_with(selected)
        if len(runs) == 1 and norm_type == 2:
            hosted = runs[0]
            if not (set(hosted.run.engine.weights.all) - chosen):
                if self.sync_gradients:
                    hosted.clip_norm(None if math.isinf(max_norm) else max_norm)
                return gradient_norm(hosted)
        if runs and not self.sync_gradients:
            norms = [_partial_norm(each, chosen, norm_type) for each in runs]
            total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
            return total
        for each in runs:
            each.unscale()
        norm: Tensor = self._clip_grad_norm_dtensor_aware(selected, max_norm, norm_type=norm_type)
        return norm

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip each gradient of this step; does nothing while gradients accumulate."""
        selected = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self.sync_gradients:
            for each in self._runs_with(selected):
                each.unscale()
            torch.nn.utils.clip_grad_value_(selected, clip_value)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the weights of a model in fp32, master weights included. Synchronises."""
        inner = _unwrap(model)
        if id(inner) not in self._by_model:
            plain: dict[str, Any] = super().get_state_dict(model, unwrap=unwrap)
            return plain
        hosted, prefix = self._by_model[id(inner)]
        full = hosted.run.fp32_state_dict()
        state = {
            name[len(prefix) :]: value for name, value in full.items() if name.startswith(prefix)
        }
        if unwrap or model is inner or not state:
            return state
        name = next(iter(inner.state_dict()))
        outside = next(iter(model.state_dict())).removesuffix(name)
        return {outside + name: value for name, value in state.items()}

    def free_memory(self, *objects: Any) -> Any:
        """Release the prepared models, which become plain fp32 models, and forget all objects."""
        self._release()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Release the prepared models and finish the trackers."""
        self._release()
        super().end_training()

    def _join(
        self,
        models: list[tuple[nn.Module, bool | None]],
        optimizers: list[tuple[torch.optim.Optimizer, bool | None]],
    ) -> list[HostedOptimizer]:
        """Prepare models whose optimizers are known; return the stand-ins of the optimizers."""
        for model, placed in models:
            self._add_model(model, placed=self.device_placement if placed is None else placed)
        stand_ins = [
            self._add_optimizer(each, placed=self.device_placement if place is None else place)
            for each, place in optimizers
        ]
        unbound = [each for each in self._optimizers if _is_unbound(each)]
        for joined, partners in _components(self._waiting, unbound):
            self._host(joined, partners)
        return stand_ins

    def _add_model(self, model: nn.Module, *, placed: bool) -> None:
        inner = _unwrap(model)
        if id(inner) in self._by_model or any(each is inner for each in self._waiting):
            return
        taken = {p for hosted in self._hosted for p in hosted.run.engine.weights.all}
        if any(p in taken for p in inner.parameters()):
            raise ConfigError(
                f"Weights of this {type(inner).__name__} are in an optimizer that was prepared "
                "before it. Pass all models of an optimizer to one accelerator.prepare() call."
            )
        if placed and not self.verify_device_map(inner):
            inner.to(self.device)
        self._waiting.append(inner)
        self._calls[id(inner)] = _ModelCall(inner, self._get_autocast)

    def _add_optimizer(self, optimizer: Any, *, placed: bool) -> HostedOptimizer:
        for each in self._optimizers:
            if optimizer is each or optimizer is each.optimizer:
                return each  # type: ignore[no-any-return]
        made = optimizer if isinstance(optimizer, HostedOptimizer) else HostedOptimizer(optimizer)
        if placed and made.optimizer.state:
            state = accelerate.optimizer.move_to_device(made.optimizer.state_dict(), self.device)
            made.optimizer.load_state_dict(state)
        self._optimizers.append(made)
        return made

    def _host(self, models: list[nn.Module], optimizers: list[HostedOptimizer]) -> None:
        """Prepare models that share optimizers as one run."""
        prepared_before = [_unwrap(each) for each in self._models]
        if self.use_distributed and any(m is each for m in models for each in prepared_before):
            raise ConfigError(
                "With several processes the model is wrapped in DDP before its optimizer is known. "
                "Pass the model and the optimizer to one accelerator.prepare() call."
            )
        if self.use_distributed:
            for each in models:
                _broadcast(each)
        model = models[0] if len(models) == 1 else nn.ModuleList(models)
        settings = self._settings
        compiled = self.state.dynamo_plugin.backend != _utils.DynamoBackend.NO
        if compiled and settings.prepare.get("execution") is None:
            settings = replace(settings, prepare={**settings.prepare, "execution": "compiled"})
        for each in models:
            self._calls.pop(id(each)).remove()
        try:
            hosted = HostedRun(settings, model, [each.optimizer for each in optimizers])
        finally:  # around the modules of the run
            for each in models:
                self._calls[id(each)] = _ModelCall(each, self._get_autocast)
        hosted.save_full_weights()
        self._hosted.append(hosted)
        for i, each in enumerate(models):
            self._by_model[id(each)] = (hosted, "" if len(models) == 1 else f"{i}.")
        self._waiting = [m for m in self._waiting if not any(m is each for each in models)]
        for stand_in in optimizers:
            stand_in.hosted = hosted
        for scheduler in self._schedulers:  # before a first step, which may be skipped
            if self._follows(scheduler.scheduler, hosted):
                scheduler.bind()

    def _get_autocast(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast of a model: its run's, or for a frozen model that of the first."""
        if id(model) in self._by_model:
            return self._by_model[id(model)][0].autocast()
        if self._hosted:
            return self._hosted[0].run.engine.entry.region()
        return contextlib.nullcontext()

    def _runs_with(self, parameters: Iterable[Tensor]) -> list[HostedRun]:
        chosen = {id(p) for p in parameters}
        return [r for r in self._hosted if any(id(p) in chosen for p in r.run.engine.weights.all)]

    def _owns(self, hosted: HostedRun, optimizer: Any) -> bool:
        plain = getattr(optimizer, "optimizer", optimizer)
        return any(each is plain for each in hosted.run.optimizers)

    def _follows(self, scheduler: Any, hosted: HostedRun) -> bool:
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None:
            return len(self._hosted) == 1
        return self._owns(hosted, optimizer)

    def _run_of_scheduler(self, scheduler: Any) -> HostedRun:
        runs = [each for each in self._hosted if self._follows(scheduler, each)]
        if not runs:
            raise ConfigError(
                f"This {type(scheduler).__name__} was built for an optimizer that is not prepared. "
                "Pass its optimizer to accelerator.prepare() as well."
            )
        return runs[0]

    def _release(self) -> None:
        for call in self._calls.values():
            call.remove()
        for optimizer in self._optimizers:
            if isinstance(optimizer, HostedOptimizer):
                optimizer.hosted = None
        for hosted in self._hosted:
            hosted.release()
        self._calls, self._by_model, self._hosted, self._waiting = {}, {}, [], []


@final
class _ModelCall:
    """A model's `forward`: the model's own, in its autocast, with outputs in fp32.

    Copies and pickles of the model have their own `forward` again.
    """

    def __init__(
        self,
        model: nn.Module,
        get_autocast: Callable[[nn.Module], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self._model, self._get_autocast = model, get_autocast
        self._own = model.__dict__.get("forward")
        functools.update_wrapper(self, type(model).forward)
        self.__signature__ = inspect.signature(model.forward)
        model.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the call of the compiled module is in autocast
            return _utils.convert_to_fp32(self._forward(*args, **kwargs))
        with self._get_autocast(self._model):
            return _utils.convert_to_fp32(self._forward(*args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._own is not None:
            return copy.deepcopy(self._own, memo)
        return MethodType(type(memo[id(self._model)]).forward, memo[id(self._model)])

    def __reduce__(self) -> Any:
        return getattr, (self._model, "forward")

    def remove(self) -> None:
        """Give the model its own `forward` back."""
        attributes = self._model.__dict__
        if attributes.get("forward") is self:
            del attributes["forward"]
        attributes.pop("nc_kept_forward", None)
        if self._own is not None:
            attributes["forward"] = self._own

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        # The class changes with the policy.
        return type(self._model).forward(self._model, *args, **kwargs)


def _split(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of accelerate and those of `prepare`; raise for others."""
    theirs = set(inspect.signature(_Accelerator.__init__).parameters) - {"self"}
    ours = set(inspect.signature(prepare).parameters) - {"model", "optimizer"}
    for name in settings:
        if name == "scheduler":
            raise ConfigError(
                "scheduler is not a setting of nc.Accelerator. Pass the scheduler to "
                "accelerator.prepare(model, optimizer, loader, scheduler)."
            )
        if name not in theirs | ours:
            hint = suggestion(name, (*theirs, *ours, "policy", "schedule", "health_every"))
            raise ConfigError(f"{name} is not a setting of nc.Accelerator{hint}.")
    _check_precision("mixed_precision", settings.get("mixed_precision"))
    _check_precision("ACCELERATE_MIXED_PRECISION", os.environ.get("ACCELERATE_MIXED_PRECISION"))
    for name, instead in _UNSUPPORTED.items():
        if settings.get(name) is not None:
            raise UnsupportedError(f"nc.Accelerator does not support {name}. {instead}.")
    for variable, name in _UNSUPPORTED_VARIABLES.items():
        if os.environ.get(variable, "false").lower() == "true":
            raise UnsupportedError(
                f"nc.Accelerator does not support {variable}, which accelerate launch sets from "
                f"your configuration. {_UNSUPPORTED[name]}."
            )
    for handler in settings.get("kwargs_handlers") or ():
        kind = type(handler).__name__
        if kind in _HANDLERS:
            raise ConfigError(
                f"{kind} has no effect in nc.Accelerator. Write {_HANDLERS[kind]} instead."
            )
    split = {name: value for name, value in settings.items() if name in theirs}
    return split, {name: value for name, value in settings.items() if name in ours}


def _check_precision(name: str, value: Any) -> None:
    if value is None or str(value) == "no":
        return
    policy = "fp8-delayed" if str(value) == "fp8" else str(value)
    where = (
        "leave mixed_precision out"
        if name == "mixed_precision"
        else "start it with accelerate launch --mixed_precision no"
    )
    raise ConfigError(
        f"{name} must be 'no', because the policy sets the precision, got {str(value)!r}. Write "
        f"nc.Accelerator(policy={policy!r}) and {where}."
    )


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DDP and `torch.compile`."""
    inner: nn.Module = _utils.extract_model_from_parallel(model, keep_torch_compile=False)
    return inner


@torch.no_grad()
def _partial_norm(hosted: HostedRun, chosen: set[Tensor], norm_type: float) -> Tensor:
    """Return the norm of the gradients of some weights, without their loss scale."""
    engine = hosted.run.engine
    present = [i for i in engine.weights.with_gradients() if engine.weights.all[i] in chosen]
    if not present:
        return torch.zeros((), device=engine.weights.device)
    gradients, inv_scale = engine.weights.gradients(present), engine.scales.inv_scale(present)
    norms = torch.stack(torch._foreach_norm(list(gradients), norm_type, dtype=torch.float32))
    true_norms = norms if inv_scale is None else norms * inv_scale
    total: Tensor = torch.linalg.vector_norm(true_norms, norm_type)
    return total


def _is_unbound(optimizer: Any) -> bool:
    return isinstance(optimizer, HostedOptimizer) and optimizer.hosted is None


def _components(
    models: list[nn.Module], optimizers: list[HostedOptimizer]
) -> list[tuple[list[nn.Module], list[HostedOptimizer]]]:
    """Group models and optimizers that share weights, in the order of the models."""
    weights = {id(m): set(m.parameters()) for m in models}
    groups: list[tuple[list[nn.Module], list[HostedOptimizer], set[Any]]] = []
    for optimizer in optimizers:
        held = {p for group in optimizer.param_groups for p in group["params"]}
        touched = [m for m in models if weights[id(m)] & held]
        if not touched:
            continue
        joined, partners = touched, [optimizer]
        reach = held.union(*(weights[id(m)] for m in touched))
        for other in [group for group in groups if group[2] & reach]:
            groups.remove(other)
            joined = [*other[0], *(m for m in joined if not any(m is each for each in other[0]))]
            partners, reach = [*other[1], *partners], reach | other[2]
        groups.append((joined, partners, reach))
    return [(joined, partners) for joined, partners, _ in groups]


def _broadcast(model: nn.Module) -> None:
    """Give every process the weights of the first, before master weights are made of them."""
    for tensor in (*model.parameters(), *model.buffers()):
        torch.distributed.broadcast(tensor.detach(), src=0)
