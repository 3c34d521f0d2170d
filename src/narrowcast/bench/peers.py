"""The training step of each kind of contender, written as its documentation has it."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from narrowcast.bench.model import Workbench, with_policy
from narrowcast.bench.timing import Step
from narrowcast.errors import UnsupportedError
from narrowcast.hardware import detect_hardware
from narrowcast.training.optimizers import build_optimizer
from narrowcast.training.phase_plans import plan_recipe_model
from narrowcast.training.setup import prepare_recipe
from narrowcast.training.step.stepping import Stepper
from narrowcast.training.task import Batch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FP8_MULTIPLE = 16
"""Both dimensions of a weight must be multiples of it, as in torchao's own filter."""
HEADS = ("head", "lm_head", "classifier")
"""Names of the last layer, here and in transformers; torchao's documentation keeps it in bf16."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A training step that is ready to be timed."""

    step: Step
    about: Mapping[str, Any]
    """Plain data about what was built."""
    loss: Callable[[], float | None]
    """Loss of the latest step. Synchronises."""
    is_captured: Callable[[], bool] = lambda: False
    """Whether the step is a CUDA graph by now, whose memory shows only during capture."""


def build_ours(bench: Workbench, *, policy: str) -> Trial:
    """Return the trainer's own step in a policy, compiled and captured if the recipe says so."""
    recipe = with_policy(bench.recipe, policy)
    plan = plan_recipe_model(
        recipe,
        bench.model,
        hardware=detect_hardware(str(bench.device)),
        gemm_rows=bench.task.gemm_rows,
    )
    prepared = prepare_recipe(recipe, bench.task, plan=plan)
    stepper = Stepper(prepared, bench.task, recipe)
    batches, latest = bench.stream(), list[Tensor]()

    def step() -> None:
        _, losses = stepper(list(islice(batches, bench.recipe.gradient_accumulation_steps)))
        latest[:] = [losses]  # of the whole, and of its parts

    return Trial(
        step=step,
        about={
            "parameters": bench.parameters,
            "compiled": bench.recipe.compile,
            "policy": str(plan.policy),
            "update_path": prepared.update_path,
        },
        loss=lambda: float(latest[0][0]) if latest else None,
        is_captured=lambda: stepper.captured,
    )


def build_torch(
    bench: Workbench,
    *,
    compute: Literal["fp32", "tf32", "bf16", "fp16"],
    compiled: bool = False,
    weights: Literal["fp32", "bf16"] = "fp32",
    float8: Literal["", "tensorwise", "rowwise"] = "",
) -> Trial:
    """Return a step of plain torch, or with linear layers converted to fp8 by torchao."""
    about: dict[str, Any] = {"compiled": compiled}
    if float8 and bench.device.type != "cuda":
        raise UnsupportedError("torchao's fp8 products need a GPU")
    if weights == "bf16":
        for parameter in bench.model.parameters():  # buffers such as the rotary table stay
            parameter.data = parameter.data.to(torch.bfloat16)
    if float8:
        about["fp8_layers"] = convert_to_torchao(bench.model, float8)
    if compute == "tf32":
        torch.set_float32_matmul_precision("high")
    model = bench.model_with_loss()
    optimizer = build_optimizer(bench.recipe.optimizer, model, device=bench.device)
    forward: Any = torch.compile(model) if compiled else model
    scaler = torch.amp.GradScaler(bench.device.type, enabled=compute == "fp16")

    def autocast() -> AbstractContextManager[Any]:
        if compute not in DTYPES or weights == "bf16":
            return nullcontext()
        return torch.autocast(bench.device.type, dtype=DTYPES[compute])

    def compute_loss(batch: Batch) -> Tensor:
        with autocast():
            loss: Tensor = forward(batch)
            return loss

    def update() -> None:
        scaler.unscale_(optimizer)
        if bench.recipe.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), bench.recipe.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return _make_trial(
        bench, compute_loss, lambda loss: scaler.scale(loss).backward(), update, **about
    )


def build_accelerate(
    bench: Workbench, *, precision: Literal["bf16", "fp32"], compiled: bool
) -> Trial:
    """Return a step through `Accelerator`: prepare, backward, clip_grad_norm_."""
    library: Any = importlib.import_module("accelerate")
    accelerator = library.Accelerator(
        mixed_precision="bf16" if precision == "bf16" else "no",
        cpu=bench.device.type == "cpu",
        dynamo_backend="inductor" if compiled else "no",
    )
    with_loss = bench.model_with_loss()
    optimizer = build_optimizer(bench.recipe.optimizer, with_loss, device=bench.device)
    model, optimizer = accelerator.prepare(with_loss, optimizer)

    def update() -> None:
        if bench.recipe.clip_norm is not None:
            accelerator.clip_grad_norm_(model.parameters(), bench.recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return _make_trial(bench, model, accelerator.backward, update, compiled=compiled)


def build_fabric(bench: Workbench, *, precision: Literal["bf16", "fp32"], compiled: bool) -> Trial:
    """Return a step through Lightning's `Fabric`: setup, backward, clip_gradients."""
    # Fabric is a package of its own, or a part of Lightning.
    alone = importlib.util.find_spec("lightning_fabric") is not None
    library: Any = importlib.import_module("lightning_fabric" if alone else "lightning.fabric")
    fabric = library.Fabric(
        accelerator=bench.device.type,
        devices=1,
        precision="bf16-mixed" if precision == "bf16" else "32-true",
    )
    with_loss = bench.model_with_loss()
    optimizer = build_optimizer(bench.recipe.optimizer, with_loss, device=bench.device)
    # Fabric compiles a compiled module again, around its own wrapper.
    model, optimizer = fabric.setup(torch.compile(with_loss) if compiled else with_loss, optimizer)

    def update() -> None:
        if bench.recipe.clip_norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=bench.recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return _make_trial(bench, model, fabric.backward, update, compiled=compiled)


BUILDERS: Mapping[str, Callable[..., Trial]] = {
    "narrowcast": build_ours,
    "torch": build_torch,
    "accelerate": build_accelerate,
    "lightning": build_fabric,
}


def convert_to_torchao(model: nn.Module, recipe: str) -> int:
    """Convert linear layers to torchao's fp8 in place; return how many."""
    float8: Any = importlib.import_module("torchao.float8")
    converted: list[str] = []

    def is_converted(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or name.rpartition(".")[2] in HEADS:
            return False
        fits = module.in_features % FP8_MULTIPLE == 0 and module.out_features % FP8_MULTIPLE == 0
        converted.extend([name] if fits else [])
        return fits

    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=is_converted)
    return len(converted)


def _make_trial(
    bench: Workbench,
    compute_loss: Callable[[Batch], Tensor],
    backward: Callable[[Tensor], object],
    update: Callable[[], object],
    **about: Any,
) -> Trial:
    """Return the step: loss and backward for each micro-batch, then the update."""
    batches, count = bench.stream(), bench.recipe.gradient_accumulation_steps
    latest: list[Tensor] = []

    def step() -> None:
        latest.clear()
        for _ in range(count):
            loss = compute_loss(next(batches))
            backward(loss / count if count > 1 else loss)
            latest.append(loss.detach())
        update()

    return Trial(
        step=step,
        about={"parameters": bench.parameters, **about},
        loss=lambda: float(torch.stack(latest).mean()) if latest else None,
    )
