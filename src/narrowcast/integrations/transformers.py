"""transformers: train with `Trainer` in a policy's precision, or only monitor its model.

`attach` changes the class of a trainer to a subclass with `TrainerMixin`. The mixin prepares the
model when `train()` creates the optimizer and releases it at the end of `train()`. transformers is
imported only when it is used.
"""

import contextlib
import functools
import inspect
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.health.monitor import Monitor, monitor
from narrowcast.integrations.finding_text import Tell, sentence
from narrowcast.integrations.hosted_run import HostedRun, HostedSettings, gradient_norm
from narrowcast.integrations.trl import use_plan_in_fused_heads
from narrowcast.precision.plan.policy import AnyPolicy, Policy
from narrowcast.precision.step.prepared import Prepared
from narrowcast.precision.step.saved_state import collect_state
from narrowcast.runs import FindingRecord

log = logging.getLogger("narrowcast")


def attach(
    trainer: Any,
    policy: AnyPolicy = "default",
    *,
    schedule: Mapping[int, AnyPolicy] | None = None,
    health_every: int = 0,
    **prepare_settings: Any,
) -> Any:
    """Make a transformers or TRL trainer train in a policy's precision.

    `bf16` and `fp16` of its `TrainingArguments` are turned off. `train()` prepares the model, and
    releases it at its end, so that the trainer then holds a plain fp32 model. Everything else of
    the trainer works as before: accumulation, clipping, evaluation, checkpoints, callbacks.

    Args:
        trainer: A `transformers.Trainer` or an object of a subclass, before `train()`.
        policy: A preset name or policy text, a `Policy`, a `Plan`, or a torch dtype.
        schedule: Further policies by the step at which they begin, counted from 0.
        health_every: Steps between readings of numeric statistics. 0: none.
        **prepare_settings: Further arguments of `prepare`, such as `loss_scale` or `fuse`.

    Returns:
        The same trainer.

    Raises:
        ConfigError: A setting is invalid, or the trainer is training.
        UnsupportedError: The trainer uses FSDP, DeepSpeed, several GPUs in one process, or a
            quantized model.

    Example:
        ```python
        trainer = nc.attach(Trainer(model=model, args=args, train_dataset=rows), policy="fp16")
        trainer.train()
        ```
    """
    settings = HostedSettings(
        policy=policy,
        schedule=dict(schedule or {}),
        health_every=health_every,
        prepare=prepare_settings,
    )
    from transformers import Trainer

    trainer_class: Any = Trainer  # mypy would otherwise narrow the type of `trainer`
    if not isinstance(trainer, trainer_class):
        raise ConfigError(
            f"attach() needs a transformers Trainer, got {type(trainer).__name__}. Use "
            "nc.prepare() in a loop of your own."
        )
    if getattr(trainer, "is_in_train", False):
        raise ConfigError("attach() was called during train(). Call it before train().")
    _check_supported(trainer)
    if not isinstance(trainer, TrainerMixin):
        kind: Any = type(trainer)
        trainer.__class__ = _attached_class(kind)
    trainer._nc_settings = settings
    _turn_off_amp(trainer)
    return trainer


@contextlib.contextmanager
def trainer_precision(policy: AnyPolicy = "default", **settings: Any) -> Iterator[None]:
    """Attach a policy to every `Trainer` that is built inside this context manager.

    For libraries that build their trainer themselves. The trainer keeps the policy afterwards.

    Args:
        policy: As in `attach`.
        **settings: The other settings of `attach`.

    Example:
        ```python
        with nc.trainer_precision("bf16, params=bf16, master=split"):
            library.fine_tune(model, rows)
        ```
    """
    from transformers import Trainer

    trainer_class: Any = Trainer
    original = trainer_class.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not isinstance(self, TrainerMixin):  # a class that names its precision keeps it
            attach(self, policy, **settings)

    trainer_class.__init__ = init
    try:
        yield
    finally:
        trainer_class.__init__ = original


_host: Any = object  # the Trainer comes next in the classes of whoever derives from the mixin


