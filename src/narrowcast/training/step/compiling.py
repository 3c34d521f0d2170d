"""torch.compile, a block at a time: the compiler sees one of many blocks that are alike, once.

A GPT of 24 blocks is compiled in the time of one, and what lies between the blocks (the embedding,
the fused loss) runs its own kernels as they are.
"""

from typing import Any

import torch
from torch import nn

from narrowcast.config.sections import Recipe
from narrowcast.errors import UnsupportedError
from narrowcast.precision.plan.memory import repeated_blocks
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.products.emulated import TRACED_RIGHTLY

VERSIONS = 64
"""Versions of a block that the compiler keeps before it runs the rest uncompiled, without a word.
Its own 8 are for code that changes by mistake; every policy of a run needs three, to evaluate and
to train, and so does every kind of block with an exception."""


def compiled(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Let a model's blocks, or all of it where it has none, run compiled if the recipe asks for it.

    In place: the model, its names and its weights stay what they are.
    """
    if recipe.compile:
        import torch._dynamo  # two seconds, and most runs are not compiled

        limits: Any = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, VERSIONS)
        for block in [block for _, block in repeated_blocks(model)] or [model]:
            block.compile()
    return model


def check_traceable(plan: Plan, recipe: Recipe) -> None:
    """Refuse to compile what would lose gradients with this torch, or keep less than was asked."""
    emulated = plan.emulated or any(module.how == "emulated" for module in plan.modules)
    if recipe.compile and emulated and not TRACED_RIGHTLY:
        raise UnsupportedError(
            f"compile=true: the compiler of torch {torch.__version__} loses the gradients of "
            "emulated products; write compile=false, use torch 2.13, or a policy that this machine "
            "multiplies natively"
        )
    if recipe.compile and plan.memory.requested.activation_checkpointing == "selective":
        raise UnsupportedError(
            "compile=true: memory.activation_checkpointing=selective keeps the results of single "
            "products, which "
            "a compiled block does not show; write memory.activation_checkpointing=blocks, or "
            "compile=false"
        )
