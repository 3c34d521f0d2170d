"""A masked site as one product, without ever forming what components leave of the weight.

By definition the output is ((x V) m) U + d x (W - (V U)^T)^T + b, for masks m and d of components
and of what they leave. Since x (V U) is (x V) U, that is

    y = [ (x V) (m - d) | d x ] [ U ; W^T ] + b

exactly: one product of inner size C + d_in, summed in fp32 inside it, and so not as the difference
of two rounded results. A row that is not routed has 0 for the first part and d = 1, and is the
target's.
"""

import torch
from torch import Tensor

from narrowcast.workloads.decompose.components.fused import fused_output, is_fused
from narrowcast.workloads.decompose.components.mask import Draw, SiteMask, Source
from narrowcast.workloads.decompose.components.products import added_product, product


def masked_output(
    x: Tensor,
    V: Tensor,
    U: Tensor,
    weight_t: Tensor,
    bias: Tensor | None,
    mask: SiteMask,
    *,
    seed: Tensor | None = None,
    stream: int = 0,
) -> Tensor:
    """Return (seeds, rows, d_out) of `x`, (seeds, rows, d_in), with components as the mask says.

    `V` is (seeds, d_in, C), `U` (seeds, C, d_out), `weight_t` (seeds or 1, d_in, d_out), and `bias`
    (seeds or 1, d_out). Gradients go to x, V, U and the mask's tensors.
    Sites that are given one `seed` for their draws are given a `stream` each.
    """
    dtype = computed_in(V)
    # Under autocast an output is of its format, as of any product; else as the target's was.
    result_dtype = dtype if torch.is_autocast_enabled(x.device.type) else x.dtype
    x = x.to(dtype)
    if is_fused(x, mask):
        out = fused_output(x, V, U, weight_t, bias, mask, seed=seed, stream=stream)
        return out.to(result_dtype)
    stored, left = shares(mask)
    operand = (product(x, V.to(dtype)) * stored).to(dtype)
    stack = U.to(dtype)
    if left is not None:
        operand = torch.cat([operand, (left.unsqueeze(-1) * x).to(dtype)], -1)
        stack = torch.cat([stack, weight_t.expand(U.shape[0], -1, -1).to(dtype)], 1)
    lines = None if bias is None else bias.unsqueeze(1)
    return added_product(lines, operand, stack).to(result_dtype)


def masked_embedding(
    tokens: Tensor,
    V: Tensor,
    U: Tensor,
    weight: Tensor,
    mask: SiteMask,
) -> Tensor:
    """Return the like for tokens, (seeds, rows), whose lines of `V` and `weight` are looked up."""
    saved, left = shares(mask)
    result = product(looked_up(V, tokens) * saved, U)
    if left is not None:
        result = result + left.unsqueeze(-1) * looked_up(weight[None], tokens)
    return result.to(weight.dtype)


def activations(x: Tensor, V: Tensor) -> Tensor:
    """Return what components read from `x`: (seeds, rows, C)."""
    dtype = computed_in(V)
    return product(x.to(dtype), V.to(dtype))


def computed_in(V: Tensor) -> torch.dtype:
    """Return the format of products with `V`: that of autocast, or its own."""
    kind = V.device.type
    if V.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return V.dtype
    return torch.get_autocast_dtype(kind)


def looked_up(table: Tensor, tokens: Tensor) -> Tensor:
    """Return the lines of a table, (seeds or 1, tokens, width), for tokens of (seeds, rows)."""
    if table.shape[0] == 1:
        return table[0][tokens]
    seeds = torch.arange(table.shape[0], device=table.device)[:, None]
    return table[seeds, tokens]


def shares(mask: SiteMask) -> tuple[Tensor, Tensor | None]:
    """Return m - d, (seeds, rows, C), and d, (seeds, rows) or None where it is nowhere but 0."""
    importance = mask.importance
    source = _numbers(mask.source, importance)
    stored = importance + (1 - importance) * source
    rows = importance[..., 0]
    left = None if mask.delta is None or _is_zero(mask.delta) else _numbers(mask.delta, rows)
    if isinstance(left, float):
        left = torch.full_like(rows, left)
    if left is not None:
        stored = stored - left.unsqueeze(-1)
    if mask.routed is not None:
        stored = stored.masked_fill(~mask.routed.unsqueeze(-1), 0.0)
        none = torch.zeros_like(rows) if left is None else left
        left = none.masked_fill(~mask.routed, 1.0)
    return stored, left


def _is_zero(delta: Source) -> bool:
    return isinstance(delta, float) and delta == 0.0


def _numbers(source: Source, like: Tensor) -> Tensor | float:
    if not isinstance(source, Draw):
        return source
    drawn = torch.rand_like(like)
    return drawn if source.kind == "continuous" else drawn.round()
