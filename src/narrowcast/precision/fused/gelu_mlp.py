"""Two 16-bit linear layers and the GELU between them, whose output is recomputed, not kept."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from narrowcast.kernels.launch import unsupported_reason
from narrowcast.precision.swap import Mixin, fused_mlp_layers, is_watched


class GeluMlp(Mixin):
    """A module of two linear layers and a GELU, run as one."""

    nc_layers: tuple[str, str]
    """The names of its two linear layers."""
    nc_dtype: torch.dtype
    """What they multiply in."""

    def forward(self, x: Tensor) -> Tensor:
        """Return down(gelu(up(x))), multiplied in 16 bits."""
        first, last = (getattr(self, name) for name in self.nc_layers)
        if is_watched(first, last):
            plain: Tensor = super().forward(x)  # a hook needs the tensor between them
            return plain
        inputs = (x, first.weight, first.bias, last.weight, last.bias)
        result: Tensor = _apply(*(None if t is None else t.to(self.nc_dtype) for t in inputs))
        return result


def can_fuse(module: nn.Module, *, device: torch.device) -> bool:
    """Return whether a module promises a chain of plain linear layers, on a device with kernels."""
    ends = fused_mlp_layers(module)
    if ends is None or device.type != "cuda" or unsupported_reason(device):
        return False
    return all(type(getattr(module, name, None)) is nn.Linear for name in ends)


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        first: Tensor,
        first_bias: Tensor | None,
        last: Tensor,
        last_bias: Tensor | None,
    ) -> Tensor:
        from narrowcast.kernels.gelu import gelu

        wide = F.linear(x, first, first_bias)
        ctx.save_for_backward(x, wide, first, last)
        return F.linear(gelu(wide), last, last_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from narrowcast.kernels.gelu import gelu_back

        x, wide, first, last = ctx.saved_tensors
        needs_x, needs_first, needs_bias, needs_last, needs_last_bias = ctx.needs_input_grad
        grad_x = grad_first = grad_bias = grad_last = grad_last_bias = None
        through, between = gelu_back(grad @ last, wide)
        rows, rows_through = grad.flatten(0, -2), through.flatten(0, -2)
        if needs_last:
            grad_last = rows.t() @ between.flatten(0, -2)
        if needs_last_bias:
            grad_last_bias = rows.sum(0)  # torch adds up in fp32
        if needs_x:
            grad_x = through @ first
        if needs_first:
            grad_first = rows_through.t() @ x.flatten(0, -2)
        if needs_bias:
            grad_bias = rows_through.sum(0)
        return grad_x, grad_first, grad_bias, grad_last, grad_last_bias


_apply: Any = _Chain.apply
