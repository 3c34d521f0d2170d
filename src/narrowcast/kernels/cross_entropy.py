"""The cross-entropy of rows of logits, and its gradient written over them, in one launch.

Each program reads its row twice; the second read comes from the L2 cache. The arithmetic is fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.launch import launch_kernel, unsupported_reason

BLOCK = 16384
"""Logits a program holds at once: 16 for each of 1024 threads, two 16-byte loads of 16-bit ones."""


def cross_entropy_(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    gradient: bool,
    lift: float = 1.0,
    factors: Tensor | None = None,
    statistics: Tensor | None = None,
) -> Tensor:
    """Return each row's loss in fp32; for a gradient, overwrite `logits` (rows, columns) with it.

    An ignored row has loss and gradient zero. A target out of range gives NaN, which shows the
    mistake without a synchronisation. `lift` is a power of two. `statistics` (2, rows) in fp32 gets
    the entropy of each row, and 1 where the target is the first of the largest logits.
    """
    if unsupported_reason(logits.device):
        return cross_entropy_twin_(
            logits,
            targets,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            gradient=gradient,
            lift=lift,
            factors=factors,
            statistics=statistics,
        )
    assert logits.stride(1) == 1
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(triton.next_power_of_2(columns), BLOCK)
    launch_kernel(
        _rows_kernel,
        (rows,),
        logits,
        targets.contiguous(),
        losses,
        losses if factors is None else factors.contiguous(),
        losses if statistics is None else statistics[0],
        losses if statistics is None else statistics[1],
        logits.stride(0),
        ignore_index,
        label_smoothing,
        z_loss,
        lift,
        GRADIENT=gradient,
        FACTORS=factors is not None,
        SMOOTH=label_smoothing != 0,
        STATISTICS=statistics is not None,
        COLUMNS=columns,
        BLOCK=block,
        num_warps=max(1, min(32, block // 512)),
    )
    return losses


def cross_entropy_twin_(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    gradient: bool,
    lift: float = 1.0,
    factors: Tensor | None = None,
    statistics: Tensor | None = None,
) -> Tensor:
    """Do in plain torch what the kernel does; allocates the logits in fp32."""
    columns = logits.shape[1]
    known = (targets >= 0) & (targets < columns)
    nan = torch.full_like(targets, torch.nan, dtype=torch.float32)
    at = targets.where(known, 0)[:, None]
    wide = logits.float()
    largest = wide.amax(1)
    largest = largest.where(largest != -torch.inf, 0.0)  # a row of -inf must not become inf - inf
    below = wide.sub_(largest[:, None]) if wide is not logits else wide - largest[:, None]
    chosen = below.gather(1, at)[:, 0].where(known, nan)
    mean = below.mean(1) if label_smoothing else torch.zeros_like(largest)
    exponentials = below.exp_()
    total = exponentials.sum(1)
    log_total = total.log()
    whole = largest + log_total
    losses = log_total - (1 - label_smoothing) * chosen - label_smoothing * mean
    losses = losses + z_loss * whole * whole
    ignored = targets == ignore_index
    if statistics is not None:
        probabilities = exponentials / total[:, None]
        logs = logits.float() - whole[:, None]
        entropy = -(probabilities * logs.where(probabilities > 0, 0.0)).sum(1)
        statistics[0] = entropy.masked_fill(ignored, 0.0)
        statistics[1] = (logits.argmax(1) == targets) & ~ignored
    if gradient:
        factor = torch.full_like(largest, lift) if factors is None else factors * lift
        factor = factor.where(known, nan)
        grad = exponentials.mul_((factor * (1 + 2 * z_loss * whole) / total)[:, None])
        grad.sub_((factor * (label_smoothing / columns))[:, None])
        grad.scatter_add_(1, at, -(factor * (1 - label_smoothing))[:, None])
        logits.copy_(grad.masked_fill_(ignored[:, None], 0.0))
    return losses.masked_fill(ignored, 0.0)


@triton.jit
def _rows_kernel(
    logits,
    targets,
    losses,
    factors,
    entropies,
    firsts,
    stride,
    ignore_index,
    smoothing,
    z_loss,
    lift,
    GRADIENT: tl.constexpr,
    FACTORS: tl.constexpr,
    SMOOTH: tl.constexpr,
    STATISTICS: tl.constexpr,
    COLUMNS: tl.constexpr,  # a model has one vocabulary
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # rows · columns may pass 2³¹
    start = logits + row * stride
    lanes = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    if target == ignore_index:
        tl.store(losses + row, 0.0)
        if STATISTICS:
            tl.store(entropies + row, 0.0)
            tl.store(firsts + row, 0.0)
        if GRADIENT:
            for first in range(0, COLUMNS, BLOCK):
                at = first + lanes
                zeros = tl.zeros((BLOCK,), dtype=logits.dtype.element_ty)
                tl.store(start + at, zeros, mask=at < COLUMNS)
    else:
        known = (target >= 0) & (target < COLUMNS)
        # Before the loop: its reductions are barriers, and no thread may come to read what
        # another has written over.
        chosen = tl.load(start + target, mask=known, other=float("nan")).to(tl.float32)
        largest = float("-inf")
        shift = 0.0
        total = 0.0
        summed = 0.0
        weighted = 0.0
        earlier = float("-inf")
        for first in range(0, COLUMNS, BLOCK):
            at = first + lanes
            inside = at < COLUMNS
            x = tl.load(
                start + at, mask=inside, other=float("-inf"), eviction_policy="evict_last"
            ).to(tl.float32)
            # A NaN may be passed over here, but not in the sum of exponentials.
            higher = tl.maximum(largest, tl.max(x, 0))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            fading = tl.exp(largest - shift)
            exponentials = tl.exp(x - shift)
            total = total * fading + tl.sum(exponentials, 0)
            if STATISTICS:
                # An infinite logit has probability 0 or NaN.
                finite = tl.where(exponentials == 0.0, 0.0, x)
                weighted = weighted * fading + tl.sum(exponentials * finite, 0)
                before = tl.where(at < target, x, float("-inf"))
                earlier = tl.maximum(earlier, tl.max(before, 0))
            if SMOOTH:
                summed += tl.sum(tl.where(inside, x, 0.0), 0)
            largest = higher
        log_total = tl.log(total)
        whole = shift + log_total
        # Differences from the largest: exact where it matters, for logits of any size.
        loss = log_total - (1.0 - smoothing) * (chosen - shift)
        if SMOOTH:
            loss -= smoothing * (summed / COLUMNS - shift)
        tl.store(losses + row, loss + z_loss * whole * whole)
        if STATISTICS:
            tl.store(entropies + row, whole - weighted / total)
            is_first = (chosen >= largest) & (chosen > earlier)
            tl.store(firsts + row, tl.where(is_first, 1.0, 0.0))
        if GRADIENT:
            factor = tl.where(known, lift, float("nan"))
            if FACTORS:
                factor *= tl.load(factors + row)
            share = factor * (1.0 + 2.0 * z_loss * whole) / total
            even = factor * smoothing / COLUMNS
            hit = factor * (1.0 - smoothing)
            for first in range(0, COLUMNS, BLOCK):
                at = first + lanes
                inside = at < COLUMNS
                x = tl.load(start + at, mask=inside, other=0.0).to(tl.float32)
                grad = tl.exp(x - shift) * share - even - tl.where(at == target, hit, 0.0)
                tl.store(start + at, grad.to(logits.dtype.element_ty), mask=inside)
