"""Backward passes that are begun inside an emulated region, and go on in sight of its modes.

A mode sees such a call and steps aside for all that happens in it: for passes that activation
checkpointing runs again, and for backward functions that `torch.amp.custom_bwd` puts back into
autocast. The same pass from an edge of the graph, and not from a tensor, goes by it unseen.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

BACKWARD: frozenset[Any] = frozenset(
    {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
)

_Ends = Tensor | GradientEdge | Sequence[Tensor | GradientEdge]


def backward_under(
    mode: TorchFunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Do what one of the functions of `BACKWARD` does, with a mode in force inside."""
    if func is torch.autograd.grad:
        return _grad(mode, *args, **kwargs)
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    settings = dict(zip(names, args[1:], strict=False)) | kwargs  # by name, of a function
    loss = args[0] if args else settings.pop("tensors")
    edges = _from_edges(loss, settings.pop("grad_tensors", settings.pop("gradient", None)))
    inputs = settings.pop("inputs", None)
    inputs = () if inputs is None else _several(inputs)
    ends = _edges(inputs)
    # What no graph ends in has its `grad` set by torch itself, and only where a tensor was given.
    leaves = all(isinstance(end, GradientEdge) or end.is_leaf for end in inputs)
    if edges is None or ends is None or not leaves:
        return func(*args, **kwargs)
    with mode:
        return torch.autograd.backward(*edges, inputs=ends or None, **settings)


def _grad(
    mode: TorchFunctionMode,
    outputs: _Ends,
    inputs: _Ends,
    grad_outputs: Any = None,
    **settings: Any,
) -> Any:
    edges, ends = _from_edges(outputs, grad_outputs), _edges(_several(inputs))
    by_tensor = settings.get("materialize_grads") or settings.get("is_grads_batched")
    if edges is None or ends is None or by_tensor:
        return torch.autograd.grad(outputs, inputs, grad_outputs, **settings)  # type: ignore[arg-type]
    with mode:
        return torch.autograd.grad(edges[0], ends, edges[1], **settings)


def _from_edges(
    outputs: _Ends, gradients: Any
) -> tuple[tuple[GradientEdge, ...], tuple[Any, ...]] | None:
    """Return where a pass begins, with what; None where torch would refuse it."""
    several = _several(outputs)
    edges = _edges(several)
    inputs = (None,) * len(several) if gradients is None else _several(gradients)
    if edges is None or len(inputs) != len(several):
        return None
    filled = []
    for end, gradient in zip(several, inputs, strict=True):
        if gradient is None:
            if not isinstance(end, Tensor) or end.numel() != 1:
                return None
            gradient = torch.ones_like(end, memory_format=torch.preserve_format)
        filled.append(gradient)
    return edges, tuple(filled)


def _edges(ends: tuple[Any, ...]) -> tuple[GradientEdge, ...] | None:
    if not all(isinstance(end, GradientEdge) or _has_edge(end) for end in ends):
        return None
    return tuple(e if isinstance(e, GradientEdge) else get_gradient_edge(e) for e in ends)


def _has_edge(tensor: Tensor) -> bool:
    """Say so but of tensors inside `torch.func`, and of what has no gradients."""
    return tensor.requires_grad and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _several(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Tensor | GradientEdge):
        return (value,)
    return tuple(value)
