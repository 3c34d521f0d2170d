"""A step of a custom training loop as CUDA graphs: forward, backward and update.

A signature of the inputs (shapes, dtypes, plain values) runs eagerly before it is captured. In the
last of these steps nothing may synchronise, because a capture that fails leaves torch unusable.
"""

import gc
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.hardware.replay import as_if_captured, on_capture_stream
from narrowcast.kernels.launch import PLAIN as PLAIN_TENSORS
from narrowcast.precision.dtensor import as_sharded
from narrowcast.precision.memory.checkpointing import Recomputed
from narrowcast.precision.nested import leaves, map_tensors
from narrowcast.precision.step.checks import check_loss
from narrowcast.precision.step.cuda_graph import (
    WARM_UP,
    StepGraphs,
    captured,
    unsupported_reason,
)
from narrowcast.precision.step.engine import Engine
from narrowcast.precision.step.outcome import Outcome

PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type),
    *(torch.dtype, torch.device, torch.Size, torch.memory_format),
)
"""Types of what may stand beside tensors: none can change and stay the same object."""
# Mapped over all weights and modules in every step.
_REQUIRES_GRAD, _TRAINING = attrgetter("requires_grad"), attrgetter("training")

Form = tuple[tuple[str, Any, str], ...]
"""An input that is not a tensor: its name, type and text."""


@final
@dataclass(frozen=True)
class Inputs:
    """The arguments of a step."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    signature: Any
    """All that a capture is for: only the values of tensors may be others."""
    form: Form

    def changed_since(self, other: Form) -> str:
        """Return which of the numbers is another than it was there."""
        before = {name: (kind, text) for name, kind, text in other}
        for name, kind, text in self.form:
            if before.get(name) != (kind, text):
                return f"the input {name} ({text})"
        return "the number of inputs"


def parse_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Check the arguments of a step and raise where tensors are hidden.

    Numbers and words count by type and to the last digit: 1 is not True, 0.0 not -0.0.
    """
    tensors: list[Any] = []
    form: list[tuple[str, Any, str]] = []
    named = [*((f"input {i}", each) for i, each in enumerate(args)), *kwargs.items()]
    for name, value in (leaf for outer, each in named for leaf in leaves(each, outer)):
        if isinstance(value, Tensor):
            _check_no_graph(value, name)
            tensors.append((name, value.shape, value.dtype))
        elif isinstance(value, PLAIN):
            form.append((name, type(value), repr(value)))
        else:
            raise ConfigError(
                "graphed(): inputs must be tensors, numbers and strings, alone or in tuples, "
                f"lists and dicts, got {type(value).__name__} for {name}. Capture other objects "
                "in the function itself."
            )
    return Inputs((args, kwargs), (tuple(tensors), tuple(form)), tuple(form))


def check_divisible(inputs: Inputs, micro_batches: int) -> None:
    """Raise if the inputs of a step cannot be split into equal micro-batches."""
    shapes = {name: shape for name, shape, _ in inputs.signature[0] if len(shape)}
    if micro_batches == 1:
        return
    rows = {shape[0] for shape in shapes.values()}
    if len(rows) == 1 and not next(iter(rows)) % micro_batches:
        return
    shown = ", ".join(f"{name} of shape {tuple(shape)}" for name, shape in shapes.items())
    raise ConfigError(
        f"graphed(): gradient_accumulation_steps={micro_batches} splits every tensor along its "
        f"first dimension, which must be the same multiple of {micro_batches}, got "
        f"{shown or 'no tensor'}. Drop or pad the last batch, and use tensors without a batch "
        "dimension in the function itself."
    )


def _check_no_graph(tensor: Tensor, name: str) -> None:
    if tensor.requires_grad:
        raise UnsupportedError(
            f"graphed(): inputs must not require grad, got {name}, because a replayed step does "
            "not pass its gradient on. Detach it, and compute what has weights inside the "
            "function."
        )


