"""One training step: forward and backward of each micro-batch, then the update.

Launched kernel by kernel, or replayed as two CUDA graphs, one of the passes and one of the update,
between which the host learns how the step before ended and sets the learning rate. A replay costs
the host nothing, whatever the number of kernels: it is how small models keep a GPU busy.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from narrowcast.config.sections import Recipe
from narrowcast.errors import UnsupportedError
from narrowcast.hardware.replay import beside, capture_stream
from narrowcast.health.diagnose.replay import eagerly
from narrowcast.health.faults.faults import StepFaults
from narrowcast.precision.nested import changed_tensors, tensors_in
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepare import Prepared
from narrowcast.training.compiling import compiled
from narrowcast.training.losses import Losses
from narrowcast.training.task import Batch, LossParts, Task

Between = Callable[[], None]
"""Looks at weights and gradients between the passes and the update."""

WARM_UP = 3
"""Steps before a capture: the compiler, cuBLAS and the allocator settle in them."""
LARGEST_CAPTURED = 1_000_000_000
"""Parameters of a model that is captured without being asked: beyond it, kernels run long enough
for the host to keep ahead, and a captured step holds its memory for ever."""


@final
class Stepper:
    """Takes the steps of a run."""

    def __init__(self, prepared: Prepared, task: Task, recipe: Recipe) -> None:
        self._prepared, self._recipe = prepared, recipe
        self.losses = Losses(prepared, task)
        self._again: LossParts | None = None
        self._model = compiled(prepared.model, recipe)
        self._graphs: _Graphs | None = None
        self.drop_graphs()

    @property
    def model(self) -> nn.Module:
        """The model, compiled if the recipe asks for it."""
        return self._model

    def loss_of(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, for a step that is taken again; `backward` goes with it."""
        self._again = self.losses.of(self._model, batch)
        return self._again.total

    def backward(self, loss: Tensor, micro_batches: int) -> None:
        """Backpropagate what `loss_of` has just returned, as the step did."""
        again, self._again = self._again, None
        assert again is not None
        assert again.total is loss
        self.losses.backward(again, micro_batches=micro_batches)

    @property
    def captured(self) -> bool:
        """Whether steps are replayed as CUDA graphs now."""
        return self._graphs is not None

    def drop_graphs(self) -> None:
        """Begin as with the first step: the model has other formats now, and graphs do not know.

        They are captured anew rather than kept for each policy: their memory stays with them.
        """
        self._graphs = None
        self._wants_graph = _wants_graph(self._prepared, self._recipe)
        self._taken, self._applied_before = 0, self._prepared.steps_applied

    def __call__(
        self,
        batches: Sequence[Batch],
        *,
        faults: StepFaults | None = None,
        between: Between | None = None,
    ) -> tuple[Outcome, Tensor]:
        """Take a step; return its outcome, and the mean loss and those of its parts on the device.

        `between` is called when every weight has its gradient and none has moved.
        """
        self._taken += 1
        if faults is not None:
            with eagerly():
                return self._launch(batches, between, faults=faults)
        if not self._wants_graph:
            return self._launch(batches, between)
        # A graph keeps what its capture did, so the scales of fp8 must be those of a step by then.
        warm = self._taken > WARM_UP and (
            self.captured or self._prepared.steps_applied > self._applied_before
        )
        if not warm:
            return self._launch_beside(batches, between)
        if self._graphs is None or not self._graphs.fits(batches):
            self._graphs = self._capture(batches)
        return self._graphs.replay(batches, between)

    def _capture(self, batches: Sequence[Batch]) -> "_Graphs":
        try:
            return _Graphs(self, self._prepared, batches)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UnsupportedError(
                f"the step cannot be captured as a CUDA graph ({reason}); a model that reads a "
                "tensor on the host cannot be, nor one whose graphs do not fit: write "
                "cuda_graph=false"
            ) from error

    def passes(self, batches: Sequence[Batch], *, faults: StepFaults | None = None) -> Tensor:
        """Queue forward and backward passes; return the mean of the loss and of its parts."""
        losses = []
        for number, batch in enumerate(batches, start=1):
            with contextlib.nullcontext() if faults is None else faults.during(number):
                with self._prepared.compute():
                    loss = self.losses.of(self._model, batch)
                self.losses.backward(loss, micro_batches=len(batches))
            losses.append(loss)
        return self.losses.mean(losses)

    def _launch(
        self,
        batches: Sequence[Batch],
        between: Between | None,
        *,
        faults: StepFaults | None = None,
    ) -> tuple[Outcome, Tensor]:
        loss = self.passes(batches, faults=faults)
        if between is not None:
            between()
        return self._prepared.step(), loss

    def _launch_beside(
        self, batches: Sequence[Batch], between: Between | None
    ) -> tuple[Outcome, Tensor]:
        """Launch on another stream than the default one, as a capture will."""
        with beside(_current_device()):
            return self._launch(batches, between)


