"""What a workload provides so that the engine can train it.

A batch is a tensor, or tuples, lists and dicts of tensors, nested in any way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from narrowcast.config.common_sections import OptimizerSection
from narrowcast.errors import ConfigError, blamed_on
from narrowcast.precision.step.outcome import Outcome
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import TaskInfo

Batch: TypeAlias = Any
"""Tensors, nested in tuples, lists and dicts."""


@runtime_checkable
class MapDataset(Protocol):
    """A dataset that returns several samples by index, the same ones in any process at any time."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitems__(self, indices: list[int], /) -> Any:
        """Return samples in that order, on the CPU: stacked, or as a list to collate."""
        ...


class SampleDataset(Protocol):
    """A dataset that returns one sample by index; otherwise like `MapDataset`."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return one sample, on the CPU."""
        ...


@final
@dataclass(frozen=True, kw_only=True)
class LossParts:
    """A loss of several parts: the total that is trained, and parts that are reported."""

    total: Tensor
    """Mean loss of the batch, a scalar tensor."""
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars on the device, by the names in `TaskInfo.loss_parts`."""

    def detached(self) -> LossParts:
        """Return the losses without their graph."""
        parts = {name: part.detach() for name, part in self.parts.items()}
        return LossParts(total=self.total.detach(), parts=parts)


@final
@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters with their own settings. Every trained parameter is in exactly one group."""

    parameters: Sequence[nn.Parameter]
    lr: float | None = None
    """Peak learning rate; None for the optimizer's."""
    lr_factor: float = 1.0
    """Factor on the learning rate."""
    weight_decay: float | None = None
    """Weight decay of all of them; None for the optimizer's, on those of two or more dimensions."""
    frozen: bool = False
    """Whether they keep their values and have no gradient."""
    frozen_until: float = 0.0
    """Share of the run's steps during which they keep their values (gradual unfreezing). They have
    gradients from the start, so that optimizer statistics are ready by then."""
    optimizer: OptimizerSection | None = None
    """An additional optimizer for this group; None for the recipe's."""

    def __post_init__(self) -> None:
        # `model.parameters()` is a generator, which can be read only once.
        object.__setattr__(self, "parameters", tuple(self.parameters))
        for name in ("lr", "lr_factor", "weight_decay"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name} of a parameter group must be 0 or more, got {value!r}.")
        if not 0 <= self.frozen_until < 1:
            raise ConfigError(
                "frozen_until of a parameter group must be a share of the run, from 0 to less than "
                f"1, got {self.frozen_until!r}. For parameters that never train, write frozen=True."
            )


@final
@dataclass(frozen=True, kw_only=True)
class Hook:
    """Callbacks around the steps of a run: projections, constraints, warm-ups.

    Change the model's weights in place, in their own dtype: under `params=bf16` a change below half
    a bf16 spacing is lost. Master weights follow.
    """

    name: str
    """Name of its state in a checkpoint."""
    before_first_step: Callable[[Prepared], None] | None = None
    """Called once, without gradients, when a run starts; not when it is resumed."""
    after_backward: Callable[[Prepared], None] | None = None
    """Called without gradients when all gradients of a step are complete and unscaled, to read or
    edit them in place. CUDA graphs capture it, so it must not synchronise, and its state must be
    in tensors."""
    after_step: Callable[[Prepared, Tensor], None] | None = None
    """Called without gradients when a step was queued. The tensor, on the device, is true if the
    step was applied; reading it on the host synchronises."""
    state_dict: Callable[[], dict[str, Any]] | None = None
    """Returns the state for a checkpoint: tensors, numbers, text, nested."""
    load_state_dict: Callable[[dict[str, Any]], None] | None = None
    one_rank: bool = False
    """Whether the hook depends on the samples of this process, so that several ranks, which have
    other samples each, would act differently."""
    notices: Callable[[], Sequence[str]] | None = None
    """Returns lines that the terminal shows before the first record of a new or resumed run."""

    def __post_init__(self) -> None:
        if (self.state_dict is None) is not (self.load_state_dict is None):
            raise ConfigError(
                f"Hook {self.name!r} must have both state_dict and load_state_dict or neither, got "
                "one of them."
            )


@final
@dataclass(frozen=True, kw_only=True)
class EvalBatches:
    """The held-out data of `Task.evaluate` in parts, so that a few of them can be evaluated."""

    parts: int
    """Number of parts, each about as large as a micro-batch."""
    headline: Callable[[nn.Module, int], float | Tensor]
    """Returns the first of `info.metrics` on one part, the same at every call. The mean over all
    parts is about the metric itself."""

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ConfigError(
                f"parts of EvalBatches must be 1 or more, got {self.parts}. Write the number of "
                "parts, or leave held_out out."
            )


@final
@dataclass(frozen=True, kw_only=True)
class TextSamples:
    """Text of the model for the report, drawn at some evaluations and at the last one."""

    draw: Callable[[nn.Module], Sequence[tuple[str, str]]]
    """Returns prompts and what the model writes after each: the same for the same weights."""
    passes: float
    """Cost of one call, in forward passes of a micro-batch."""


