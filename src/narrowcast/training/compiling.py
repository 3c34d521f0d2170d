"""torch.compile, a block at a time: the compiler sees one of many blocks that are alike, once.

A GPT of 24 blocks is compiled in the time of one, and what lies between the blocks (the embedding,
the fused loss) runs its own kernels as they are.
"""

from collections.abc import Iterator

from torch import nn

from narrowcast.config.sections import Recipe


def compiled(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Let a model's blocks, or all of it where it has none, run compiled if the recipe asks for it.

    In place: the model, its names and its weights stay what they are.
    """
    if recipe.compile:
        for block in repeated_blocks(model) or [model]:
            block.compile()
    return model


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a model holds a list of, all of one class; the outermost such."""
    return list(_blocks_in(model))


def _blocks_in(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        inside = list(child.children())
        alike = len({type(each) for each in inside}) == 1
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(inside) > 1 and alike:
            yield from inside
        else:
            yield from _blocks_in(child)