@final
class CaptureTerms:
    """The state of a prepared model when the capture of its steps began."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._plan = engine, engine.plan
        self._modules = list(engine.model.modules())
        self._parameters = list(dict.fromkeys([*engine.model.parameters(), *engine.weights.all]))
        # Other kinds keep track of their own addresses.
        self._plain = [p for p in self._parameters if type(p) in PLAIN_TENSORS]
        homes = [(n, m, key) for n, m in engine.model.named_modules() for key in m._buffers]
        self._holders, self._keys = [m._buffers for _, m, _ in homes], [key for *_, key in homes]
        self._names = [f"{name}.{key}".lstrip(".") for name, _, key in homes]
        self._then = self._now()
        # Whether the update knows its tensors is asked once it has met them.
        self._fused = engine.weights.fused
        self._met = False

    def hold(self) -> bool:
        """Return whether nothing has changed that a replay would not know of."""
        if self._engine.plan is not self._plan or self._engine.weights.fused is not self._fused:
            return False
        if self._fused is not None:
            bound = self._fused.is_bound
            if self._met and not bound:
                return False
            self._met = bound
        return self._then == self._now()

    def buffers(self) -> list[int]:
        """Return which tensors the buffers are now, as numbers."""
        return list(map(id, map(dict.get, self._holders, self._keys)))

    def changed_by_passes(self, buffers: list[int]) -> str:
        """Return what passes do that no graph can, given what the buffers were before."""
        if any(isinstance(module, Recomputed) and module.nc_draws for module in self._modules):
            return (
                "blocks recomputed by memory.activation_checkpointing use random numbers "
                "(dropout), which a graph cannot reproduce"
            )
        pairs = zip(self._names, self.buffers(), buffers, strict=True)
        name = next((name for name, now, then in pairs if now != then), "")
        return name and (
            f"the forward pass replaces the buffer {name}, but a graph keeps reading the old "
            f"tensor (write self.{name.rpartition('.')[2]}.copy_(…))"
        )

    def _now(self) -> tuple[list[Any], ...]:
        return (
            list(map(_TRAINING, self._modules)),
            list(map(_REQUIRES_GRAD, self._parameters)),
            list(map(Tensor.data_ptr, self._plain)),
        )


def synchronizing_line(error: BaseException) -> str:
    """Return the line of user code that waited for the device, with its location."""
    ours = str(Path(__file__).parents[2])
    theirs = str(Path(torch.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((ours, theirs))]
    result = (own or list(frames))[-1]
    return f"{Path(result.filename).name}:{result.lineno} ({result.line})"


RESTING = 200
"""Steps without which a signature gives way to another: a capture costs about as much as ten."""
REMEMBERED = 64
"""Signatures that are remembered to have been launched, and sets of numbers beside tensors."""
MOST_NEW = 16
"""Steps in a row with new plain values after which no two steps are expected to be alike."""
INSTEAD = "`with run.autocast(): loss = …` and run.step(loss)"


@final
class CapturedStep:
    """Runs whole steps with a custom loss; see `Prepared.graphed`."""

    def __init__(
        self,
        engine: Engine,
        loss_fn: Callable[..., Tensor],
        *,
        step: Callable[[], Outcome],
        signatures: int,
        micro_batches: int = 1,
        after: Callable[[Outcome], None] | None = None,
    ) -> None:
        if not callable(loss_fn):
            raise ConfigError(
                f"graphed() needs a function that returns the loss, got {type(loss_fn).__name__}. "
                "Write run.graphed(lambda x, y: F.cross_entropy(model(x), y))."
            )
        if signatures < 1:
            raise ConfigError(f"signatures must be at least 1, got {signatures}.")
        if micro_batches < 1:
            raise ConfigError(
                f"gradient_accumulation_steps must be at least 1, got {micro_batches}."
            )
        self._engine, self._loss_fn, self._most = engine, loss_fn, signatures
        self._micro_batches = micro_batches
        self._step, self._after = step, after
        self.loss: Tensor | None = None
        """The loss of the last step, on the device; reading its value waits."""
        self.why = "no step taken yet"
        """Why the last step was launched kernel by kernel; empty if it was replayed."""
        self._device = engine.weights.device
        self._on_gpu = self._device.type == "cuda"
        self._new_forms, self._forms = 0, _Recent()
        self._begin()

    def __repr__(self) -> str:
        """Return what is captured, and how the last step was taken."""
        name = getattr(self._loss_fn, "__qualname__", type(self._loss_fn).__name__)
        held = f"{len(self._graphs)} of at most {self._most} signatures captured"
        last = self.why or "the last step was replayed"
        plan = self._engine.plan
        if plan.spares_host:
            last += (
                f"; the plan is for {plan.execution} steps and keeps {plan.spares_host} modules "
                "wider because fp8 costs the host too much there, which does not apply to "
                'replays: call run.set_policy(…, execution="graphed")'
            )
        return f"<graphed step of {name}: {held}; {last}>"

    @property
    def captured(self) -> bool:
        """Whether the last step was replayed."""
        return not self.why

    def __call__(self, *args: Any, **kwargs: Any) -> Outcome:
        """Take a step with the loss of these inputs; return its outcome, as `run.step` does.

        Tensors are brought to the device of the weights, without waiting where they are pinned.
        """
        engine = self._engine
        engine.weights.ownership.check_not_swapped(doing="a graphed step")
        if engine.weights.with_gradients():
            raise ConfigError(
                "A graphed step runs its own backward pass, but there are gradients already. Call "
                "run.step() first to use them, or run.zero_grad() to drop them. For gradient "
                "accumulation write graphed(…, gradient_accumulation_steps=…)."
            )
        if self.loss is None:  # the first step: by now the model is wrapped, if it ever is
            _check_not_in_ddp(engine.model)
        inputs = parse_inputs(args, kwargs)
        check_divisible(inputs, self._micro_batches)
        self._check_changing_numbers(inputs)
        if self._on_gpu:
            with torch.cuda.device(self._device):  # that of captures is the current one
                outcome, loss = self._take(inputs)
        else:
            outcome, loss = self._launch(inputs)
        self.loss = loss.clone()  # a replay writes over its own
        if self._after is not None:
            self._after(outcome)
        return outcome

    def _begin(self) -> None:
        """Start over as before the first step; raise if no graph can hold this run."""
        if self._on_gpu:
            _check_capturable(self._engine)
        self._terms = CaptureTerms(self._engine)
        self._graphs: dict[Any, StepGraphs] = {}
        self._used: dict[Any, int] = {}
        self._buffers: list[int] = []
        self._launched, self._rehearsed, self._taken = _Recent(), _Recent(), 0
        self._applied_before = self._engine.log.counts().applied

    def _take(self, inputs: Inputs) -> tuple[Outcome, Tensor]:
        """Replay a step, or launch one that is to be captured later."""
        moved = self._graphs and self._terms.buffers() != self._buffers
        current = all(each.is_current for each in self._graphs.values())
        if moved or not current or not self._terms.hold():
            self._begin()
        key = inputs.signature
        self._taken += 1
        graphs = self._graphs.get(key)
        if graphs is None:
            self.why = self._why_not_yet(key)
            if self.why:
                return self._launch(inputs)
            graphs = self._capture(inputs)
        self._used[key] = self._taken
        self.why = ""
        return graphs.replay([inputs.arguments], None)

    def _why_not_yet(self, key: Any) -> str:
        """Return why a signature is not captured in this step; empty if it is."""
        if key not in self._rehearsed or self._engine.log.counts().applied <= self._applied_before:
            # The last numbers that a capture keeps, such as scales of fp8, are of an applied step.
            return "steps of a new signature run eagerly until they are warmed up"
        if len(self._graphs) < self._most:
            return ""
        oldest = min(self._used, key=self._used.__getitem__)
        if self._taken - self._used[oldest] <= RESTING:
            return (
                f"{self._most} other signatures are captured and in use; pad inputs to fewer "
                "shapes, or write graphed(…, signatures=…): each capture holds the memory of one "
                "step"
            )
        del self._graphs[oldest], self._used[oldest]
        return ""

    def _capture(self, inputs: Inputs) -> StepGraphs:
        batch = map_tensors(inputs.arguments, self._placed)
        graphs = captured(self._engine, [batch], self._passes, instead=INSTEAD)
        self._graphs[inputs.signature], self._buffers = graphs, self._terms.buffers()
        return graphs

    def _launch(self, inputs: Inputs) -> tuple[Outcome, Tensor]:
        """Take a step kernel by kernel; the last before a capture may not wait."""
        if not self._on_gpu:
            self.why = f"CUDA graphs need a GPU, but the weights are on {self._device}"
            loss = self._passes([inputs.arguments])
            return self._step(), loss
        rehearsal = inputs.signature in self._launched and self._taken >= WARM_UP
        self._launched.add(inputs.signature)
        with on_capture_stream(self._device):
            batch = [map_tensors(inputs.arguments, self._placed)]
            loss = self._rehearse(batch) if rehearsal else self._passes(batch)
            if rehearsal:
                self._rehearsed.add(inputs.signature)
            return self._step(), loss

    def _passes(self, batches: Any) -> Tensor:
        """Queue a forward and a backward pass per micro-batch; return the mean loss."""
        (whole,) = map_tensors(list(batches), Tensor.detach)
        mean: Tensor | None = None
        for index in range(self._micro_batches):
            args, kwargs = whole if self._micro_batches == 1 else self._part(whole, index)
            with self._engine.autocast():
                loss = self._loss_fn(*args, **kwargs)
            check_loss(loss)
            if self._micro_batches > 1:
                loss = loss / self._micro_batches
            self._engine.backward(loss, name="loss", retain_graph=False)
            mean = loss.detach() if mean is None else mean + loss.detach()
            del loss  # its graph would hold the micro-batch's activations through the next
        assert mean is not None
        return mean

    def _part(self, whole: Any, index: int) -> Any:
        """Return a micro-batch: an equal part of every tensor's rows."""
        return map_tensors(whole, lambda t: t.chunk(self._micro_batches)[index] if t.dim() else t)

    def _rehearse(self, batches: Any) -> Tensor:
        """Queue the passes as a capture will; refuse what could not be captured."""
        why, waited, buffers = "", None, self._terms.buffers()
        before = torch.cuda.get_sync_debug_mode()
        try:
            _set_sync_debug_mode("error")
            with as_if_captured():
                loss = self._passes(batches)
        except RuntimeError as error:
            if "synchronizing CUDA operation" not in str(error):
                raise
            why, waited = f"it waits for the device at {synchronizing_line(error)}", error
            # Frames that have ended hold the loss, and with it the nodes that add gradients up on
            # the stream of captures: a step by hand would find those, and torch would warn of it.
            traceback.clear_frames(error.__traceback__)
        finally:
            _set_sync_debug_mode(before)
        why = why or self._terms.changed_by_passes(buffers)
        if why:
            self._engine.weights.ownership.zero_grad()
            self._engine.buffers.restore()
            raise UnsupportedError(
                f"graphed() cannot capture the loss as a CUDA graph: {why}. Remove that from the "
                f"loss function, or use {INSTEAD}."
            ) from waited
        return loss

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def _check_changing_numbers(self, inputs: Inputs) -> None:
        """Raise if a plain number among the inputs differs in every step."""
        is_known = inputs.form in self._forms
        self._new_forms = 0 if is_known else self._new_forms + 1
        if self._new_forms > MOST_NEW:
            changed = inputs.changed_since(self._forms.last)
            raise ConfigError(
                f"graphed(): {changed} changed in each of the last {MOST_NEW} steps, but a "
                "captured step fixes its numbers. Pass it as a tensor: torch.tensor(…)."
            )
        self._forms.add(inputs.form)