@final
@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its training data and its evaluation."""

    model: nn.Module
    """On its device, each module in the mode (`train` or `eval`) it trains in."""
    train_data: MapDataset | SampleDataset
    loss: Callable[[nn.Module, Any], Tensor | LossParts]
    """Returns the mean loss of the model on a batch, a scalar tensor."""
    evaluate: Callable[[nn.Module], Mapping[str, float]]
    """Returns metrics on held-out data, by the names in `info.metrics`."""
    items: Callable[[Any], int]
    """Returns how many of `info.unit` a batch has; called while the batch is on the CPU."""
    gemm_rows: int
    """Rows of the model's matrix products: tokens per micro-batch."""
    info: TaskInfo = TaskInfo()  # noqa: RUF009  # frozen
    """Units and metrics of the task."""

    held_out: EvalBatches | None = None
    """The data of `evaluate` in parts; without it, comparing weights evaluates each in full."""
    samples: TextSamples | None = None
    """Text for the report. It is drawn as often as 2 % of the run's work allow, 8 times at most."""
    data_digest: Callable[[], str] | None = None
    """Returns a text that differs for other training or evaluation data, so that a run is not
    resumed on other data by mistake. Without it, samples of `train_data` are fingerprinted."""
    prepare_microbatches: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    """Gets the micro-batches of a step, on the device, and returns as many, for example weighted by
    their number of targets. Without it, all count alike."""
    loss_terms: Callable[[Any], int | Tensor] | None = None
    """Returns over how many terms `loss` averages a batch, for example its tokens with a label.
    Several ranks weight their shares of a batch by it; without it, by their samples."""
    collate: Callable[[Any], Any] | None = None
    """Makes a batch from a list of samples, in worker processes if there are any. Without it, the
    dataset or torch's `default_collate` stacks them."""
    example: Callable[[], Any] | None = None
    """Returns a micro-batch of the largest shape on the meta device, to predict memory. Without it,
    samples of `train_data` are taken."""
    parameter_groups: Callable[[nn.Module], Sequence[ParameterGroup]] | None = None
    """Returns parameter groups; without it, the recipe's optimizer trains every parameter."""
    scaled_losses: tuple[str, ...] = ()
    """Loss parts with a loss scale each, if the policy has one. They must sum to the total."""
    hooks: tuple[Hook, ...] = ()
    write_results: Callable[[Path, Prepared], None] | None = None
    """Writes the task's own files to the run folder after the last step and the weights, and again
    if that was interrupted."""
    summary: Callable[[], Sequence[str]] | None = None
    """Returns lines that the terminal shows below a finished run, such as metrics on test data that
    `write_results` measured."""
    weights_path: str = ""
    """File or folder in the run folder to which `write_results` saves the weights, e.g. `adapter`.
    If empty, all weights are saved to `model.safetensors`."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module) or next(self.model.parameters(), None) is None:
            raise ConfigError(
                "The task's model must be a torch.nn.Module with parameters, got a "
                f"{type(self.model).__name__}. Pass the module to train."
            )
        data = self.train_data
        by_number = hasattr(data, "__getitem__") or hasattr(data, "__getitems__")
        if not hasattr(data, "__len__") or not by_number or isinstance(data, IterableDataset):
            raise ConfigError(
                "The task's train_data must have len() and samples by index, so that a run can be "
                f"resumed at its next batch, got a {type(data).__name__}. Pass a list, or a "
                "dataset with __len__ and __getitem__."
            )
        if not isinstance(self.gemm_rows, int) or self.gemm_rows < 1:
            raise ConfigError(
                "gemm_rows must be the number of rows of the model's matrix products, 1 or more, "
                f"got {self.gemm_rows!r}. For samples that are vectors, pass the batch size."
            )
        if unknown := [name for name in self.scaled_losses if name not in self.info.loss_parts]:
            raise ConfigError(
                "scaled_losses must name parts in info.loss_parts "
                f"({', '.join(self.info.loss_parts) or 'none'}), got {', '.join(unknown)}."
            )
        if self.weights_path and self.write_results is None:
            raise ConfigError(
                "weights_path needs a write_results that saves the weights there, got "
                f"{self.weights_path!r} without one. Pass write_results, or leave weights_path out."
            )
        names = [hook.name for hook in self.hooks]
        if len(set(names)) != len(names):
            raise ConfigError(
                f"Each hook of a task must have its own name, got {', '.join(names)}."
            )

    @torch.no_grad()
    def as_one_step(self, batches: list[Batch]) -> list[Batch]:
        """Return the micro-batches of a step after the task's `prepare_microbatches`."""
        if self.prepare_microbatches is None:
            return batches
        with blamed_on("prepare_microbatches of the task"):
            joined = list(self.prepare_microbatches(batches))
        if len(joined) != len(batches):
            raise ConfigError(
                "prepare_microbatches must return as many micro-batches as it gets, "
                f"{len(batches)}, got {len(joined)}."
            )
        return joined

    @torch.no_grad()
    def before_first_step(self, prepared: Prepared) -> None:
        """Call the hooks of a run that starts."""
        self._call_hooks("before_first_step", prepared)

    def notices(self) -> list[str]:
        """Return the lines that hooks report when a run starts or is resumed."""
        return [line for lines in self._call_hooks("notices") for line in lines]

    @property
    def edits_gradients(self) -> bool:
        """Whether a hook may edit gradients before the update."""
        return any(hook.after_backward is not None for hook in self.hooks)

    @torch.no_grad()
    def after_backward(self, prepared: Prepared) -> None:
        """Unscale the gradients if a hook needs them, and call the hooks."""
        if self.edits_gradients:
            prepared.unscale()
            self._call_hooks("after_backward", prepared)

    @torch.no_grad()
    def after_step(self, prepared: Prepared, outcome: Outcome) -> None:
        """Call the hooks after a step was queued."""
        self._call_hooks("after_step", prepared, outcome.applied_on_device)

    def _call_hooks(self, name: str, *arguments: object) -> list[Any]:
        results = []
        for hook in self.hooks:
            if (call := getattr(hook, name)) is not None:
                with blamed_on(f"{name} of the task's hook {hook.name!r}"):
                    results.append(call(*arguments))
        return results
