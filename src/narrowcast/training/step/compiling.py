"""torch.compile per block, so that the compiler sees one of many identical blocks once.

A GPT of 24 blocks compiles in the time of one. What is between the blocks (the embedding, the fused
loss) keeps its own kernels.
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
"""Versions of a block that the compiler keeps before it silently runs the rest uncompiled. Its
default of 8 is too few: every policy of a run needs three, to evaluate and to train, and so does
every kind of block with an override."""


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