@final
class _Recent:
    """Keys that were added lately; the oldest are forgotten."""

    def __init__(self) -> None:
        self._keys: dict[Any, None] = {}

    def __contains__(self, key: Any) -> bool:
        return key in self._keys

    def add(self, key: Any) -> None:
        """Take one more, or make it the latest."""
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > REMEMBERED:
            del self._keys[next(iter(self._keys))]

    @property
    def last(self) -> Any:
        """The latest."""
        return next(reversed(self._keys))


def _check_capturable(engine: Engine) -> None:
    """Raise if no graph can hold the steps of this run."""
    why = unsupported_reason(engine)
    if any(as_sharded(weight) is not None for weight in engine.weights.all):
        why = why or "its gradients are reduced across devices, which cannot be captured"
    if why:
        raise UnsupportedError(f"graphed() cannot be used: {why}. Use {INSTEAD} instead.")


def _check_not_in_ddp(model: nn.Module) -> None:
    """Raise if DistributedDataParallel wraps a model or a part of it, on any device."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    parallel = nn.parallel.DistributedDataParallel
    gc.collect()  # one that was dropped does not count
    # It leaves no trace on the model that it wraps.
    wrappers = [each for each in gc.get_objects() if issubclass(type(each), parallel)]
    inside = {each for each in model.modules() if isinstance(each, parallel)}
    if inside or any(model is part for each in wrappers for part in each.modules()):
        raise UnsupportedError(
            "graphed() cannot be used: DistributedDataParallel averages gradients on streams of "
            f"its own, which are not captured. Use {INSTEAD} instead."
        )


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():  # torch says once that it does not see all that waits
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode(mode)
