"""Modules that say what they do, so that it can be done in one piece.

`fused_mlp = ("up", "gelu", "down")` promises that a module's forward is `down(gelu(up(x)))` with
the exact GELU. A module whose class has `nc_kernels = False` has a faster way of its own, with
kernels for tensors of 16 bits on a GPU, and takes it where this is set to true.
"""

from torch import nn


def fused_mlp_layers(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of the two linear layers of a promised chain; none where there is none."""
    chain: tuple[str, str, str] | None = getattr(type(module), "fused_mlp", None)
    if chain is None or chain[1] != "gelu" or not _keeps_its_promise(module):
        return None
    return chain[0], chain[2]


def is_watched(*layers: nn.Module) -> bool:
    """Say whether somebody wants to see what goes in or out of one of these layers."""
    return any(
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        for layer in layers
    )


def _keeps_its_promise(module: nn.Module) -> bool:
    """Say whether the forward is the one the promise was made for, and not a subclass's own."""
    plain: type[nn.Module] = module.__dict__.get("nc_plain_class", type(module))
    message, done = (
        next(each for each in plain.__mro__ if name in vars(each))
        for name in ("fused_mlp", "forward")
    )
    return issubclass(message, done)
