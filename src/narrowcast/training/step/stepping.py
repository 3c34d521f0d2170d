"""One training step, eager or as a CUDA graph."""

import contextlib
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from narrowcast.config.sections import Recipe
from narrowcast.errors import UnsupportedError
from narrowcast.health.diagnose.passes import eagerly
from narrowcast.health.faults.faults import StepFaults
from narrowcast.precision.plan.memory import repeated_blocks
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.products.emulated import TRACED_RIGHTLY
from narrowcast.precision.step.cuda_graph import Between, GraphedStep, unsupported_reason
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepared import Prepared
from narrowcast.training.parallel import ALONE, RunRanks
from narrowcast.training.step.losses import Losses
from narrowcast.training.step.shares import averaging, connected
from narrowcast.training.task import Batch, LossParts, Task

LARGEST_CAPTURED = 1_000_000_000
"""Larger models are captured only on request: their kernels run long enough for the host to keep
ahead, and a captured step holds its memory."""


@final
class Stepper:
    """Takes the steps of a run."""

    def __init__(
        self, prepared: Prepared, task: Task, recipe: Recipe, *, ranks: RunRanks = ALONE
    ) -> None:
        self._prepared, self._task, self._recipe, self._ranks = prepared, task, recipe, ranks
        self.losses = Losses(prepared, task)
        self._again: LossParts | None = None
        check_traceable(prepared.plan, recipe)
        self._model = compiled(prepared.model, recipe)
        self._graphed: GraphedStep | None = None
        self.drop_graphs()

    @property
    def model(self) -> nn.Module:
        """The model, compiled if the recipe says so."""
        return self._model

    def compute_loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch for a replayed step; `backward` must follow."""
        self._again = self.losses.of(self._model, batch)
        return self._again.total

    def backward(self, loss: Tensor, micro_batches: int) -> None:
        """Backpropagate the loss that `compute_loss` just returned."""
        again, self._again = self._again, None
        assert again is not None
        assert again.total is loss
        self.losses.backward(again, micro_batches=micro_batches)

    @property
    def captured(self) -> bool:
        return self._graphed is not None and self._graphed.captured

    def drop_graphs(self) -> None:
        """Drop captured graphs, because the model has other formats now."""
        plan = self._prepared.plan
        self._graphed, self._connected = None, connected(self._model, self._ranks, plan)
        if _wants_graph(self._prepared, self._task, self._recipe, self._ranks):
            self._graphed = GraphedStep(self._prepared.engine)

    def __call__(
        self,
        batches: Sequence[Batch],
        *,
        faults: StepFaults | None = None,
        between: Between | None = None,
    ) -> tuple[Outcome, Tensor]:
        """Take a step; return its outcome, and the mean loss with its parts on the device.

        `between` is called when all gradients are complete and no weight has moved.
        """
        if faults is not None:
            with eagerly():
                return self._launch(batches, between, faults=faults)
        if self._graphed is None:
            return self._launch(batches, between)
        return self._graphed(batches, between, passes=self.passes, launch=self._launch)

    def passes(self, batches: Sequence[Batch], *, faults: StepFaults | None = None) -> Tensor:
        """Queue forward and backward passes; return the mean loss with its parts."""
        losses = []
        for number, batch in enumerate(batches, start=1):
            with (
                contextlib.nullcontext() if faults is None else faults.during(number),
                averaging(self._connected, last=number == len(batches)),
            ):
                losses.append(self._pass(batch, micro_batches=len(batches)))
        self._task.after_backward(self._prepared)
        return self.losses.mean(losses)

    def _pass(self, batch: Batch, *, micro_batches: int) -> LossParts:
        with self._prepared.autocast():
            loss = self.losses.of(self._connected, batch)
        self.losses.backward(loss, micro_batches=micro_batches)
        return loss.detached()

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


def _wants_graph(prepared: Prepared, task: Task, recipe: Recipe, ranks: RunRanks) -> bool:
    """Return whether to capture steps; raise if that was requested and is not possible."""
    why = unsupported_reason(prepared.engine)
    if ranks.several and not why:
        why = f"{ranks.size} ranks train together, whose collectives are not captured"
    if recipe.deterministic and not why:
        why = "deterministic kernels may wait for the host"
    if recipe.fault_injection and not why:
        why = "a captured step repeats itself, and injected faults do not"
    if task.edits_gradients and prepared.loss_scale is not None and not why:
        why = "a hook of the task edits gradients, which must be unscaled on the host first"
    if recipe.cuda_graph and why:
        raise UnsupportedError(
            f"cuda_graph=true is not possible: {why}. Write cuda_graph=null to capture steps only "
            "where it is possible."
        )
    small = sum(p.numel() for p in prepared.model.parameters()) <= LARGEST_CAPTURED
    # Saving memory rules out a graph's own pool, and a graph cannot draw random numbers again.
    small = small and prepared.plan.memory.requested.activation_checkpointing == "none"
    return not why and (recipe.cuda_graph or (recipe.cuda_graph is None and small))


VERSIONS = 64
"""Versions of a block that are compiled; any more run uncompiled without a warning. torch's 8 is
too few: every policy and every kind of block with an override needs three."""


def compiled(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Compile the model's repeated blocks in place, or all of it, if the recipe says so."""
    if recipe.compile:
        import torch._dynamo  # two seconds, and most runs are not compiled

        limits: Any = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, VERSIONS)
        for block in [block for _, block in repeated_blocks(model)] or [model]:
            block.compile()
    return model


def check_traceable(plan: Plan, recipe: Recipe) -> None:
    """Raise if compiling would lose gradients or keep more memory than requested."""
    emulated = plan.emulated or any(module.how == "emulated" for module in plan.modules)
    if recipe.compile and emulated and not TRACED_RIGHTLY:
        raise UnsupportedError(
            "compile=true loses the gradients of emulated products with torch "
            f"{torch.__version__}. Write compile=false, use torch 2.13, or a policy that this "
            "machine runs natively."
        )
    if recipe.compile and plan.memory.requested.activation_checkpointing == "selective":
        raise UnsupportedError(
            "compile=true hides the matrix products that memory.activation_checkpointing=selective "
            "keeps. Write memory.activation_checkpointing=blocks, or compile=false."
        )
