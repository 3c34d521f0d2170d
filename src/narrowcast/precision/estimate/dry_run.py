"""The memory and the operations of a training step, from two steps without memory.

The model is prepared as `prepare` does, on stand-ins for the device's tensors. Storages are counted
once, in the order in which they are made and freed.
"""

import contextlib
import copy
import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.precision.estimate.compiled import compiled_step
from narrowcast.precision.estimate.ledger import Block, Ledger, Op, find_peak
from narrowcast.precision.estimate.stand_in import StandIn, without_device
from narrowcast.precision.nested import map_tensors, tensors_in
from narrowcast.precision.plan.gains import GemmRows
from narrowcast.precision.plan.memory import Memory, MemoryEstimate
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.step.prepared import Prepared, prepare

CONTEXT = 512 * 2**20
"""Bytes of a CUDA context with its loaded kernels; `nvidia-smi` shows 0.4 to 0.6 GiB."""
_WORKSPACE = {9: 32 * 2**20, 10: 32 * 2**20}
"""Bytes of torch's cuBLAS workspace by major compute capability: `CUBLASLt_WORKSPACE` defaults."""
_SMALL_WORKSPACE = 8_519_680
_THREADS = 2
"""Each thread that multiplies has a workspace: the caller's, and the one of backward passes."""
_PART = 64 * 2**20
"""Bytes of moments that the device holds of offloaded ones, in two parts; a large weight is one."""

_rehearsing = threading.Lock()
"""Held while `nn.Module.__call__` is replaced."""
ASSUMED = "the model branches on values of tensors, which are taken as true"

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """What one training step takes."""

    memory: MemoryEstimate
    ops: tuple[Op, ...]
    """Operations of the device in a step, in order."""
    rows: GemmRows
    """The rows of linear layers that the plan assumed, or that it learned from the batch."""


