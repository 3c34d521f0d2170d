"""The blocks of a language model and their MLPs, found by what they are made of.

A model is a list of blocks of one class. A block has one child, beside attention, that begins with
a projection from the width of the model and ends with one back to it: the MLP. Names do not matter
(`transformer.h`, `model.layers`, `gpt_neox.layers`), nor what is wrapped around (peft, compile).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast, final

from torch import nn

from narrowcast.errors import UnsupportedError
from narrowcast.precision.kept import KeptLayer
from narrowcast.workloads.sft.ica.networks import Site


@final
@dataclass(frozen=True, kw_only=True)
class Projection:
    """A linear layer: torch's, GPT-2's with its weight turned round, or one with an adapter."""

    module: nn.Module
    """What is called."""
    plain: nn.Module
    """What has the weight: the module, or what an adapter is wrapped around."""
    inputs: int
    outputs: int
    turned: bool
    """Whether the weight is (inputs, outputs), as GPT-2's Conv1D has it."""


@final
@dataclass(frozen=True, kw_only=True)
class Block:
    """One layer of the model, as far as networks are concerned."""

    mlp: nn.Module
    ups: tuple[Projection, ...]
    """Up, and a gate, if there is one; both in one where its outputs are twice as many."""
    down: Projection


@final
@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The layers of a model."""

    name: str
    """Where they are in the model."""
    blocks: tuple[Block, ...]

    @property
    def depth(self) -> int:
        """How many there are."""
        return len(self.blocks)

    def width(self, site: Site) -> int:
        """Return how many channels a layer has."""
        down = self.blocks[0].down
        return down.outputs if site == "mlp_output" else down.inputs


def find_blocks(model: nn.Module) -> Blocks:
    """Return the blocks of a model; a model without a clear answer is refused."""
    found: list[Blocks] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module):
            blocks = [_block(each) for each in module]
            whole = [each for each in blocks if each is not None]
            shapes = {(each.down.inputs, each.down.outputs) for each in whole}
            if len(whole) == len(blocks) and len(shapes) == 1:
                found.append(Blocks(name=name, blocks=tuple(whole)))
    if len(found) == 1:
        return found[0]
    # Of a model with adapters around it, the model's.
    kind = type(cast(Any, model).get_base_model() if _is_adapted(model) else model).__name__
    if found:
        names = " and ".join(each.name for each in found)
        raise UnsupportedError(
            f"{kind} has {len(found)} lists of blocks, {names}; give the part of the model that is "
            "meant, such as its decoder"
        )
    raise UnsupportedError(
        f"{kind} has no list of blocks with one MLP each: looked for an nn.ModuleList whose items "
        "have a child, beside attention, from the model's width to another and back (mixtures of "
        "experts have several); give a GPT-2, Llama, Mistral, Qwen, NeoX or SmolLM model, or one "
        "built like them"
    )


def _is_adapted(model: nn.Module) -> bool:
    return callable(getattr(model, "get_base_model", None))


def as_projection(module: nn.Module) -> Projection | None:
    """Return a module as a projection, if it is one."""
    plain = module
    while isinstance(inner := plain._modules.get("base_layer"), nn.Module):
        plain = inner
    if isinstance(plain, nn.Linear):
        # Weights in fewer bits lie in memory in other shapes.
        inputs, outputs = plain.in_features, plain.out_features
        return Projection(module=module, plain=plain, inputs=inputs, outputs=outputs, turned=False)
    shape = _shape_turned(plain)
    # What transformers' Conv1D calls its outputs.
    if shape is None or cast(Any, plain).__dict__.get("nf") != shape[1]:
        return None
    return Projection(module=module, plain=plain, inputs=shape[0], outputs=shape[1], turned=True)


def _shape_turned(module: nn.Module) -> tuple[int, int] | None:
    """Return the inputs and outputs of a layer whose weight is (inputs, outputs)."""
    if isinstance(module, KeptLayer):
        outputs, inputs = module.weight_e4m3.shape
        return inputs, outputs
    weight = module._parameters.get("weight")
    return (weight.shape[0], weight.shape[1]) if weight is not None and weight.dim() == 2 else None


def adapters_of(projection: Projection) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield the name and both factors, A (rank, inputs) and B (outputs, rank), of each LoRA."""
    firsts = projection.module._modules.get("lora_A")
    seconds = projection.module._modules.get("lora_B")
    if isinstance(firsts, nn.ModuleDict) and isinstance(seconds, nn.ModuleDict):
        for name, second in seconds.items():
            yield name, firsts[name], second


def _block(module: nn.Module) -> Block | None:
    mlps = [
        block
        for name, child in module.named_children()
        if not _is_attention(name, child) and (block := _as_mlp(child)) is not None
    ]
    return mlps[0] if len(mlps) == 1 else None


def _is_attention(name: str, module: nn.Module) -> bool:
    called = f"{name} {type(module).__name__}".lower()
    return "attn" in called or "attention" in called


def _as_mlp(module: nn.Module) -> Block | None:
    """Return a module as the MLP of a block, or none if it is not one."""
    if as_projection(module) is not None or isinstance(module, nn.ModuleList):
        return None
    projections = list(_projections(module))
    if not 2 <= len(projections) <= 3:
        return None  # up and down, and a gate
    *ups, down = projections
    alike = all((up.inputs, up.outputs) == (down.outputs, down.inputs) for up in ups)
    # GPT-NeoX and others may join gate and up in one.
    joined = len(ups) == 1 and (ups[0].inputs, ups[0].outputs) == (down.outputs, 2 * down.inputs)
    return Block(mlp=module, ups=tuple(ups), down=down) if alike or joined else None


def _projections(module: nn.Module) -> Iterator[Projection]:
    for child in module.children():
        projection = as_projection(child)
        if projection is not None:
            yield projection
        else:
            yield from _projections(child)
