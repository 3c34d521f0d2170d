"""torchao's float8 training, compiled, as its documentation asks: the head stays in bf16."""

import importlib
from typing import Any, Literal

import torch
from torch import Tensor, nn

from narrowcast.bench.measure.timing import Trial
from narrowcast.bench.model import Workbench
from narrowcast.bench.peers.plain import loss_function
from narrowcast.bench.peers.stepping import clip, narrow_weights, optimizer_for, trial_of
from narrowcast.errors import UnsupportedError
from narrowcast.training.task import Batch

MULTIPLE = 16
"""Of which both dimensions of a weight must be, as torchao's own filter has it."""

HEADS = ("head", "lm_head", "classifier")
"""What the last layer is called here, and by transformers."""


def build(
    bench: Workbench,
    *,
    recipe: Literal["tensorwise", "rowwise"],
    weights: Literal["fp32", "bf16"],
) -> Trial:
    """Return a compiled step in fp8; around the fp8 layers is bf16 autocast, or bf16 weights."""
    if bench.device.type != "cuda":
        raise UnsupportedError("torchao's fp8 products need a GPU")
    if weights == "bf16":
        narrow_weights(bench.model)
    converted = convert(bench.model, recipe)
    model = bench.model_with_loss()
    optimizer = optimizer_for(bench, model)
    forward = loss_function(model, compiled=True)

    def loss_of(batch: Batch) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=weights == "fp32"):
            return forward(batch)

    def update() -> None:
        clip(bench, model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return trial_of(
        bench,
        loss_of=loss_of,
        backward=lambda loss: loss.backward(),
        update=update,
        compiled=True,
        fp8_layers=converted,
    )


def convert(model: nn.Module, recipe: str) -> int:
    """Turn linear layers into torchao's, in place; return how many there are now."""
    float8: Any = importlib.import_module("torchao.float8")
    chosen: list[str] = []

    def is_converted(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or name.rpartition(".")[2] in HEADS:
            return False
        fits = module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0
        chosen.extend([name] if fits else [])
        return fits

    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=is_converted)
    return len(chosen)
