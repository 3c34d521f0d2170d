"""Products of matrices, one for each seed; of one seed plain ones, which are faster."""

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a b of each seed, (seeds, …, …), in `dtype`, else in that of the operands."""
    one = a.shape[0] == 1
    wide = dtype is not None and dtype != a.dtype
    if wide and a.is_cuda and dtype == torch.float32:
        # The sum as it is, in fp32: cuBLAS need not round it for torch to widen it again.
        if one:
            return torch.mm(a[0], b[0], out_dtype=dtype).unsqueeze(0)
        return torch.bmm(a, b, out_dtype=dtype)
    result = torch.mm(a[0], b[0]).unsqueeze(0) if one else torch.bmm(a, b)
    return result.to(dtype) if wide else result


def added_product(to: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return to + a b; `to` broadcasts, (seeds or 1, rows or 1, columns)."""
    if to is None:
        return product(a, b)
    to = to.to(a.dtype)
    if a.shape[0] > 1:
        return torch.baddbmm(to, a, b)
    # A bias of one dimension is added within the product, one of two is copied out first.
    line = to[0, 0] if to.shape[1] == 1 else to[0]
    return torch.addmm(line, a[0], b[0]).unsqueeze(0)
