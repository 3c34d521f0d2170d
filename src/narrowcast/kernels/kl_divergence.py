"""The KL divergence between rows of logits in fp32, and its gradient, in one launch each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.launch import launch_kernel

BLOCK = 8192
"""Pairs of logits a program holds at once: 16 for each of 512 threads."""


def kl_rows(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(softmax(target) || softmax(output)) of each row, and what its gradient needs.

    `output` is (groups, copies, rows, columns), `target` (groups, rows, columns), both contiguous.
    The results are fp32, (groups, copies, rows) and (2, groups, copies, rows).
    """
    groups, copies, rows, columns = output.shape
    assert output.is_contiguous()
    assert target.is_contiguous()
    assert target.shape == (groups, rows, columns)
    losses = torch.empty(groups, copies, rows, dtype=torch.float32, device=output.device)
    wholes = torch.empty(2, groups, copies, rows, dtype=torch.float32, device=output.device)
    block, warps = _launch(columns)
    launch_kernel(
        _rows_kernel,
        (losses.numel(),),
        output,
        target,
        losses,
        wholes,
        wholes[1],
        copies * rows,
        rows,
        COLUMNS=columns,
        BLOCK=block,
        num_warps=warps,
    )
    return losses, wholes


def kl_rows_grad(output: Tensor, target: Tensor, wholes: Tensor, factors: Tensor) -> Tensor:
    """Return the gradient of the sum of rows' divergences, each group's times its fp32 factor."""
    groups, copies, rows, columns = output.shape
    assert factors.shape == (groups,)
    grad = torch.empty_like(output)
    block, warps = _launch(columns)
    launch_kernel(
        _grad_kernel,
        (groups * copies * rows,),
        output,
        target,
        wholes,
        wholes[1],
        factors.contiguous(),
        grad,
        copies * rows,
        rows,
        COLUMNS=columns,
        BLOCK=block,
        num_warps=warps,
    )
    return grad


def _launch(columns: int) -> tuple[int, int]:
    """Return how many columns a program takes at once, and how many warps."""
    block = min(triton.next_power_of_2(columns), BLOCK)
    return block, max(1, min(16, block // 512))


@triton.jit
def _rows_kernel(
    output,
    target,
    losses,
    made_wholes,
    known_wholes,
    group_rows,
    rows,
    COLUMNS: tl.constexpr,  # a model has one vocabulary
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # rows · columns may pass 2³¹
    made_row = output + row * COLUMNS
    known_row = target + (row // group_rows * rows + row % rows) * COLUMNS
    lanes = tl.arange(0, BLOCK)
    made_top, known_top = float("-inf"), float("-inf")
    made_sum, known_sum = 0.0, 0.0
    separate = 0.0  # the differences, weighed by the target's exponentials
    for first in range(0, COLUMNS, BLOCK):
        at = first + lanes
        inside = at < COLUMNS
        made = tl.load(made_row + at, mask=inside, other=float("-inf")).to(tl.float32)
        known = tl.load(known_row + at, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(made_top, tl.max(made, 0))
        made_sum = made_sum * tl.exp(made_top - higher) + tl.sum(tl.exp(made - higher), 0)
        made_top = higher
        higher = tl.maximum(known_top, tl.max(known, 0))
        shrunk, weights = tl.exp(known_top - higher), tl.exp(known - higher)
        known_sum = known_sum * shrunk + tl.sum(weights, 0)
        further = tl.where(inside, known, 0.0) - tl.where(inside, made, 0.0)
        separate = separate * shrunk + tl.sum(weights * further, 0)
        known_top = higher
    made_log, known_log = tl.log(made_sum), tl.log(known_sum)
    # Differences first: what two like distributions have in common cancels exactly.
    tl.store(losses + row, separate / known_sum - (known_top - made_top) - (known_log - made_log))
    tl.store(made_wholes + row, made_top + made_log)
    tl.store(known_wholes + row, known_top + known_log)


@triton.jit
def _grad_kernel(
    output,
    target,
    made_wholes,
    known_wholes,
    factors,
    grad,
    group_rows,
    rows,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = row // group_rows
    known_row = target + (group * rows + row % rows) * COLUMNS
    made_whole, known_whole = tl.load(made_wholes + row), tl.load(known_wholes + row)
    factor = tl.load(factors + group)
    lanes = tl.arange(0, BLOCK)
    for first in range(0, COLUMNS, BLOCK):
        at = first + lanes
        inside = at < COLUMNS
        made = tl.load(output + row * COLUMNS + at, mask=inside).to(tl.float32)
        known = tl.load(known_row + at, mask=inside).to(tl.float32)
        slope = factor * (tl.exp(made - made_whole) - tl.exp(known - known_whole))
        tl.store(grad + row * COLUMNS + at, slope.to(grad.dtype.element_ty), mask=inside)
