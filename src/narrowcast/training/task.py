"""What a workload supplies so that the engine can train it: one value, its optional parts visible.

A batch is a tensor, or tuples, lists and dicts of tensors, nested as the workload likes.
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
    """Samples by number; the same numbers give the same samples, in any process, at any time."""

    def __len__(self) -> int:
        """Return how many samples there are."""
        ...

    def __getitems__(self, indices: list[int], /) -> Any:
        """Return the samples of `indices`, in that order, on the CPU.

        Stacked to a batch; or a list of samples, of which the task's `collate` makes one, or
        torch's own.
        """
        ...


class SampleDataset(Protocol):
    """Samples by number, one at a time; else as `MapDataset`."""

    def __len__(self) -> int:
        """Return how many samples there are."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return one sample, on the CPU."""
        ...


@final
@dataclass(frozen=True, kw_only=True)
class LossParts:
    """A loss of several parts: what is trained, and what is told of it."""

    total: Tensor
    """The mean loss of the batch, a tensor without dimensions."""
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Numbers on the device, by the names that `TaskInfo.loss_parts` gives."""

    def detached(self) -> LossParts:
        """Return the numbers without what they were computed from."""
        parts = {name: part.detach() for name, part in self.parts.items()}
        return LossParts(total=self.total.detach(), parts=parts)


@final
@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that learn in a way of their own; every trained one is in exactly one group."""

    parameters: Sequence[nn.Parameter]
    lr: float | None = None
    """Their learning rate at its highest; none: that of their optimizer."""
    lr_factor: float = 1.0
    """What that is multiplied by."""
    weight_decay: float | None = None
    """On all of them; none: as the optimizer's settings say, on those of two or more dimensions."""
    frozen: bool = False
    """They keep their values, and take no gradient."""
    frozen_until: float = 0.0
    """Share of the run's steps during which they keep their values: gradual unfreezing. They take
    gradients all along, so that an optimizer knows their size by then."""
    optimizer: OptimizerSection | None = None
    """An optimizer beside the recipe's; none: the recipe's."""

    def __post_init__(self) -> None:
        # Who gives `model.parameters()` gives something that can be gone through once.
        object.__setattr__(self, "parameters", tuple(self.parameters))
        for name in ("lr", "lr_factor", "weight_decay"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value!r} of a parameter group: write 0 or more")
        if not 0 <= self.frozen_until < 1:
            raise ConfigError(
                f"frozen_until={self.frozen_until!r} of a parameter group: write a share of the "
                "run, 0 to less than 1; what never learns is frozen=True"
            )


@final
@dataclass(frozen=True, kw_only=True)
class Hook:
    """What is done to the model around its steps: projections, constraints, warm-ups.

    Weights are changed in place, those of the model, in the format they are kept in: under
    `params=bf16` a change below half a spacing of bf16 is lost. Digits kept beside them follow.
    """

    name: str
    """What its state is called in a checkpoint."""
    before_first_step: Callable[[Prepared], None] | None = None
    """Called once, without gradients, when a run begins; not when it is resumed."""
    after_backward: Callable[[Prepared], None] | None = None
    """Called, without gradients, when every weight has the true gradient of a step, to look at
    gradients or edit them in place. It is part of what a CUDA graph captures, so it must not wait
    for the device, and what it keeps is in tensors."""
    after_step: Callable[[Prepared, Tensor], None] | None = None
    """Called, without gradients, when a step has been queued. The tensor is true where the step was
    applied; it is on the device, and reading it on the host would wait."""
    state_dict: Callable[[], dict[str, Any]] | None = None
    """Returns what a checkpoint keeps: tensors, numbers, text, nested."""
    load_state_dict: Callable[[dict[str, Any]], None] | None = None
    notices: Callable[[], Sequence[str]] | None = None
    """Returns lines that the terminal shows once, before the first record of a run that begins or
    is resumed."""

    def __post_init__(self) -> None:
        if (self.state_dict is None) is not (self.load_state_dict is None):
            raise ConfigError(
                f"hook {self.name!r} has one of state_dict and load_state_dict; give both, or none"
            )


@final
@dataclass(frozen=True, kw_only=True)
class EvalBatches:
    """What `Task.evaluate` looks at, in parts, for those who need to look at a few only."""

    parts: int
    """How many there are, each about as large as a micro-batch."""
    headline: Callable[[nn.Module, int], float | Tensor]
    """Returns the first of `info.metrics` on the part of that number; their mean is about that of
    them all. The same part gives the same, whenever it is asked."""

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ConfigError(
                f"held-out data in parts={self.parts}: write how many there are, 1 or more, or "
                "leave held_out out"
            )


