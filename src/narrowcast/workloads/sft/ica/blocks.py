"""The blocks of a language model and their MLPs, recognised by structure, not by name."""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from narrowcast.errors import UnsupportedError
from narrowcast.precision.quantized_frozen import QuantizedFrozenLayer
from narrowcast.training.evaluation import in_eval_mode
from narrowcast.workloads.sft.ica.networks import Site, check_type

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@final
@dataclass(frozen=True, kw_only=True)
class Projection:
    """A linear layer: torch's, GPT-2's Conv1D, or one with an adapter."""

    module: nn.Module
    plain: nn.Module
    """The module that has the weight, inside any adapter."""
    inputs: int
    outputs: int
    turned: bool
    """Whether the weight is (inputs, outputs), as in Conv1D."""


@final
@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of the model."""

    mlp: nn.Module
    ups: tuple[Projection, ...]
    """Up and gate, which may be one projection of twice the width."""
    down: Projection
    adds_residual: bool = False
    """Whether the MLP adds the residual stream, as in Bloom and MPT."""

    @property
    def output(self) -> nn.Module:
        """The module whose output is that of the MLP without the residual."""
        return self.down.module if self.adds_residual else self.mlp


@final
@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The blocks of a model."""

    name: str
    blocks: tuple[Block, ...]

    @property
    def depth(self) -> int:
        return len(self.blocks)

    def width(self, site: Site) -> int:
        """Return the number of channels per layer."""
        down = self.blocks[0].down
        return down.outputs if site == "mlp_output" else down.inputs


def find_blocks(model: nn.Module) -> Blocks:
    """Return the blocks of a model, or raise."""
    check_type("model", model, nn.Module, "a torch.nn.Module")
    matches: list[Blocks] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module):
            blocks = [_block(each) for each in module]
            whole = [each for each in blocks if each is not None]
            shapes = {(each.down.inputs, each.down.outputs) for each in whole}
            if len(whole) == len(blocks) and len(shapes) == 1:
                matches.append(Blocks(name=name, blocks=tuple(whole)))
    if len(matches) == 1:
        return _tried(matches[0])
    # For a model with adapters, the class of the base.
    base = getattr(model, "get_base_model", None)
    kind = type(base() if callable(base) else model).__name__
    if matches:
        names = " and ".join(each.name for each in matches)
        raise UnsupportedError(
            f"{kind} has {len(matches)} lists of blocks: {names}. Pass one part of the model, such "
            "as its decoder."
        )
    raise UnsupportedError(
        f"{kind} has no list of blocks with one MLP each. Each item of an nn.ModuleList must have "
        "a child, besides attention, that maps the model's width to another width and back "
        "(mixtures of experts have several). Use a GPT-2, Llama, Mistral, Qwen, NeoX or SmolLM "
        "model, or one with the same structure."
    )


def _tried(blocks: Blocks) -> Blocks:
    """Detect whether the MLPs add a residual."""
    adding: dict[type, bool] = {}
    for block in blocks.blocks:
        kind = type(block.mlp)
        if kind not in adding:
            adding[kind] = _adds_residual(block)
    tried = [replace(each, adds_residual=adding[type(each.mlp)]) for each in blocks.blocks]
    return replace(blocks, blocks=tuple(tried))


@torch.no_grad()
def _adds_residual(block: Block) -> bool:
    """Call an MLP with constant projections and zero down projection; no matmul runs."""
    parameters = inspect.signature(block.mlp.forward).parameters.values()
    required = [p for p in parameters if p.kind in _POSITIONAL and p.default is p.empty]
    token = _like_parameters_between(block).new_full((1, 1, block.down.outputs), 0.5)
    called: list[Projection] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(in_eval_mode(block.mlp))  # dropout would draw random numbers
        for each in (*block.ups, block.down):
            constant = token.new_full((1, 1, each.outputs), 0.0 if each is block.down else 0.5)
            stack.enter_context(_replaced(each, constant, called))
        try:
            output = block.mlp(*[token for _ in required])
        except Exception as error:  # the model's own code
            raise UnsupportedError(
                f"{type(block.mlp).__name__} cannot be called with hidden states alone: {error}. "
                "Use a model whose MLPs take hidden states, or hidden states and the residual."
            ) from error
    if not isinstance(output, Tensor) or output.shape != token.shape or block.down not in called:
        raise UnsupportedError(
            f"{type(block.mlp).__name__} does not return one tensor computed by its down "
            "projection. Use a model whose MLPs call their down projection and return hidden "
            "states."
        )
    return not output.is_meta and bool(output.any())


def _like_parameters_between(block: Block) -> Tensor:
    """Return a parameter of the MLP outside its projections, else a CPU tensor."""
    projections = {p for each in (*block.ups, block.down) for p in each.module.parameters()}
    between = (p for p in block.mlp.parameters() if p not in projections and p.is_floating_point())
    return next(between, torch.empty(0, device="cpu"))


@contextlib.contextmanager
def _replaced(projection: Projection, constant: Tensor, called: list[Projection]) -> Iterator[None]:
    """Make a projection return a constant inside the block."""
    module = projection.module

    def forward(*_args: Any, **_more: Any) -> Tensor:
        called.append(projection)
        return constant

    own = module.__dict__.get("forward")  # accelerate puts one on the instance
    # Fused MLPs call their layers only if these have hooks.
    handle = module.register_forward_hook(lambda _module, _args, _output: None)
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        handle.remove()
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own


def as_projection(module: nn.Module) -> Projection | None:
    """Return a module as a projection, or None."""
    plain = module
    while isinstance(inner := plain._modules.get("base_layer"), nn.Module):
        plain = inner
    if isinstance(plain, nn.Linear):
        # Quantized weights have other shapes.
        inputs, outputs = plain.in_features, plain.out_features
        return Projection(module=module, plain=plain, inputs=inputs, outputs=outputs, turned=False)
    shape = _shape_turned(plain)
    # `nf` is the number of outputs of transformers' Conv1D.
    if shape is None or cast(Any, plain).__dict__.get("nf") != shape[1]:
        return None
    return Projection(module=module, plain=plain, inputs=shape[0], outputs=shape[1], turned=True)


def _shape_turned(module: nn.Module) -> tuple[int, int] | None:
    """Return inputs and outputs of a layer whose weight is (inputs, outputs)."""
    if isinstance(module, QuantizedFrozenLayer):
        outputs, inputs = module.weight_e4m3.shape
        return inputs, outputs
    weight = module._parameters.get("weight")
    return (weight.shape[0], weight.shape[1]) if weight is not None and weight.dim() == 2 else None


def iter_adapters(projection: Projection) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield name, A (rank, inputs) and B (outputs, rank) of each LoRA adapter."""
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
    """Return a module as the MLP of a block, or None."""
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
