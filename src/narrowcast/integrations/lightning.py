"""Lightning and Fabric: a precision plug-in, and a callback that monitors a module.

`lightning.pytorch` and `pytorch_lightning` are two copies of one library, and each accepts only
subclasses of its own `Precision`. The plug-in inherits from those of all imported copies.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.health.monitor import Monitor, monitor
from narrowcast.integrations.finding_text import Tell, sentence
from narrowcast.integrations.hosted_run import HostedRun, HostedSettings
from narrowcast.precision.nested import map_tensors
from narrowcast.precision.plan.policy import AnyPolicy, Policy
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepared import Prepared
from narrowcast.precision.step.step_log import Stats
from narrowcast.precision.swap import plain_class
from narrowcast.runs import FindingRecord

_PACKAGES = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")
_UNSUPPORTED = ("FSDP", "DeepSpeed", "XLA", "ModelParallel")


class _HostInterface:
    """The methods that Lightning and Fabric call on a precision plug-in."""

    precision = "32-true"
    """The dtype of weights and inputs outside of training, as Lightning names it."""

    def _begin(self, settings: HostedSettings) -> None:
        self.settings = settings
        self._hosted: HostedRun | None = None
        self._host: Any = None
        """The `Precision` class of the trainer's package; none under Fabric."""
        self._trainer: Any = None
        self._undo = contextlib.ExitStack()
        """Undoes what was changed in objects of Lightning."""
        self._is_evaluating = False
        self._stats = Stats()
        self._ema: dict[str, Tensor] | None = None
        self._progress: dict[str, Any] = {}
        """What a checkpoint that is saved after `fit` needs besides weights and moments."""
        self.outcome: Outcome | None = None
        """The outcome of the last step; it stays readable after `fit`."""

    # Setting up and letting go

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Take note of a module that Fabric sets up; its optimizers follow."""
        if not hasattr(module, "_trainer") or module._trainer is None:
            _after_fabric_setup(module, self._setup_fabric)
        return module

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Prepare the model and the optimizers that a `Trainer` fits."""
        module: Any = model.module if isinstance(model, DistributedDataParallel) else model
        trainer = module.trainer
        _check_strategy(trainer.strategy)
        self._host, self._trainer = _host_class(self, module), trainer
        ours = [_unwrap(each) for each in optimizers]
        is_fitting = trainer.state.fn == "fit"  # a trainer keeps the optimizers of its last fit
        if not is_fitting or not ours or type(ours[0]).__name__ == "_MockOptimizer":
            return model, optimizers, lr_schedulers
        _check_module(module, trainer.callbacks)
        try:
            hosted = self._prepare(model, ours)
        except UnsupportedError as error:
            if model is module or "DistributedDataParallel" not in str(error):
                raise
            raise UnsupportedError(
                "Lightning wraps the model in DistributedDataParallel before the plug-in sees it, "
                "so weights must stay fp32. Leave params= out of the policy."
            ) from error
        for config in lr_schedulers:
            hosted.hold_scheduler(config.scheduler)
        if len(ours) > 1:
            self._undo.callback(_toggle_model_weights(module, lambda: self._running))
        self._undo.callback(_release_first(trainer.strategy, self._release))
        return model, optimizers, lr_schedulers

    def _setup_fabric(self, fabric: Any, module: Any, optimizers: list[Any]) -> None:
        """Prepare what `fabric.setup(model, optimizer)` was called with."""
        if not optimizers:
            return
        _check_strategy(fabric.strategy)
        if self._hosted is not None:
            raise UnsupportedError(
                "fabric.setup() was called with a second model and optimizer. Put the models into "
                "one nn.ModuleDict and write fabric.setup(models, optimizer_1, optimizer_2), or "
                "call release() on the plug-in first."
            )
        self._prepare(module._forward_module, [_unwrap(each) for each in optimizers])
        for each in optimizers:
            vars(each)["zero_grad"] = _unwrap(each).zero_grad
            self._undo.callback(vars(each).pop, "zero_grad", None)
        self._undo.callback(_skip_nonfinite_norms(fabric.strategy))

    def _prepare(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> HostedRun:
        self._hosted = HostedRun(self.settings, model, optimizers)
        self._hosted.save_full_weights()
        self._ema, self._is_evaluating = None, False
        return self._hosted

    def _release(self) -> None:
        """Make the model plain fp32 again and keep what is read afterwards."""
        self._undo.close()
        hosted, self._hosted = self._hosted, None
        self._host = self._trainer = None
        if hosted is None:
            return
        self._stats, self._progress = hosted.run.stats(), hosted.progress()
        if hosted.run.has_ema:
            self._ema = hosted.run.ema_state_dict()
        evaluated = hosted.run.eval_state_dict() if hosted.run.has_lookahead else None
        hosted.release()
        if evaluated is not None:
            hosted.run.model.load_state_dict(evaluated)

    def teardown(self) -> None:
        """Release the model."""
        self._release()

    # One step

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context manager for forward passes and losses."""
        hosted = self._hosted
        if hosted is None:
            return contextlib.nullcontext()
        if self._trainer is not None:
            hosted = self._with_added_weights(hosted)
            _clear_model_gradients(self._trainer.strategy)
            self._follow_phase(hosted)
            if self._is_evaluating and hosted.run.has_lookahead:
                return _both(hosted.run.use_eval_weights(), hosted.autocast())
        return hosted.autocast()

    def _with_added_weights(self, hosted: HostedRun) -> HostedRun:
        """Prepare the model again if a callback (`BaseFinetuning`) has added weights."""
        optimizers = list(hosted.run.optimizers)
        counts = [sum(len(group["params"]) for group in o.param_groups) for o in optimizers]
        if counts == [len(hosted.weights(each)) for each in optimizers]:
            return hosted
        if hosted.run.has_ema or hosted.run.has_lookahead:
            raise UnsupportedError(
                "Weights were added to an optimizer during fit(), which ema_decay and lookahead do "
                "not support. Give all weights to the optimizer in configure_optimizers()."
            )
        progress, model = hosted.progress(), hosted.release()
        renewed = self._prepare(model, optimizers)
        renewed.load_progress(progress)
        return renewed

    def _follow_phase(self, hosted: HostedRun) -> None:
        """Refresh weights in fp8 when validation begins or ends: callbacks swap them by `.data`."""
        evaluating = not self._trainer.training
        if evaluating != self._is_evaluating:
            self._is_evaluating = evaluating
            torch.autograd.graph.increment_version(hosted.weights())

    def convert_output(self, data: Any) -> Any:
        """Return 16-bit outputs of a module that Fabric runs in fp32, so that the loss is in it."""
        return map_tensors(data, _widened)

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Call the trainer's hooks."""
        return tensor if self._host is None else self._host.pre_backward(self, tensor, module)

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of a loss, scaled if the policy needs it."""
        args = args if self._host is None else args[1:]  # Lightning passes the optimizer
        if self._hosted is None:
            if self._host is None:
                raise ConfigError(
                    "The plug-in has no optimizer. Set up both in one call: model, optimizer = "
                    "fabric.setup(model, optimizer)."
                )
            self._host.backward(self, tensor, model, None, *args, **kwargs)
            return
        if args or kwargs.keys() - {"retain_graph"}:
            raise UnsupportedError(
                f"backward() takes retain_graph only, got {', '.join(kwargs) or 'arguments'}. "
                "Compute other gradients with torch.autograd.grad."
            )
        self._hosted.backward(tensor, retain_graph=bool(kwargs.get("retain_graph")))

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        """Call the trainer's hooks."""
        return tensor if self._host is None else self._host.post_backward(self, tensor, module)

    def optimizer_step(
        self,
        optimizer: Any,
        model: Any = None,
        closure: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute the gradients and update the weights, or skip the step."""
        hosted, optimizer = self._hosted, _unwrap(optimizer)
        if hosted is None:
            if self._host is None:
                return optimizer.step(**({} if closure is None else {"closure": closure}))
            return self._host.optimizer_step(self, optimizer, model, closure, **kwargs)
        if kwargs:
            raise UnsupportedError(
                f"optimizer.step() takes a closure only, got {', '.join(kwargs)}. Set them in "
                "optimizer.param_groups."
            )
        result = None if closure is None else closure()
        hosted = self._running  # another one if a callback has added weights
        if self._host is not None:
            self._call_hooks(hosted, optimizer, model)
        if any(p.grad is not None for p in hosted.weights(optimizer)):
            self.outcome = hosted.step(optimizer)
            if self._trainer is not None:
                self._log(hosted)
        return result

    def _call_hooks(self, hosted: HostedRun, optimizer: torch.optim.Optimizer, model: Any) -> None:
        """Call `on_before_optimizer_step` and clip, with true gradients where somebody looks."""
        trainer = model.trainer
        for config in trainer.strategy.lr_scheduler_configs:  # callbacks may replace them
            hosted.hold_scheduler(config.scheduler)
        readers = [model, *trainer.callbacks]
        if any(_overrides(each, "on_before_optimizer_step") for each in readers) or _overrides(
            model, "configure_gradient_clipping"
        ):
            hosted.unscale(optimizer)
        self._host._after_closure(self, model, optimizer)

    def _clip_gradients(self, model: Any, *args: Any, **kwargs: Any) -> None:
        self._host._clip_gradients(self, model, *args, **kwargs)

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm"
    ) -> None:
        """Clip gradients. A norm is clipped in the same pass as the update where nobody looks."""
        if not clip_val or clip_val <= 0:
            return
        optimizer, hosted = _unwrap(optimizer), self._running
        by_norm = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "norm"
        module = None if self._trainer is None else self._trainer.lightning_module
        is_default = module is not None and module.automatic_optimization
        if by_norm and is_default and not _overrides(module, "configure_gradient_clipping"):
            hosted.clip_norm(clip_val)
            return
        hosted.unscale(optimizer)
        clip = nn.utils.clip_grad_norm_ if by_norm else nn.utils.clip_grad_value_
        clip(hosted.weights(optimizer), clip_val)

    def unscale_gradients(self, optimizer: Any) -> None:
        """Divide the loss scale out of the gradients of an optimizer's weights."""
        if self._hosted is not None:
            self._hosted.unscale(_unwrap(optimizer))

    def main_params(self, optimizer: Any) -> Iterator[nn.Parameter]:
        """Yield the weights that have the gradients: those of the model, not master weights."""
        optimizer = _unwrap(optimizer)
        if self._hosted is not None:
            yield from self._hosted.weights(optimizer)
        else:
            yield from (p for group in optimizer.param_groups for p in group["params"])

    def _log(self, hosted: HostedRun) -> None:
        """Log what is known by now to the trainer's loggers, every `log_every_n_steps`."""
        trainer, outcome = self._trainer, hosted.known_outcome
        if outcome is None or not trainer.loggers or not trainer.is_global_zero:
            return
        if not trainer._logger_connector.should_update_logs:
            return
        stats = hosted.run.engine.log.stats
        numbers = {"narrowcast/skipped_steps": float(stats.skipped)}
        numbers |= {"narrowcast/findings": float(hosted.findings_count)}
        if hosted.run.loss_scale is not None:
            numbers["narrowcast/loss_scale"] = outcome.loss_scale
        if outcome.applied:
            numbers["grad_norm"] = outcome.grad_norm
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run; after `fit`, what weights and optimizers do not hold."""
        return self._progress if self._hosted is None else self._hosted.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a `state_dict()`."""
        if self._hosted is not None and "weights" in state_dict:
            self._hosted.load_state_dict(state_dict)
        elif self._hosted is not None:
            self._hosted.load_progress(state_dict)
        elif self._host is None:
            raise ConfigError(
                "There is no run to load the state into. Call fabric.setup(model, optimizer) first."
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Let tensors that the checkpoint has twice share their memory, so that one is written."""
        state = checkpoint.get(type(self).__qualname__, {})
        if "weights" not in state:
            return
        weights = checkpoint["state_dict"]
        for name, value in state["weights"].items():
            if (
                isinstance(value, Tensor)
                and getattr(weights.get(name), "dtype", None) == value.dtype
            ):
                weights[name] = value
        ours = ("class", "weights")
        checkpoint["optimizer_states"] = [
            {key: value for key, value in each.items() if key not in ours}
            for each in state["optimizer"]
        ]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep Lightning from loading optimizer states that `load_state_dict` restores exactly."""
        if self._hosted is not None and "weights" in checkpoint.get(type(self).__qualname__, {}):
            checkpoint["optimizer_states"] = []

    @property
    def _running(self) -> HostedRun:
        if self._hosted is None:
            raise ConfigError(
                "The plug-in has no run now. It exists during trainer.fit(), or after "
                "fabric.setup(model, optimizer)."
            )
        return self._hosted


class NarrowcastPrecision(_HostInterface):
    """Precision plug-in for Lightning's `Trainer` and for Fabric.

    It works for `lightning.pytorch`, `pytorch_lightning` and `Fabric`; import the one you use
    first. During `fit` the model trains in the policy's precision. Afterwards it is a plain fp32
    model again. `trainer.validate`, `test` and `predict` outside of `fit` run the plain model.

    Args:
        policy: A preset name, policy text or `Policy`, as in `narrowcast.prepare`.
        schedule: Policies by the step at which they begin, for example `{100: "bf16"}`.
        health_every: Steps between readings of numeric statistics. 0: none.
        **prepare_settings: Further arguments of `narrowcast.prepare`, such as `loss_scale`.

    Raises:
        ConfigError: An argument is invalid.

    Example:
        ```python
        trainer = Trainer(plugins=[NarrowcastPrecision("bf16")], gradient_clip_val=1.0)
        trainer.fit(module, loader)
        ```
    """

    def __new__(cls, *_: Any, **__: Any) -> "NarrowcastPrecision":
        """Make an object that every imported copy of Lightning accepts."""
        plain: Any = cls
        made: NarrowcastPrecision = object.__new__(_with_bases(plain, _loaded_bases()))
        return made

    def __init__(
        self,
        policy: AnyPolicy = "default",
        *,
        schedule: Mapping[int, AnyPolicy] | None = None,
        health_every: int = 0,
        **prepare_settings: Any,
    ) -> None:
        self._begin(
            HostedSettings(
                policy, schedule or {}, health_every=health_every, prepare=prepare_settings
            )
        )

    def __repr__(self) -> str:
        return f"NarrowcastPrecision({self.settings.policy!r})"

    def __reduce__(self) -> Any:
        """Copy the settings only: a copy is not connected to any model."""
        return _rebuild, (vars(type(self)).get("plain_class", type(self)), self.settings)

    @property
    def run(self) -> Prepared:
        """The prepared run. Raises outside of `fit`."""
        return self._running.run

    @property
    def stats(self) -> Stats:
        """Counts of applied and skipped steps, also after `fit`. Synchronises with the device."""
        return self._stats if self._hosted is None else self._hosted.run.stats()

    def ema_state_dict(self) -> dict[str, Tensor]:
        """Return the EMA weights in fp32, during and after `fit`. Needs `ema_decay`."""
        if self._hosted is not None:
            return self._hosted.run.ema_state_dict()
        if self._ema is None:
            raise ConfigError(
                "There are no EMA weights. Write NarrowcastPrecision(…, ema_decay=0.999) and call "
                "fit() first."
            )
        return self._ema

    def release(self) -> None:
        """Make the model plain fp32 again. A `Trainer` does so when `fit` ends."""
        self._release()

    def hold_scheduler(self, scheduler: Any) -> None:
        """Make `scheduler.step()` count for applied steps only. A `Trainer` does this for you.

        Call it after `fabric.setup(model, optimizer)`.
        """
        self._running.hold_scheduler(scheduler)


def _loaded_bases() -> tuple[type, ...]:
    """Return `Precision` of every imported copy of Lightning, or of the first installed one."""
    names = [name for name in _PACKAGES if name in sys.modules]
    if not names:
        names = [name for name in _PACKAGES if find_spec(name.partition(".")[0])][:1]
    if not names:
        raise ConfigError("NarrowcastPrecision needs Lightning. Run pip install lightning.")
    bases: list[type] = []
    for name in names:
        base = import_module(f"{name}.plugins.precision").Precision
        if not any(issubclass(each, base) for each in bases):
            bases.append(base)
    return tuple(bases)


@functools.cache
def _with_bases(plain: type, bases: tuple[type, ...]) -> type:
    missing = tuple(base for base in bases if not issubclass(plain, base))
    if not missing:
        return plain
    own = {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    return type(plain.__name__, (plain, *missing), {**own, "plain_class": plain})


def _rebuild(plain: type, settings: HostedSettings) -> Any:
    plugin: Any = object.__new__(_with_bases(plain, _loaded_bases()))
    plugin._begin(settings)
    return plugin


def _host_class(plugin: _HostInterface, module: nn.Module) -> Any:
    """Return the `Precision` class of the copy of Lightning that a module is from."""
    roots = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
    for kind in type(plugin).__mro__:
        is_host = kind.__name__ == "Precision" and hasattr(kind, "connect")
        if is_host and kind.__module__.partition(".")[0] in roots:
            return kind
    raise ConfigError(
        "NarrowcastPrecision was made before this copy of Lightning was imported. Import "
        "lightning.pytorch or pytorch_lightning first."
    )


def _unwrap(optimizer: Any) -> Any:
    """Return the torch optimizer inside Lightning's or Fabric's wrapper."""
    return vars(optimizer).get("_optimizer", optimizer)


def _check_strategy(strategy: Any) -> None:
    kind = type(strategy).__name__
    if kind.startswith(_UNSUPPORTED):
        raise UnsupportedError(
            f"NarrowcastPrecision cannot be combined with {kind}, which converts or shards weights "
            "itself. Use strategy='ddp' or a single device, or leave out the plug-in."
        )


def _check_module(module: Any, callbacks: list[Any]) -> None:
    if any(kind.__name__ == "ModelPruning" for each in callbacks for kind in type(each).__mro__):
        raise UnsupportedError(
            "ModelPruning replaces weights during fit(), which the plug-in does not support. Leave "
            "out the callback, and prune the model with torch.nn.utils.prune before or after fit()."
        )
    if _overrides(module, "backward"):
        raise UnsupportedError(
            f"{type(module).__name__} overrides backward(), which the plug-in replaces. Set "
            "automatic_optimization = False and call self.manual_backward(loss) in training_step()."
        )


def _overrides(hooked: Any, name: str) -> bool:
    """Whether a module or callback has a hook of its own."""
    if name in vars(hooked):
        return True
    own = plain_class(hooked) if isinstance(hooked, nn.Module) else type(hooked)
    owner = next(kind for kind in own.__mro__ if name in vars(kind))
    return owner.__name__ not in ("Callback", "LightningModule", "ModelHooks")


_Undo = Callable[[], None]


def _set_methods(target: Any, **methods: Any) -> _Undo:
    """Replace methods of one object; return what undoes it."""
    vars(target).update(methods)

    def undo() -> None:
        for name in methods:
            vars(target).pop(name, None)

    return undo


def _release_first(strategy: Any, release: _Undo) -> _Undo:
    """Release before the strategy moves the model to the CPU: master weights would stay behind."""
    teardown = strategy.teardown

    def release_and_teardown() -> None:
        release()
        teardown()

    return _set_methods(strategy, teardown=release_and_teardown)


def _clear_model_gradients(strategy: Any) -> None:
    """Make `zero_grad()` of Lightning's optimizers clear the model's gradients, not the masters'.

    The wrappers inherit torch's `zero_grad`, which would clear what `param_groups` hold.
    """
    for each in strategy._lightning_optimizers:
        vars(each)["zero_grad"] = each._optimizer.zero_grad


def _toggle_model_weights(module: Any, running: Callable[[], HostedRun]) -> _Undo:
    """Make `toggle_optimizer` freeze weights of the model; `param_groups` may hold masters."""
    frozen: list[nn.Parameter] = []

    def toggle(optimizer: Any) -> None:
        own, every = set(running().weights(_unwrap(optimizer))), running().weights()
        frozen.extend(p for p in every if p not in own and p.requires_grad)
        for p in frozen:
            p.requires_grad = False

    def untoggle(_: Any) -> None:
        for p in frozen:
            p.requires_grad = True
        frozen.clear()

    return _set_methods(module, toggle_optimizer=toggle, untoggle_optimizer=untoggle)


def _after_fabric_setup(module: Any, setup: Callable[[Any, Any, list[Any]], None]) -> None:
    """Call `setup(fabric, module, optimizers)` when `fabric.setup(module, …)` ends.

    Fabric hands itself and the optimizers to modules that have `_fabric`, and calls their hook
    `on_after_setup`.
    """
    own = {name: vars(module).get(name) for name in ("_fabric", "_fabric_optimizers")}
    theirs = getattr(module, "on_after_setup", None)

    def on_after_setup(fabric: Any, module: Any) -> None:
        original = module._original_module
        optimizers = list(original._fabric_optimizers)
        del vars(original)["on_after_setup"]
        if own["_fabric_optimizers"] is None:  # no LightningModule: leave no trace
            for name in own:
                vars(original).pop(name, None)
            fabric._callbacks = [each for each in fabric._callbacks if each is not original]
        setup(fabric, module, optimizers)
        if theirs is not None:
            theirs(fabric=fabric, module=module)

    vars(module).setdefault("_fabric", None)
    vars(module)["on_after_setup"] = on_after_setup


def _skip_nonfinite_norms(strategy: Any) -> _Undo:
    """Let `fabric.clip_gradients` pass inf and NaN on to the step, which skips; not raise."""
    clip = strategy.clip_gradients_norm

    def clip_gradients_norm(*args: Any, **kwargs: Any) -> Any:
        return clip(*args, **{**kwargs, "error_if_nonfinite": False})

    return _set_methods(strategy, clip_gradients_norm=clip_gradients_norm)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


@contextlib.contextmanager
def _both(
    outer: contextlib.AbstractContextManager[Any], inner: contextlib.AbstractContextManager[Any]
) -> Iterator[None]:
    with outer, inner:
        yield


def lightning_callback(
    *, policy: str | Policy = "fp32", every: int = 10, tell: Tell | None = None
) -> Any:
    """Return a callback for a Lightning trainer that monitors the module it fits.

    Findings go to `tell`, or to Lightning's warnings.
    """
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities import rank_zero_warn

    base: Any = Callback

    class Watching(base):  # type: ignore[misc]
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.watch = monitor(pl_module, policy=policy, every=every)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self._tell(self.watch.step(trainer.global_step + 1))

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            self._tell(self.watch.close())

        def on_exception(self, trainer: Any, pl_module: Any, exception: Any) -> None:
            watching: Monitor | None = getattr(self, "watch", None)
            if watching is not None:
                self._tell(watching.close())

        def _tell(self, matches: list[FindingRecord]) -> None:
            for finding in matches:
                (tell or (lambda f: rank_zero_warn(sentence(f))))(finding)

    return Watching()
