"""The cross-entropy of a linear layer's output, on a GPU without ever holding that output.

A layer that makes its products itself is called per chunk of rows, with its backward pass at once.
What it does once per call, such as finding a scale, it does per chunk.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.kernels.launch import unsupported_reason
from narrowcast.precision.fused.chunked_pass import (
    LossTerms,
    check_first_derivative_only,
    chunked_loss,
    even_chunks,
    grad_dtypes,
    reduced,
    scaled,
)
from narrowcast.precision.products.autocast import active_region
from narrowcast.precision.products.regions import InRegion, Region, RegionEntry
from narrowcast.precision.swap import Probe, is_watched, working_class


def chunked_module_loss(
    hidden: Tensor, head: nn.Linear, targets: Tensor, *, terms: LossTerms
) -> Tensor:
    """Return the loss of (rows, width) states, with what `head` computes of each chunk.

    The head's logits are bf16 or fp32: there is no lift for fp16.
    """
    grads = torch.is_grad_enabled()
    tensors = (hidden, head.weight, head.bias)
    needs = tuple(grads and t is not None and t.requires_grad for t in tensors)
    if any(needs):
        assert terms.reduction != "none"
        loss: Tensor = _apply(*tensors, targets, head, terms, needs)
        return loss
    losses = []
    for part in _parts(hidden, head, terms):
        losses.append(_row_losses(head(hidden[part]), targets[part], terms, gradient=False))
    return reduced(torch.cat(losses), targets, terms)


def _parts(hidden: Tensor, head: nn.Linear, terms: LossTerms) -> list[slice]:
    rows = len(hidden)
    chunk = terms.chunk_rows or even_chunks(rows, head.out_features, torch.bfloat16)
    return [slice(first, min(first + chunk, rows)) for first in range(0, rows, chunk)]


def _row_losses(logits: Tensor, targets: Tensor, terms: LossTerms, *, gradient: bool) -> Tensor:
    from narrowcast.kernels.cross_entropy import cross_entropy_

    return cross_entropy_(
        logits,
        targets,
        ignore_index=terms.ignore_index,
        label_smoothing=terms.label_smoothing,
        z_loss=terms.z_loss,
        gradient=gradient,
    )


class _ModuleLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: nn.Linear,
        terms: LossTerms,
        needs: tuple[bool, ...],
    ) -> Tensor:
        losses, total = [], _Gradients(hidden, weight, bias, needs)
        for part in _parts(hidden, head, terms):
            x = hidden[part].detach().requires_grad_(needs[0])
            # Hooks of activation checkpointing would run all of this again to go back through it.
            with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
                logits = head(x)
            # The same memory, uncounted: a product keeps its operands, not its result.
            grad = logits.data
            losses.append(_row_losses(grad, targets[part], terms, gradient=True))
            total.add(part, logits, x, grad)
            del logits, grad  # before the next chunk's
        divisor = torch.ones_like(losses[0][0])
        if terms.reduction == "mean":
            divisor = divisor * (targets != terms.ignore_index).sum().clamp(min=1)
        ctx.save_for_backward(*total.sums, divisor)
        ctx.dtypes, ctx.needs = total.dtypes, needs
        return reduced(torch.cat(losses), targets, terms)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative_only()
        *grads, divisor = ctx.saved_tensors
        return (*scaled(grads, grad_output.float() / divisor, ctx), None, None, None, None)


_apply: Any = _ModuleLoss.apply


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _Gradients:
    """The gradients of the summed loss, in fp32, as chunks come in."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, ...]
    ) -> None:
        self._needs, self._parameters = needs, (weight, bias)
        self.sums = [
            hidden.new_empty(t.shape if needed and t is not None else 0, dtype=torch.float32)
            for t, needed in zip((hidden, weight, bias), needs, strict=True)
        ]
        self.dtypes = grad_dtypes(hidden, weight, bias)

    def add(self, part: slice, logits: Tensor, x: Tensor, grad: Tensor) -> None:
        """Go back through one chunk."""
        tensors = zip((x, *self._parameters), self._needs, strict=True)
        inputs = [t for t, needed in tensors if needed and t is not None]
        result = iter(torch.autograd.grad(logits, inputs, grad))
        if self._needs[0]:
            self.sums[0][part] = next(result)
        for total, needed in zip(self.sums[1:], self._needs[1:], strict=True):
            if needed:
                fresh = next(result)
                total.copy_(fresh) if part.start == 0 else total.add_(fresh)


