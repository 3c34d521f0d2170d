"""The rows that linear layers multiply at once, learned from the first training batch.

Whether fp8 pays depends on them. The batch passes through the model once more, without gradients,
before anything is compiled or captured. Afterwards the run is as if the batch had not been seen.
"""

import contextlib
import functools
import logging
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowcast.kernels.launch import is_capturing
from narrowcast.precision.dtensor import as_sharded
from narrowcast.precision.nested import map_tensors, tensors_in
from narrowcast.precision.plan.gains import GemmRows
from narrowcast.precision.products.autocast import active_region, set_active_region
from narrowcast.precision.products.operands import is_transformed
from narrowcast.precision.swap import Probe, Transparent, swap

if TYPE_CHECKING:
    from narrowcast.precision.step.engine import Engine

_log = logging.getLogger(__name__)


class LearnsRows(Transparent):
    """A prepared model whose first training batch decides where fp8 pays."""

    nc_learner: Callable[[Any, Any], None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Let the batch decide if it is the first, then call the model."""
        if not torch.compiler.is_compiling():
            learner = self.__dict__.get("nc_learner")
            if learner is not None:
                if "torch._dynamo" in sys.modules:  # which may be calling, and would compile it
                    learner = torch.compiler.disable(learner)
                learner(args, kwargs)
        # A compiled model has this method bound, and by now the model may have its next class.
        if not issubclass(type(self), LearnsRows):
            return self(*args, **kwargs)
        return super().__call__(*args, **kwargs)


@functools.cache
def _skip_in_compiler() -> None:
    """Make the compiler run this call in Python and compile the model inside it, as it was."""
    frames: Any = torch._C._dynamo.eval_frame  # a decorator would break the graph of a caller
    frames.set_code_exec_strategy(
        LearnsRows.__call__.__code__,
        frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT),
    )


def await_rows(engine: "Engine") -> None:
    """Let the first training batch of a run decide, if its plan leaves that open."""
    if not engine.plan.learns_rows or engine.steps_begun or _has_ranks(engine):
        return
    _skip_in_compiler()
    reference = weakref.ref(engine)

    def learner(args: Any, kwargs: Any) -> None:
        owner = reference()
        if owner is not None:
            _learn(owner, args, kwargs)

    swap(engine.model, LearnsRows, nc_learner=learner)


def stop_awaiting(model: nn.Module) -> None:
    """Keep the formats of a run whose first step is over."""
    model.__dict__.pop("nc_learner", None)


def _learn(engine: "Engine", args: Any, kwargs: Any) -> None:
    """Learn the rows of a batch and plan again, unless this pass is not a step's first."""
    if not (engine.model.training and torch.is_grad_enabled()) or is_transformed():
        return  # an evaluation
    if is_capturing(engine.weights.device):
        return
    stop_awaiting(engine.model)
    begun = engine.steps_begun or engine.weights.with_gradients()
    monitored = any(isinstance(module, Probe) for module in engine.model.modules())
    if begun or monitored or _has_ranks(engine):
        return
    try:
        seen = _rows_in_pass(engine, args, kwargs)
    except Exception as error:  # noqa: BLE001  # the model's own code
        _log.warning(
            "the rows of linear layers could not be learned, because a forward pass of %s without "
            "gradients raised %s: %s. The plan assumes %s. Pass gemm_rows= to nc.plan().",
            type(engine.model).__name__,
            type(error).__name__,
            str(error).partition("\n")[0],
            engine.plan.rows,
        )
        return
    if seen:
        engine.set_rows(GemmRows.learned(seen))


def _has_ranks(engine: "Engine") -> bool:
    """Return whether other ranks may learn other rows, and so plan other formats."""
    ranks = torch.distributed
    several = ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1
    return several or any(as_sharded(weight) is not None for weight in engine.weights.all)


def _rows_in_pass(engine: "Engine", args: Any, kwargs: Any) -> dict[str, int]:
    """Return the most rows that each layer multiplies in a pass, and leave no trace of it."""
    seen: dict[str, int] = {}

    def note(name: str, _: nn.Module, inputs: Any, named: Any) -> None:
        x = next(tensors_in((inputs, named)), None)
        if x is not None and x.dim() and x.shape[-1]:
            seen[name] = max(seen.get(name, 0), x.numel() // x.shape[-1])

    handles = [
        engine.model.get_submodule(each.name).register_forward_pre_hook(
            functools.partial(note, each.name), with_kwargs=True
        )
        for each in engine.plan.modules
        if each.rows is not None
    ]
    around = active_region()
    set_active_region(None)
    try:
        with torch.no_grad(), _random_state(engine.weights.device), engine.isolated():
            # A model may write to its inputs, or take them out of what holds them.
            args, kwargs = map_tensors((args, kwargs), Tensor.clone)
            with _eager():
                engine.model(*args, **kwargs)
    finally:
        set_active_region(around)
        for handle in handles:
            handle.remove()
    return {name: rows for name, rows in seen.items() if rows}


def _eager() -> contextlib.AbstractContextManager[Any]:
    """Return a block in which nothing that is compiled already runs compiled."""
    loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()


@contextlib.contextmanager
def _random_state(device: torch.device) -> Iterator[None]:
    """Restore the random states of torch, Python and NumPy after the block."""
    devices = [device] if device.type == "cuda" and torch.cuda.is_initialized() else []
    python, numpy = random.getstate(), sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(drawn)
