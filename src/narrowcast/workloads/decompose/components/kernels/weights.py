"""V, and [U ; W^T], as products want them: narrowed and with whole lines, in one launch.

By torch it takes a cast, a padding, zeros and two copies, each a launch, for every site and pass.
"""

import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.launch import launch_kernel

_BLOCK = 1024


def write_weights(out: Tensor, V: Tensor, U: Tensor, weight_t: Tensor | None, padded: int) -> None:
    """Fill each seed's line of `out` with V, (d_in, padded), and then [U ; W^T].

    U has `padded` lines too, and W^T as many as are left; what is beyond either is zero.
    """
    seeds, d_in, count = V.shape
    other = U if weight_t is None else weight_t.expand(seeds, -1, -1)
    size = out.shape[1]
    launch_kernel(
        _write,
        (triton.cdiv(size, _BLOCK), seeds),
        out,
        V,
        U,
        other,
        *V.stride(),
        *U.stride(),
        *other.stride(),
        size,
        d_in,
        count,
        padded,
        U.shape[2],
        STACKED=weight_t is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit
def _write(
    out, V, U, other,
    v_seed, v_line, v_column, u_seed, u_line, u_column, o_seed, o_line, o_column,
    size, d_in, count, padded, d_out,
    STACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    location = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.program_id(1).to(tl.int64)
    here = location < size
    first = location < d_in * padded
    line, column = location // padded, location % padded
    at = seed * v_seed + line.to(tl.int64) * v_line + column.to(tl.int64) * v_column
    value = tl.load(V + at, mask=first & (column < count), other=0.0).to(tl.float32)
    after = location - d_in * padded
    line, column = after // d_out, (after % d_out).to(tl.int64)
    own = here & (after >= 0)
    at = seed * u_seed + line.to(tl.int64) * u_line + column * u_column
    value += tl.load(U + at, mask=own & (line < count), other=0.0).to(tl.float32)
    if STACKED:
        line = line - padded
        at = seed * o_seed + line.to(tl.int64) * o_line + column * o_column
        inside = own & (line >= 0) & (line < d_in)
        value += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + seed * size + location, value.to(out.dtype.element_ty), mask=here)