class TrainerMixin(_host):  # type: ignore[misc]
    """Base class before a `Trainer` that makes it train in a policy's precision.

    Example:
        ```python
        class MyTrainer(nc.TrainerMixin, Trainer):
            precision = "bf16, params=bf16, master=split"
        ```
    """

    precision: AnyPolicy = "default"
    """The policy. Set it in the class, or on the object before `train()`."""
    precision_settings: ClassVar[Mapping[str, Any]] = {}
    """The other settings of `attach`, by name."""
    precision_run: Prepared | None = None
    """The run of the current or last `train()`."""

    _nc_hosted: HostedRun | None = None
    _nc_settings: HostedSettings | None = None

    def create_accelerator_and_postprocess(self) -> None:
        """Build the accelerator without mixed precision."""
        super().create_accelerator_and_postprocess()
        _check_supported(self)
        _turn_off_amp(self)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, then release the model."""
        _check_supported(self)
        _turn_off_amp(self)
        # `training_step` filters on the device. Trainer's own filter waits for every micro-batch.
        own_filter, self.args.logging_nan_inf_filter = self.args.logging_nan_inf_filter, False
        try:
            return super().train(*args, **kwargs)
        finally:
            self.args.logging_nan_inf_filter = own_filter
            self._nc_release()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer and prepare the model, before accelerate wraps or compiles it."""
        self._nc_release()
        super().create_optimizer(*args, **kwargs)  # an own one need not return it
        self._nc_prepare(self.optimizer)
        return self.optimizer

    def _wrap_model(self, model: nn.Module, training: bool = True, **kwargs: Any) -> nn.Module:
        """Prepare the model if a subclass has a `create_optimizer` that does not call this one."""
        if training and self._nc_hosted is None and self.optimizer is not None:
            self._nc_prepare(self.optimizer)
        wrapped: nn.Module = super()._wrap_model(model, training=training, **kwargs)
        return wrapped

    def _nc_prepare(self, optimizer: Any) -> None:
        optimizer = _plain_optimizer(optimizer)
        settings = self._nc_all_settings()
        restore_heads = use_plan_in_fused_heads(self.model, equal_tokens=_weighs_tokens_alike(self))
        try:
            hosted = HostedRun(settings, self.model, optimizer)
        except BaseException:
            restore_heads()
            raise
        hosted.save_full_weights()
        self._nc_hosted, self.precision_run = hosted, hosted.run
        self._nc_restore_heads = restore_heads
        self.optimizer = _optimizer_class()(optimizer, hosted)
        self.accelerator.__dict__.update(
            backward=functools.partial(_backward, self.accelerator, hosted),
            autocast=lambda *_, **__: hosted.autocast(),
            unscale_gradients=lambda *_, **__: hosted.unscale(),
        )

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Create the scheduler, which from now on moves only for applied steps."""
        super().create_scheduler(*args, **kwargs)
        if self._nc_hosted is not None:
            self._nc_hosted.hold_scheduler(self.lr_scheduler)
        return self.lr_scheduler

    def autocast_smart_context_manager(self, *args: Any, **kwargs: Any) -> Any:
        """Return the context manager of forward passes and losses."""
        if self._nc_hosted is None:
            return super().autocast_smart_context_manager(*args, **kwargs)
        return self._nc_hosted.autocast()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one micro-batch. A loss that is not finite counts as the mean since the last log."""
        loss = super().training_step(*args, **kwargs)
        if self._nc_hosted is None:
            return loss
        self._nc_hosted.hold_scheduler(self.lr_scheduler)  # of an own `create_scheduler`
        steps = 1 + self.state.global_step - self._globalstep_last_logged
        return torch.where(torch.isfinite(loss), loss, (self._tr_loss / steps).to(loss))

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare a batch; trainers of TRL generate and score completions here."""
        if self._nc_hosted is None or _is_trainers_own(super()._prepare_inputs):
            return super()._prepare_inputs(*args, **kwargs)
        with self._nc_hosted.autocast():
            return super()._prepare_inputs(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one batch of an evaluation, including `generate`, in the policy's precision."""
        if self._nc_hosted is None:
            return super().prediction_step(*args, **kwargs)
        with self._nc_hosted.autocast():
            return super().prediction_step(*args, **kwargs)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip in the pass that updates the weights."""
        hosted = self._nc_hosted
        if hosted is None or not _is_trainers_own(super()._clip_grad_norm):
            if hosted is not None:
                hosted.unscale()
            return super()._clip_grad_norm(model)
        if self._nc_callbacks_read_gradients():  # they run after the clipping
            hosted.unscale()
            norm = gradient_norm(hosted)
            nn.utils.clip_grads_with_norm_(hosted.weights(), self.args.max_grad_norm, norm)
            return norm
        hosted.clip_norm(self.args.max_grad_norm)
        return None

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return nothing: the step computes the norm, and the log reads it from there."""
        hosted = self._nc_hosted
        if hosted is None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)
        if self._nc_callbacks_read_gradients():
            hosted.unscale()
        return grad_norm

    def _get_learning_rate(self) -> Any:
        """Return the learning rate of the last step, without waiting for it."""
        outcome = None if self._nc_hosted is None else self._nc_hosted.outcome
        if outcome is None or outcome.lr != outcome.lr:
            return super()._get_learning_rate()
        return outcome.lr

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        outcome = None if self._nc_hosted is None else self._nc_hosted.outcome
        if grad_norm is None and outcome is not None:
            grad_norm = outcome.grad_norm_on_device
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with skipped steps, loss scale and findings if these are numbers of training."""
        if self._nc_hosted is not None and ("loss" in logs or "train_loss" in logs):
            logs.update(self._nc_hosted.logs())
        super().log(logs, *args, **kwargs)

    def _load_best_model(self) -> None:
        self._nc_release()  # what is loaded must not be replaced by master weights
        super()._load_best_model()

    def _nc_callbacks_read_gradients(self) -> bool:
        return any(map(_reads_gradients, self.callback_handler.callbacks))

    def _nc_all_settings(self) -> HostedSettings:
        settings = self._nc_settings
        if settings is None:
            named = dict(self.precision_settings)
            own = {name: named.pop(name) for name in ("schedule", "health_every") if name in named}
            settings = HostedSettings(policy=self.precision, prepare=named, **own)
        if self.args.torch_compile and "execution" not in settings.prepare:
            settings = replace(settings, prepare={**settings.prepare, "execution": "compiled"})
        return settings

    def _nc_release(self) -> None:
        """Give the model, the optimizer and the accelerator back as they were."""
        hosted, self._nc_hosted = self._nc_hosted, None
        if hosted is None:
            return
        for name in ("backward", "autocast", "unscale_gradients"):
            self.accelerator.__dict__.pop(name, None)
        self.optimizer = self.callback_handler.optimizer = _plain_optimizer(self.optimizer)
        hosted.release()
        self._nc_restore_heads()


@functools.cache
def _attached_class(kind: type) -> type:
    """Return a subclass of a trainer's class with the mixin, under the same name."""
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (TrainerMixin, kind), names)