@dataclass(frozen=True)
class _Update:
    graph: torch.cuda.CUDAGraph
    packed: Tensor


class _Graphs:
    """The graphs of one step, and the memory its batches are put into."""

    def __init__(self, stepper: Stepper, prepared: Prepared, batches: Sequence[Batch]) -> None:
        self._prepared = prepared
        self._inputs = [changed_tensors(batch, torch.clone) for batch in batches]
        prepared.sync()
        prepared.captured.write_settings()  # a change of them must not be captured
        # The graph must make fp8 weights anew, even if an evaluation has just done so.
        torch.autograd.graph.increment_version(
            [p for p in prepared.model.parameters() if p.requires_grad]
        )
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the steps before held, the graphs hold in their own pool
        pool = torch.cuda.graph_pool_handle()
        self._passes = torch.cuda.CUDAGraph()
        stream = capture_stream(_current_device())
        with torch.cuda.graph(self._passes, pool=pool, stream=stream):
            self._loss = stepper.passes(self._inputs)
        self._present = prepared.captured.present()
        gradients = prepared.captured.gradients()
        self._updates: dict[bool, _Update] = {}
        for metered in (False, True):
            prepared.captured.set_gradients(gradients)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                packed = prepared.queue_update(self._present, metered=metered)
            self._updates[metered] = _Update(graph, packed)
        self._gradients = gradients  # their memory is written and read by the graphs

    def fits(self, batches: Sequence[Batch]) -> bool:
        """Say whether batches have the shapes that were captured."""
        return _shapes(batches) == _shapes(self._inputs)

    def replay(self, batches: Sequence[Batch], between: Between | None) -> tuple[Outcome, Tensor]:
        for inputs, batch in zip(self._inputs, batches, strict=True):
            for mine, given in zip(tensors_in(inputs), tensors_in(batch), strict=True):
                mine.copy_(given, non_blocking=True)
        self._passes.replay()
        if between is not None:
            captured = self._prepared.captured
            without = captured.gradients()
            captured.set_gradients(self._gradients)
            between()
            captured.set_gradients(without)
        self._prepared.begin_step()
        self._prepared.captured.write_settings()
        metered = self._prepared.is_metered
        update = self._updates[metered]
        update.graph.replay()
        self._prepared.captured.has_replayed(self._present)
        outcome = self._prepared.end_step(update.packed, self._present, metered=metered)
        return outcome, self._loss


def _current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _shapes(batches: Sequence[Batch]) -> list[Any]:
    return [_outline(batch) for batch in batches]


def _outline(batch: Batch) -> Any:
    """Return what must agree between two batches: shapes, dtypes, and all that is no tensor.

    A graph has the values of plain numbers in it.
    """
    match batch:
        case Tensor():
            return batch.shape, batch.dtype
        case tuple() | list():
            return [_outline(item) for item in batch]
        case dict():
            return {key: _outline(item) for key, item in batch.items()}
        case _:
            return batch


def _wants_graph(prepared: Prepared, recipe: Recipe) -> bool:
    """Say whether steps are to be captured; refuse where that was asked and cannot be."""
    why = prepared.captured.unsupported_reason
    if recipe.deterministic and not why:
        why = "deterministic kernels may wait for the host"
    if recipe.faults and not why:
        why = "a captured step is the same every time, and faults are not"
    if recipe.cuda_graph and why:
        raise UnsupportedError(
            f"cuda_graph=true: {why}; write cuda_graph=null to have it where it can be"
        )
    small = sum(p.numel() for p in prepared.model.parameters()) <= LARGEST_CAPTURED
    return not why and (recipe.cuda_graph or (recipe.cuda_graph is None and small))