_HAS_TRITON = not unsupported_reason(torch.device("cuda"))


def linear_cross_entropy(
    hidden: Tensor,
    head: nn.Linear,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    chunk_rows: int | None = None,
) -> Tensor:
    """Return the cross-entropy of `head(hidden)` against `targets` in fp32, without storing logits.

    On a GPU at most one chunk of the logits is in memory. On a CPU chunks are used only if
    `chunk_rows` is set. Products have the formats that `head(hidden)` would have. An emulated head,
    or one with hooks, is called once with all rows.

    Args:
        hidden: Hidden states, the input of the head.
        head: The output layer.
        targets: Class indices, int64, one per row of `hidden`.
        ignore_index: Rows with this target do not count.
        label_smoothing: Label smoothing, from 0 to 1.
        z_loss: Weight of the squared log-sum-exp that is added to each row's loss.
        reduction: "mean", "sum", or "none" for one loss per target. With "none" the backward pass
            recomputes the logits.
        chunk_rows: Rows per chunk. None: chosen automatically.

    Returns:
        The loss. A target outside the classes gives NaN with chunks and raises without.

    Raises:
        ConfigError: A shape, dtype or setting is invalid.
        UnsupportedError: `chunk_rows` is set and Triton is not installed.

    Example:
        >>> loss = nc.linear_cross_entropy(model.body(tokens), model.lm_head, targets)
    """
    terms = LossTerms(ignore_index, label_smoothing, z_loss, reduction, chunk_rows)
    _check_arguments(hidden, head, targets, terms)
    requested = chunk_rows is not None or (hidden.device.type == "cuda" and _HAS_TRITON)
    if hidden.numel() == 0 or not requested:
        return _composed(hidden, head, targets, terms)
    region, plain = _region_entered_by(head), working_class(head) is nn.Linear
    if region is None:
        return _here(hidden, head, targets, terms, plain=plain)
    if region.emulated or region.reduce != "fp32" or not plain:
        return _here(hidden, head, targets, terms, plain=False)
    if region.is_plain:
        hidden = hidden.float()
    with region():
        return _here(hidden, head, targets, terms, plain=True)


def plain_operand_dtype(hidden: Tensor, head: nn.Linear) -> torch.dtype | None:
    """Return the dtype in which `head(hidden)` multiplies here, if it is one plain product."""
    plain = working_class(head) is nn.Linear and _region_entered_by(head) is None
    return _operand_dtype(hidden, head) if plain else None


def _check_arguments(hidden: Tensor, head: nn.Linear, targets: Tensor, terms: LossTerms) -> None:
    if hidden.shape[:-1] != targets.shape or targets.dtype != torch.int64:
        raise ConfigError(
            f"targets must be torch.int64 of shape {tuple(hidden.shape[:-1])}, got "
            f"{targets.dtype} of shape {tuple(targets.shape)} for hidden states of shape "
            f"{tuple(hidden.shape)}."
        )
    if hidden.shape[-1] != head.in_features:
        raise ConfigError(
            f"hidden states must have the width of the head, {head.in_features}, got "
            f"{hidden.shape[-1]}. Pass the output of the layer before the head."
        )
    if not 0.0 <= terms.label_smoothing <= 1.0:
        raise ConfigError(f"label_smoothing must be between 0 and 1, got {terms.label_smoothing}.")
    if terms.reduction not in ("mean", "sum", "none"):
        raise ConfigError(f'reduction must be "mean", "sum" or "none", got {terms.reduction!r}.')
    if terms.chunk_rows is not None and terms.chunk_rows < 1:
        raise ConfigError(
            f"chunk_rows must be at least 1, got {terms.chunk_rows}. Leave it out to choose it "
            "automatically."
        )
    if terms.chunk_rows is not None and not _HAS_TRITON:
        raise UnsupportedError(
            f"chunk_rows={terms.chunk_rows} needs Triton, which is not installed. Install triton, "
            "or leave chunk_rows out."
        )


