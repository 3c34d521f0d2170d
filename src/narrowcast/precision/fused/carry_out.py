"""Carry out what a plan says of pieces that are computed as one."""

from collections.abc import Set

import torch
from torch import nn

from narrowcast.precision.fused.attention_masks import attend_as_ever, attend_without_mask
from narrowcast.precision.fused.causal_loss import fuse_loss
from narrowcast.precision.fused.elementwise import (
    OnePassGate,
    OnePassGelu,
    OnePassLayerNorm,
    OnePassNorm,
    OnePassTurn,
    forward_turning,
)
from narrowcast.precision.fused.fp8_gated_mlp import Fp8GatedMlp, can_chain
from narrowcast.precision.plan.fusing import requested_pieces
from narrowcast.precision.plan.known_models import causal_models
from narrowcast.precision.plan.known_modules import (
    GatedMlp,
    gelu_approximation,
    match_gated_mlp,
    match_rms_norm,
)
from narrowcast.precision.plan.plan import Plan
from narrowcast.precision.swap import swap

CPU_CHUNK_ROWS = 1024
"""Rows of logits that a CPU holds at once; a GPU knows by itself how many."""


def fuse_pieces(model: nn.Module, plan: Plan) -> None:
    """Let the modules of each fused piece compute it as one."""
    device = torch.device(plan.hardware.device)
    without_masks = any(piece.fused for piece in plan.fused if piece.piece == "mask")
    for piece in plan.fused:
        if piece.piece == "mask" and not piece.fused and without_masks:
            for name in piece.modules:
                attend_as_ever(model.get_submodule(name))
        if piece.fused and piece.piece == "loss":
            _fuse_losses(model, set(piece.modules), device)
        elif piece.fused:
            for name in piece.modules:
                _fuse_module(model.get_submodule(name), piece.piece, plan, device.type)


def _fuse_losses(model: nn.Module, names: Set[str], device: torch.device) -> None:
    chunk_rows = CPU_CHUNK_ROWS if device.type == "cpu" else None
    for result in list(causal_models(model)):
        if result.name in names:
            fuse_loss(model.get_submodule(result.name), result.head, chunk_rows=chunk_rows)


def _fuse_module(module: nn.Module, piece: str, plan: Plan, device: str) -> None:
    where = {"nc_device": device, "nc_compiled": requested_pieces(plan.fuse) is not None}
    widened = plan.policy.params != "fp32"  # a norm in fp32 between 16-bit neighbours
    match piece:
        case "mask":
            attend_without_mask(module)
        case "layer_norm":
            swap(module, OnePassLayerNorm, nc_widened=widened, **where)
        case "gelu":
            swap(module, OnePassGelu, nc_approximation=gelu_approximation(module), **where)
        case "rms_norm":
            swap(module, OnePassNorm, nc_norm=match_rms_norm(module), nc_widened=widened, **where)
        case "swiglu":
            known = match_gated_mlp(module)
            swap(module, OnePassGate, nc_mlp=known, **where)
            if isinstance(known, GatedMlp) and can_chain(module, known):
                swap(module, Fp8GatedMlp, nc_chain=known)
        case _:
            swap(module, OnePassTurn, nc_turning=forward_turning(module, device), **where)