def _check_supported(trainer: Any) -> None:
    """Raise if the trainer shards, quantizes or replicates the model in its own way."""
    args, model = trainer.args, trainer.model
    sharded = {
        "FSDP": getattr(trainer, "is_fsdp_enabled", False) or args.fsdp,
        "DeepSpeed": getattr(trainer, "is_deepspeed_enabled", False) or args.deepspeed,
        "distributed_config": getattr(model, "is_distributed_loading_by_transformers", False),
    }
    for name in (name for name, used in sharded.items() if used):
        raise UnsupportedError(
            f"The trainer plug-in does not support {name}. Leave it out and launch with torchrun, "
            "which trains with DDP, or train without attach()."
        )
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"The trainer plug-in does not support DataParallel on {args.n_gpu} GPUs. Launch with "
            "torchrun, or set CUDA_VISIBLE_DEVICES to one GPU."
        )
    if getattr(model, "is_quantized", False):
        raise UnsupportedError(
            "The trainer plug-in does not support models loaded with a quantization_config. Load "
            "the model without it and call nc.quantize_frozen(model) to store its frozen weights "
            "in 8 bits."
        )


def _turn_off_amp(trainer: Any) -> None:
    """Turn off the mixed precision of the trainer and of accelerate."""
    args, accelerator = trainer.args, trainer.accelerator
    before = "bf16" if args.bf16 else "fp16" if args.fp16 else accelerator.mixed_precision
    args.bf16 = args.fp16 = False
    args.mixed_precision = "no"
    accelerator.state._mixed_precision = "no"  # one state for the whole process
    accelerator.native_amp, accelerator.scaler = False, None
    for module in [value for value in vars(trainer).values() if isinstance(value, nn.Module)]:
        _drop_accelerates_autocast(module)
    if before != "no":
        log.info("%s=True was turned off: the policy sets the precision", before)


