"""Carry out what a plan says of pieces that are computed as one."""

import torch
from torch import nn

from narrowcast.precision.fused.causal_loss import fuse_loss
from narrowcast.precision.plan.causal_loss import causal_models
from narrowcast.precision.plan.plan import Plan

CPU_CHUNK_ROWS = 1024
"""Rows of logits that a CPU holds at once; a GPU knows by itself how many."""


def fuse_pieces(model: nn.Module, plan: Plan) -> None:
    """Let the modules of each fused piece compute it as one."""
    for piece in plan.fused:
        if piece.fused and piece.piece == "loss":
            _fuse_losses(model, set(piece.modules), torch.device(plan.hardware.device))


def _fuse_losses(model: nn.Module, names: set[str], device: torch.device) -> None:
    chunk_rows = CPU_CHUNK_ROWS if device.type == "cpu" else None
    for found in list(causal_models(model)):
        if found.name in names:
            fuse_loss(model.get_submodule(found.name), found.head, chunk_rows=chunk_rows)
