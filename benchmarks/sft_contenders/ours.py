"""narrowcast, by the steps that its trainer takes: plan, prepare, and the Stepper of a recipe."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import narrowcast as nc
from narrowcast.precision.plan.fusing import piece_lines
from narrowcast.runs import Metric, TaskInfo
from narrowcast.training.setup import prepare_recipe
from narrowcast.training.step.stepping import Stepper
from narrowcast.workloads import load_recipe
from narrowcast.workloads.sft.attention import conversation_bounds, separate_conversations
from sft_contenders.clock import Clock
from sft_contenders.settings import CLIP_NORM, LR, Shape, adapted, built_model

SPLIT = "params=bf16, master=split"


@dataclass(frozen=True)
class Ours:
    """Which formats, and how steps are launched."""

    policy: str = "bf16"
    compiled: bool = True
    captured: bool = True
    kept: str | None = None
    """How a frozen base in e4m3 is multiplied; none: the base is as it came."""
    fuse: str = "auto"


OURS = {
    "narrowcast": Ours(),
    "narrowcast, fp8": Ours(policy="fp8-tensor"),
    "narrowcast, base e4m3": Ours(kept="wide"),
    "narrowcast, base e4m3, fp8 products": Ours(kept="fp8"),
    "narrowcast, eager": Ours(compiled=False, captured=False),
    "narrowcast, captured": Ours(compiled=False),
    "narrowcast, compiled": Ours(captured=False),
    "narrowcast, not fused": Ours(fuse="none"),
}


def run_ours(
    name: str,
    shape: Shape,
    tune: str,
    rows: dict[str, Tensor],
    clock: Clock,
    *,
    device: str,
    steps: int,
) -> dict[str, Any]:
    how = OURS[name]
    on_gpu = device != "cpu"
    model = built_model(shape, tune, device)
    separate_conversations(model)
    model = adapted(model) if tune == "lora" else model
    model.train()
    if how.kept is not None:
        nc.quantize_frozen(model, products=how.kept)
    policy = f"{how.policy}, {SPLIT}" if tune == "full" else how.policy
    words = {
        "precision.policy": policy if on_gpu else "fp32",
        "steps": steps,
        "batch_size": shape.rows,
        "clip_norm": CLIP_NORM,
        "optimizer.lr": LR,
        "optimizer.weight_decay": 0,
        "lr_schedule.name": "constant",
        "lr_schedule.warmup": 0,
        "compile": str(how.compiled and on_gpu).lower(),
        "cuda_graph": str(how.captured and on_gpu).lower(),
    }
    recipe = load_recipe("sft/tiny", [f"{key}={value}" for key, value in words.items()]).recipe
    task = nc.Task(
        model=model,
        train_data=list(rows["input_ids"]),
        loss=_loss,
        evaluate=lambda _: {"loss": 0.0},
        items=lambda batch: batch["input_ids"].numel(),
        gemm_rows=shape.tokens,
        info=TaskInfo(unit="token", metrics=(Metric(name="loss"),)),
    )
    plan = nc.plan(
        model,
        recipe.precision.policy,
        hardware=nc.detect_hardware(device),
        gemm_rows=shape.tokens,
        fuse=how.fuse,
    )
    prepared = prepare_recipe(recipe, task, plan=plan)
    step = Stepper(prepared, task, recipe)
    data = {key: _pinned(tensor, on_gpu) for key, tensor in rows.items()}
    for number in range(steps):
        span = slice(number * shape.rows, (number + 1) * shape.rows)
        batch = {k: each[span].to(device, non_blocking=True) for k, each in data.items()}
        _, loss = step([batch])
        clock.loss(loss.flatten()[0])
        clock.step_ended()
    counts = prepared.engine.log.counts()
    return {
        "policy": policy,
        "update": prepared.update_path,
        "captured": step.captured,
        "skipped": counts.skipped,
        "fused": list(piece_lines(plan.fused)),
    }


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(
        input_ids=batch["input_ids"],
        labels=batch["labels"],
        position_ids=batch["position_ids"],
        attention_mask=conversation_bounds(batch["position_ids"]),
        use_cache=False,
    ).loss
    return loss


def _pinned(tensor: Tensor, on_gpu: bool) -> Tensor:
    return tensor.pin_memory() if on_gpu else tensor