def model_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a model that computes it itself, or the mean of its output."""
    if isinstance(batch, Mapping):
        result = model(**batch)
    elif isinstance(batch, tuple | list):
        result = model(*batch)
    else:
        result = model(batch)
    if isinstance(result, Mapping) and isinstance(result.get("loss"), Tensor):
        loss: Tensor = result["loss"]
        return loss
    first = next(t for t in tensors_in(result) if t.is_floating_point())
    return first.float().mean()


def without_values(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device; its weights are never copied."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        made = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = made
    return copy.deepcopy(model, memo)


def estimate_step(
    model: nn.Module,
    plan: Plan,
    *,
    batch: Any,
    loss: Loss = model_loss,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    clip_norm: float | None = 1.0,
    ema_decay: float | None = None,
    micro_batches: int = 1,
    copied: bool = True,
) -> StepEstimate:
    """Predict what a training step takes on the plan's device.

    The model is not changed, unless it is on the meta device and `copied` is false.

    Raises:
        UnsupportedError: The model reads values of tensors, or has an operation without shapes.
    """
    if any("nc_entry" in vars(module) for module in model.modules()):
        raise ConfigError("The model is prepared already. Make the plan before prepare().")
    made = without_values(model) if copied else model
    inputs = map_tensors(batch, lambda t: t.detach().to("meta"))
    moved, notes = _without_offload(plan)
    names = {id(module): name for name, module in made.named_modules()}
    try:
        with _rehearsing, _Rehearsal(moved, names) as rehearsal:
            rehearsal.train(
                made,
                inputs,
                loss=loss,
                optimizer=optimizer or _adamw,
                micro_batches=micro_batches,
                clip_norm=clip_norm,
                ema_decay=ema_decay,
            )
    except NotImplementedError as error:
        if isinstance(error, UnsupportedError):
            raise
        what = str(error).partition("\n")[0]
        raise UnsupportedError(
            f"The memory of this model cannot be predicted, because an operation has no shapes "
            f"without values: {what}"
        ) from error
    finally:
        gc.collect()
    return rehearsal.estimate(plan, notes)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def _without_offload(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """Return a plan whose tensors all stay on the device, and what is approximate then."""
    notes: tuple[str, ...] = ()
    memory = plan.memory.requested
    if not memory.offload:
        return plan, notes
    if "activations" in memory.offload:
        notes = ("offloaded activations are taken as all but those of two blocks",)
    stays = Memory(activation_checkpointing=memory.activation_checkpointing)
    if stays.by_block:
        stays = replace(stays, blocks=memory.blocks)
    return replace(plan, memory=replace(plan.memory, requested=stays, on_host=0)), notes


class _Rehearsal:
    """Two steps on stand-ins, and what they allocate."""

    def __init__(self, plan: Plan, names: Mapping[int, str]) -> None:
        self._plan, self._names = plan, names
        self._stack: list[str] = []
        self.mode = StandIn(plan.hardware.device)
        self.ledger = Ledger(lambda: self._stack[-1] if self._stack else "")
        self.mode.launched = self.ledger.launched
        self._first_of_last = 0
        self._rows = plan.rows
        self.recurrent = False
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> "_Rehearsal":
        self._exit.enter_context(without_device(self.mode))
        self._exit.enter_context(self._named_calls())
        self._exit.enter_context(self.mode)
        self._exit.enter_context(self.ledger)
        return self

    def __exit__(self, *error: Any) -> None:
        self._exit.close()

    @contextlib.contextmanager
    def _named_calls(self) -> Iterator[None]:
        """Note which module is called. A hook would keep our modules from their fast paths."""
        call = nn.Module.__call__

        def named(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self._names.get(id(module))
            if name is None:
                return call(module, *args, **kwargs)
            self._stack.append(name)
            try:
                return call(module, *args, **kwargs)
            finally:
                self._stack.pop()

        nn.Module.__call__ = named  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]

    def train(
        self,
        model: nn.Module,
        batch: Any,
        *,
        loss: Loss,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        micro_batches: int,
        clip_norm: float | None,
        ema_decay: float | None,
    ) -> None:
        """Prepare the model and run two steps."""
        mode, ledger = self.mode, self.ledger
        self.recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
        mode.reads_allowed = True
        for role, tensors in (
            ("params", model.parameters()),
            ("buffers", model.buffers()),
            ("batch", tensors_in(batch)),
        ):
            for tensor in tensors:
                ledger.hold(tensor, role)
        run = prepare(
            model,
            optimizer(model),
            policy=self._plan,
            clip_norm=clip_norm,
            ema_decay=ema_decay,
            execution=self._plan.execution,
        )
        self._let_learn(model)
        for step in range(2):
            self._first_of_last = len(ledger.events)
            ledger.ops.clear()
            ledger.calls.clear()
            for _ in range(min(micro_batches, 1 + step)):
                ledger.phase = "forward"
                with run.autocast():
                    mode.reads_allowed = False
                    value = loss(model, batch)
                    mode.reads_allowed = True
                mode.forget_casts()
                ledger.phase = "backward"
                run.backward(value)
                del value
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        ledger.hold(parameter.grad, "grads")
            ledger.phase = "update"
            self._update(run)
        self._name_state(run)
        self._rows = run.plan.rows

    def _let_learn(self, model: nn.Module) -> None:
        """Allow the run to read its own scales while it learns the rows of the batch."""
        learner = vars(model).get("nc_learner")
        if learner is None:
            return

        def reading(args: Any, kwargs: Any) -> None:
            phase, self.ledger.phase, self.mode.reads_allowed = self.ledger.phase, "begin", True
            try:
                learner(args, kwargs)
            finally:
                self.ledger.phase, self.mode.reads_allowed = phase, False

        vars(model)["nc_learner"] = reading

    def _update(self, run: Prepared) -> None:
        """Update the weights: our kernel allocates the state and nothing else."""
        engine = run.engine
        weights = engine.weights
        present = weights.with_gradients()
        if weights.fused is None or not weights.fused.begin_state(present):
            engine.queue_update(present, metered=False)
        weights.forget_gradients()
        weights.ownership.gradients.end_step()
        torch.autograd.graph.increment_version(weights.all)
        engine.steps_begun += 1

    def _name_state(self, run: Prepared) -> None:
        weights, ledger = run.engine.weights, self.ledger
        for parameter in run.model.parameters():
            ledger.hold(parameter, "params")
        for state in weights.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.dim():
                    ledger.hold(value, "moments")
        for i in range(len(weights.masters.parameters)):
            if (residual := weights.masters.residual(i)) is not None and residual.numel():
                ledger.hold(residual, "master")
        if weights.average is not None:
            for value in weights.average.averages:
                if value is not None:
                    ledger.hold(value, "average")

    def estimate(self, plan: Plan, notes: Sequence[str]) -> StepEstimate:
        """Return what the last step took at its peak."""
        gpu = plan.hardware.device.startswith("cuda")
        for block in self.ledger.blocks:
            block.role = block.role or _role(block)
        blocks, events = self.ledger.blocks, self.ledger.events
        ops = self.ledger.ops
        if plan.execution == "compiled" and self.recurrent:
            notes = (*notes, "compiled steps of recurrent layers are predicted as eager")
        elif plan.execution == "compiled":
            events, ops = compiled_step(self.ledger, after=self._first_of_last, gpu=gpu)
        peak = find_peak(blocks, events, gpu=gpu, after=self._first_of_last)
        roles = {role: size for role, size in peak.roles.items() if size}
        allocated, reserved = peak.allocated, peak.reserved
        saved = _offloaded(plan, roles, peak.modules)
        for role, size in saved.items():
            roles[role] = max(roles.get(role, 0) - size, 0)
        allocated -= sum(saved.values())
        reserved -= sum(saved.values())
        if gpu:
            major = (plan.hardware.capability or (0, 0))[0]
            each = _WORKSPACE.get(major, _SMALL_WORKSPACE)
            roles["workspace"] = _THREADS * each
            allocated += roles["workspace"]
            reserved += _THREADS * -(-each // 2**21) * 2**21
        memory = MemoryEstimate(
            allocated=allocated,
            reserved=max(reserved, allocated),
            context=CONTEXT if gpu else 0,
            roles=roles,
            modules=peak.modules,
            notes=(*notes, *([ASSUMED] if self.mode.assumed else [])),
        )
        return StepEstimate(memory=memory, ops=tuple(ops), rows=self._rows)


def _role(block: Block) -> str:
    """Return the role of a storage that nobody named."""
    return {"begin": "fp8", "forward": "activations"}.get(block.phase, "temporaries")


def _offloaded(plan: Plan, roles: Mapping[str, int], modules: Mapping[str, int]) -> dict[str, int]:
    """Return how much of each role waits on the host."""
    saved = {}
    if plan.memory.offloads_optimizer:
        largest = max((each.bytes.get("moments", 0) for each in plan.modules), default=0)
        stays = 2 * max(_PART, largest)
        saved["moments"] = max(roles.get("moments", 0) - stays, 0)
    if plan.memory.offloads_activations and plan.memory.blocks:
        prefixes = tuple(f"{name}." for name in plan.memory.blocks)
        inside = sum(
            size
            for name, size in modules.items()
            if name in plan.memory.blocks or name.startswith(prefixes)
        )
        share = max(len(plan.memory.blocks) - 2, 0) / len(plan.memory.blocks)
        saved["activations"] = round(inside * share)
    return saved
