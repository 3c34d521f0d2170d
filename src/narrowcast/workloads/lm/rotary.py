"""Rotary positions: adjacent pairs of numbers, turned by an angle that grows with the position.

The product of a turned query and a turned key depends on how far apart they are, and on nothing
else about where they stand (Su et al. 2021).
"""

import torch
from torch import Tensor


def rotary_table(length: int, head_width: int, *, base: float) -> Tensor:
    """Return cosine and sine of position · base^(−2i / head_width): (length, 1, i, 2)."""
    # In float64: at position 10,000 an fp32 angle is off by up to 5e-4.
    frequency = base ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angle = torch.arange(length, dtype=torch.float64)[:, None, None] * frequency
    return torch.stack((angle.cos(), angle.sin()), dim=-1).float()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn each pair of `x` by the angle of its position: (batch, length, head, head width).

    In fp32 at least, whatever `x` is. Eager mode multiplies complex numbers, one pass where the
    real form needs several (5 times faster on 2 CPU cores); the compiler knows no complex numbers,
    and makes one pass of the real form.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    pairs, table = x.to(wide).reshape(*x.shape[:-1], -1, 2), table.to(wide)
    if torch.compiler.is_compiling():
        turned = _product(pairs, table)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(table))
    return turned.flatten(-2).to(x.dtype)


def _product(pairs: Tensor, table: Tensor) -> Tensor:
    """Multiply as complex numbers what is given as pairs of real and imaginary part.

    As x · cos + swapped(x) · (−sin, sin): elementwise, so the gradient is one pass too. Stacked
    from its two parts, it was two to three passes' worth of time on a GPU.
    """
    cosine, sine = table.split(1, dim=-1)  # each beside a pair: (length, 1, i, 1)
    signs = torch.tensor([-1.0, 1.0], dtype=table.dtype, device=table.device)
    turned: Tensor = pairs * cosine + pairs.flip(-1) * (sine * signs)
    return turned