def _drop_accelerates_autocast(model: nn.Module) -> None:
    """Restore the forward that accelerate wrapped, which it does for reference models early."""
    forward = vars(model).pop("_original_forward", None)
    if forward is None:
        return
    if getattr(forward, "__func__", None) is type(model).forward:
        del model.forward
    else:
        model.forward = forward


def _weighs_tokens_alike(trainer: Any) -> bool:
    """Return whether the loss is that of TRL's SFTTrainer, a mean over all tokens."""
    owners = (each for each in type(trainer).__mro__ if "compute_loss" in vars(each))
    is_sft = next(owners).__module__ == "trl.trainer.sft_trainer"
    return is_sft and getattr(trainer.args, "loss_type", None) == "nll"


def _plain_optimizer(optimizer: Any) -> Any:
    import accelerate.optimizer  # type: ignore[import-untyped,import-not-found,unused-ignore]

    while isinstance(optimizer, accelerate.optimizer.AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


@functools.cache
def _optimizer_class() -> Any:
    from narrowcast.integrations.accelerate import HostedOptimizer

    class TrainerOptimizer(HostedOptimizer):
        """The optimizer of a trainer, whose step is that of the run."""

        @property
        def step_was_skipped(self) -> bool:
            """False: an honest answer would wait for the device, and the scheduler knows it."""
            return False

        def state_dict(self) -> dict[str, Any]:
            assert self.hosted is not None
            return _state_without_frozen(self.hosted)

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            assert self.hosted is not None
            if "weights" in state_dict:
                weights = {**self.hosted.run.model.state_dict(), **state_dict["weights"]}
                state_dict = {**state_dict, "weights": weights}
            self.hosted.load_state_dict(state_dict)

    return TrainerOptimizer


def _state_without_frozen(hosted: HostedRun) -> dict[str, Any]:
    """Return the state of a run without frozen weights, which its model file or base model has.

    Not a copy: Trainer writes it at once.
    """
    hosted.sync_schedulers()
    engine = hosted.run.engine
    engine.weights.ownership.check_not_swapped(doing="state_dict()")
    state, trained = collect_state(engine), set(engine.weights.all)
    named = engine.model.named_parameters(remove_duplicate=False)
    frozen = {name for name, weight in named if weight not in trained}
    weights = {name: value for name, value in state["weights"].items() if name not in frozen}
    return {**state, "weights": weights}


def _backward(
    accelerator: Any, hosted: HostedRun, loss: Tensor, *, retain_graph: bool = False
) -> None:
    steps = accelerator.gradient_accumulation_steps  # Trainer accumulates itself: 1
    hosted.backward(loss if steps == 1 else loss / steps, retain_graph=retain_graph)


def _is_trainers_own(method: Any) -> bool:
    from transformers import Trainer

    return getattr(method, "__func__", None) is getattr(Trainer, method.__name__)


def _reads_gradients(callback: Any) -> bool:
    """Whether a callback runs between backward and step, where it may read gradients."""
    from transformers import TrainerCallback

    method = inspect.getattr_static(type(callback), "on_pre_optimizer_step", None)
    return method is not inspect.getattr_static(TrainerCallback, "on_pre_optimizer_step")


def transformers_callback(
    *, policy: str | Policy = "fp32", every: int = 10, tell: Tell | None = None
) -> Any:
    """Return a callback for transformers' Trainer that monitors the model it trains.

    Findings go to `tell`, or to transformers' log as warnings.
    """
    from transformers import TrainerCallback
    from transformers.utils import logging

    base: Any = TrainerCallback  # its types are there or not, as it is installed or not

    class Watching(base):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **settings: Any) -> None:
            # Nobody says so when a training ends by an exception.
            before: Monitor | None = getattr(self, "watch", None)
            if before is not None:
                before.close()
            self.watch = monitor(settings["model"], policy=policy, every=every)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **inputs: Any) -> None:
            self._tell(self.watch.step(state.global_step + 1))

        def on_train_end(self, args: Any, state: Any, control: Any, **overrides: Any) -> None:
            self._tell(self.watch.close())

        def _tell(self, matches: list[FindingRecord]) -> None:
            log = logging.get_logger("transformers.narrowcast")
            for finding in matches:
                (tell or (lambda f: log.warning(sentence(f))))(finding)

    return Watching()
