"""Steps as CUDA graphs: when they are captured, what is, and how they are replayed.

A step is two graphs, the passes and the update. Between them the host reads how the step before
ended and sets the learning rate. The first steps run eagerly on the stream of the capture.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from narrowcast.errors import UnsupportedError
from narrowcast.hardware.replay import capture_stream, on_capture_stream
from narrowcast.precision.nested import constants_in, copy_tensors, map_tensors, outline
from narrowcast.precision.step.engine import Engine
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.weights.fused_adamw import FusedAdamW

Between = Callable[[], None]
"""Looks at weights and gradients between the passes and the update."""
Passes = Callable[[Sequence[Any]], Tensor]
"""Queues forward and backward passes of micro-batches; returns the mean loss."""
Launch = Callable[[Sequence[Any], Between | None], tuple[Outcome, Tensor]]
"""Takes a step kernel by kernel; returns its outcome and the mean loss."""

WARM_UP = 3
"""Steps before a capture: the compiler, cuBLAS and the allocator settle in them."""
MOST_FORMS = 4
"""Forms of a step that are kept captured at once: each holds the memory of a whole step."""


def unsupported_reason(engine: Engine) -> str:
    """Return why no CUDA graph can hold this model's update; empty if one can."""
    if engine.weights.device.type != "cuda":
        return f"CUDA graphs do not run on {engine.weights.device.type}"
    if engine.weights.fused is None:
        return f"the update does not use the fused kernel ({engine.update_path})"
    if offloaded := engine.plan.memory.requested.offload:
        named = " and ".join(offloaded)
        return (
            f"a captured step keeps its memory in place, but memory.offload moves the {named} to "
            "the host"
        )
    return ""


@final
class GraphedStep:
    """Steps of a model in its current formats, replayed as soon as they are warm.

    Plain values of a batch are the form of the step; graphs of a few forms are kept.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._graphs: list[StepGraphs] = []
        self._taken, self._applied_before = 0, engine.log.counts().applied

    @property
    def captured(self) -> bool:
        """Whether steps are replayed by now."""
        return bool(self._graphs)

    def __call__(
        self,
        batches: Sequence[Any],
        between: Between | None,
        *,
        passes: Passes,
        launch: Launch,
    ) -> tuple[Outcome, Tensor]:
        """Take a step with `launch`, or replay `passes`; return its outcome and mean loss."""
        self._taken += 1
        if not self._is_warm():
            with on_capture_stream(_current_device()):
                return launch(batches, between)
        self._graphs = [each for each in self._graphs if each.is_current]
        graphs = next((each for each in self._graphs if each.fit(batches)), None)
        if graphs is None:
            # Graphs of the same form are for other shapes: release their memory first.
            others = [each for each in self._graphs if not each.matches_form(batches)]
            self._graphs = others[1 - MOST_FORMS :]
            graphs = captured(self._engine, batches, passes, instead="cuda_graph=false")
            self._graphs.append(graphs)
        return graphs.replay(batches, between)

    def _is_warm(self) -> bool:
        # A graph keeps what its capture did, so the scales of fp8 must be those of a step by then.
        return self._taken > WARM_UP and (
            self.captured or self._engine.log.counts().applied > self._applied_before
        )


def captured(
    engine: Engine, batches: Sequence[Any], passes: Passes, *, instead: str
) -> "StepGraphs":
    """Capture a step; if that fails, return why and what to write `instead`."""
    try:
        return StepGraphs(engine, passes, batches)
    except RuntimeError as error:
        cause = _first_cause(error)
        if isinstance(cause, UnsupportedError):
            raise cause from None
        reason = str(cause).partition("\n")[0]
        raise UnsupportedError(
            f"The step cannot be captured as a CUDA graph ({reason}). The model may read a tensor "
            f"on the host, or the graphs may not fit in memory. Write {instead}."
        ) from error
    finally:  # after an error they would lie in the memory of a graph which there is not
        engine.weights.forget_gradients()


def _first_cause(error: BaseException) -> BaseException:
    """Return what went wrong first: the end of a capture that has failed fails as well."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return error


@dataclass(frozen=True)
class _Update:
    graph: torch.cuda.CUDAGraph
    packed: Tensor


@final
class StepGraphs:
    """The graphs of one step, and the memory its batches are put into."""

    def __init__(self, engine: Engine, passes: Passes, batches: Sequence[Any]) -> None:
        self._engine = engine
        self._inputs = map_tensors(list(batches), torch.clone)
        engine.log.sync()
        fused = self._fused_update
        fused.write_hyper()  # a change of them must not be captured
        fused.make_room()
        # The graph must update fp8 weights, even if an evaluation has just done so.
        torch.autograd.graph.increment_version(
            [p for p in engine.model.parameters() if p.requires_grad]
        )
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the steps before held, the graphs hold in their own pool
        pool = torch.cuda.graph_pool_handle()
        self._passes = torch.cuda.CUDAGraph()
        # Of this thread alone: one that pins batches for a loader is not to fail meanwhile.
        settings: dict[str, Any] = {
            "pool": pool,
            "stream": capture_stream(_current_device()),
            "capture_error_mode": "thread_local",
        }
        with torch.cuda.graph(self._passes, **settings):
            self._loss = passes(self._inputs)
        self._present = engine.weights.with_gradients()
        gradients = self._held_gradients()
        self._updates: dict[bool, _Update] = {}
        for metered in (False, True):
            self._set_gradients(gradients)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, **settings):
                packed = engine.queue_update(self._present, metered=metered)
            self._updates[metered] = _Update(graph, packed)
        self._gradients = gradients  # their memory is written and read by the graphs
        self._binding = fused.binding  # as is that of its tables

    @property
    def is_current(self) -> bool:
        """Whether the tensors that are updated are still those whose addresses were captured."""
        fused = self._engine.weights.fused
        return fused is not None and fused.binding is self._binding

    def fit(self, batches: Sequence[Any]) -> bool:
        """Return whether batches are built, and have the shapes, as those that were captured."""
        return bool(outline(list(batches)) == outline(self._inputs))

    def matches_form(self, batches: Sequence[Any]) -> bool:
        """Return whether batches hold the same beside their tensors as those that were captured."""
        return bool(constants_in(list(batches)) == constants_in(self._inputs))

    def replay(self, batches: Sequence[Any], between: Between | None) -> tuple[Outcome, Tensor]:
        """Take a step with other values in the captured batches."""
        engine = self._engine
        copy_tensors(self._inputs, list(batches))
        self._passes.replay()
        if between is not None:
            without = self._held_gradients()
            self._set_gradients(self._gradients)
            between()
            self._set_gradients(without)
        engine.begin_step()
        self._fused_update.write_hyper()  # the optimizer's settings of now
        metered = engine.is_metered
        update = self._updates[metered]
        update.graph.replay()
        self._fused_update.has_replayed(self._present)
        outcome = engine.end_step(update.packed, self._present, metered=metered)
        return outcome, self._loss

    @property
    def _fused_update(self) -> FusedAdamW:
        assert self._engine.weights.fused is not None
        return self._engine.weights.fused

    def _held_gradients(self) -> list[Tensor | None]:
        return [p.grad for p in self._engine.weights.all]

    def _set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for p, gradient in zip(self._engine.weights.all, gradients, strict=True):
            p.grad = gradient


def _current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