@final
@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, what it is trained on, and how both are judged."""

    model: nn.Module
    """On its device, and in the mode (`train` or `eval`) its modules train in."""
    train_data: MapDataset | SampleDataset
    loss: Callable[[nn.Module, Any], Tensor | LossParts]
    """Returns the mean loss of the model on a batch, a tensor without dimensions."""
    evaluate: Callable[[nn.Module], Mapping[str, float]]
    """Returns measures on held-out data, by the names that `info.metrics` declares."""
    items: Callable[[Any], int]
    """Returns how many of `info.unit` a batch trains on; asked while the batch is on the CPU."""
    gemm_rows: int
    """Rows that the linear layers of the model multiply at once: tokens per micro-batch."""
    info: TaskInfo = TaskInfo()  # noqa: RUF009  # frozen
    """What is counted, and how the task is judged."""

    held_out: EvalBatches | None = None
    """What `evaluate` looks at, in parts; none: whoever compares weights evaluates each in full."""
    data_digest: Callable[[], str] | None = None
    """Returns a text that is another one for other data, to train or to judge on, so that a run is
    not continued on other data unawares; none: samples of `train_data` are looked at."""
    prepare_microbatches: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    """Is given the micro-batches of a step, on the device, and returns as many: so that each knows
    how much it counts, where they hold unequally much. None: all count alike."""
    collate: Callable[[Any], Any] | None = None
    """Makes a batch of a list of samples, in a worker process where there are any; none: the data
    stacks its samples itself, or torch's own collate does where they come one at a time."""
    parameter_groups: Callable[[nn.Module], Sequence[ParameterGroup]] | None = None
    """Returns who learns how; none: every parameter as the recipe's optimizer says."""
    scaled_losses: tuple[str, ...] = ()
    """Parts of the loss that are each backpropagated under a loss scale of their own, where the
    policy has one. Their sum is what is trained, so it must be the total."""
    hooks: tuple[Hook, ...] = ()
    write_results: Callable[[Path, Prepared], None] | None = None
    """Writes the task's own files to the run folder, when all steps are done and the weights
    saved; again, if that was interrupted."""
    weights_path: str = ""
    """The file or folder of the run in which `write_results` leaves the weights, e.g. `adapter`:
    for models of which a small part is trained. Empty: all weights go to `model.safetensors`."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module) or next(self.model.parameters(), None) is None:
            raise ConfigError(
                f"the task's model is a {type(self.model).__name__} without parameters; give the "
                "torch.nn.Module that is to be trained"
            )
        data = self.train_data
        by_number = hasattr(data, "__getitem__") or hasattr(data, "__getitems__")
        if not hasattr(data, "__len__") or not by_number or isinstance(data, IterableDataset):
            raise ConfigError(
                f"the task's train_data is a {type(data).__name__}; it needs len() and samples by "
                "number, so that a run can be resumed with its next batch. Give a list of what it "
                "yields, or a dataset with __len__ and __getitem__"
            )
        if not isinstance(self.gemm_rows, int) or self.gemm_rows < 1:
            raise ConfigError(
                f"gemm_rows={self.gemm_rows!r}: write how many rows a linear layer multiplies at "
                "once, 1 or more; for samples that are vectors, the batch size"
            )
        if unknown := [name for name in self.scaled_losses if name not in self.info.loss_parts]:
            raise ConfigError(
                f"scaled_losses names {', '.join(unknown)}, and info.loss_parts has "
                f"{', '.join(self.info.loss_parts) or 'none'}; name parts of the loss"
            )
        if self.weights_path and self.write_results is None:
            raise ConfigError(
                f"weights_path={self.weights_path!r}, and there is no write_results to write them "
                "there; give one, or leave weights_path out"
            )
        names = [hook.name for hook in self.hooks]
        if len(set(names)) != len(names):
            raise ConfigError(f"two hooks of one name: {', '.join(names)}; each needs its own")

    @torch.no_grad()
    def as_one_step(self, batches: list[Batch]) -> list[Batch]:
        """Return the micro-batches of a step as the task wants them together."""
        if self.prepare_microbatches is None:
            return batches
        with blamed_on("together of the task"):
            joined = list(self.prepare_microbatches(batches))
        if len(joined) != len(batches):
            raise ConfigError(
                f"together of the task was given {len(batches)} micro-batches and returns "
                f"{len(joined)}; return as many"
            )
        return joined

    @torch.no_grad()
    def before_first_step(self, prepared: Prepared) -> None:
        """Call the hooks of a run that begins."""
        for hook in self.hooks:
            if hook.before_first_step is not None:
                with blamed_on(f"before_first_step of the task's hook {hook.name!r}"):
                    hook.before_first_step(prepared)

    def notices(self) -> list[str]:
        """Return what the hooks report once a run has begun or been resumed."""
        lines: list[str] = []
        for hook in self.hooks:
            if hook.notices is not None:
                with blamed_on(f"notices of the task's hook {hook.name!r}"):
                    lines += hook.notices()
        return lines

    @property
    def edits_gradients(self) -> bool:
        """Whether a hook is given the gradients of a step before they are used."""
        return any(hook.after_backward is not None for hook in self.hooks)

    @torch.no_grad()
    def after_backward(self, prepared: Prepared) -> None:
        """Call the hooks of gradients that are all there; under a loss scale it is divided out."""
        if self.edits_gradients:
            prepared.unscale()
        for hook in self.hooks:
            if hook.after_backward is not None:
                with blamed_on(f"after_backward of the task's hook {hook.name!r}"):
                    hook.after_backward(prepared)

    @torch.no_grad()
    def after_step(self, prepared: Prepared, outcome: Outcome) -> None:
        """Call the hooks of a step that has been queued."""
        for hook in self.hooks:
            if hook.after_step is not None:
                with blamed_on(f"after_step of the task's hook {hook.name!r}"):
                    hook.after_step(prepared, outcome.applied_on_device)