def _composed(hidden: Tensor, head: nn.Linear, targets: Tensor, terms: LossTerms) -> Tensor:
    """Compute all logits and torch's loss: the reference for this module."""
    logits = head(hidden).reshape(-1, head.out_features)  # (rows, columns)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    flat = targets.flatten()
    loss = F.cross_entropy(
        wide,
        flat,
        ignore_index=terms.ignore_index,
        label_smoothing=terms.label_smoothing,
        reduction=terms.reduction,
    )
    if terms.z_loss:
        stored = flat != terms.ignore_index
        squares = torch.logsumexp(wide, -1).square().where(stored, 0.0) * terms.z_loss
        loss = loss + reduced(squares, flat, terms)
    return loss.view(targets.shape) if terms.reduction == "none" else loss


def _region_entered_by(head: nn.Linear) -> Region | None:
    """Return the region that a head would enter here; None if it is active or there is none."""
    entry = head.nc_entry if isinstance(head, InRegion) else None
    if (
        not isinstance(entry, RegionEntry)
        or entry.name == active_region()
        or entry.is_autocast_disabled
    ):
        return None
    return entry.region


def _here(
    hidden: Tensor, head: nn.Linear, targets: Tensor, terms: LossTerms, *, plain: bool
) -> Tensor:
    """Take chunks if what the head computes here is known, and call it if not."""
    rows, flat = hidden.reshape(-1, head.in_features), targets.flatten()
    dtype = _operand_dtype(hidden, head) if plain else None
    if dtype is not None:
        if isinstance(head, Probe):
            head.nc_sees(rows)
        loss = chunked_loss(rows, head.weight, head.bias, flat, terms=terms, dtype=dtype)
    elif not plain and _is_fp8(head, terms):
        loss = chunked_module_loss(rows, head, flat, terms=terms)
    else:
        return _composed(hidden, head, targets, terms)
    return loss.view(targets.shape) if terms.reduction == "none" else loss


def _is_fp8(head: nn.Linear, terms: LossTerms) -> bool:
    """Return whether a head multiplies in fp8 on this device, and can be called for each chunk."""
    if torch.compiler.is_compiling() or _is_emulated() or is_watched(head):
        return False  # the compiler cannot trace a backward pass inside a forward pass
    from narrowcast.precision.fp8.linear import Fp8Linear

    if not isinstance(head, Fp8Linear) or head.nc_formats.output.dtype == torch.float16:
        return False
    return terms.reduction != "none" or not torch.is_grad_enabled()


def _operand_dtype(hidden: Tensor, head: nn.Linear) -> torch.dtype | None:
    """Return the format in which a plain linear layer multiplies here, if we can do the same."""
    tensors = [t for t in (hidden, head.weight, head.bias) if t is not None]
    if is_watched(head) or any(is_traceable_wrapper_subclass(t) for t in tensors) or _is_emulated():
        return None
    dtypes = {t.dtype for t in tensors}
    if not dtypes <= {torch.float32, torch.bfloat16, torch.float16}:
        return None
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype if len(dtypes) == 1 else None


def _is_emulated() -> bool:
    """Return whether a function mode other than a device mode would see a product here."""
    modes = torch.overrides._get_current_function_mode_stack()
    return any(
        type(mode) is not DeviceContext and not getattr(mode, "nc_transparent", False)
        for mode in modes
    )
