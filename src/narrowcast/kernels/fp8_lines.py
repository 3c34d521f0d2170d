"""Cast a matrix to fp8 with a scale for each row, as it is and transposed.

A scale belongs to a line along the dimension that is summed, so as it is and transposed a matrix
has different scales, and so different codes. A pass takes the largest magnitudes of all rows and
columns (2 bytes an element), a second makes both casts from one read (2 bytes, and 1 for each
layout): as many bytes as with one scale of the matrix's own. Rows are filled up with zeros to a
multiple of 16. Inside `torch.compile` this is the operator `narrowcast::quantize_fp8_lines`.
"""

import torch
from torch import Tensor

from narrowcast.kernels.fp8 import LARGEST, MULTIPLE, LocallyQuantized, castable, inverse_for
from narrowcast.kernels.launch import unsupported_reason


def quantize_lines(
    x: Tensor, target: torch.dtype, *, rows: bool = True, columns: bool = True
) -> LocallyQuantized:
    """Return a matrix in fp8, with one inverse scale a row of either layout.

    An unwanted layout is empty. What is not finite becomes NaN, and its line has the scale one.
    """
    compiling = torch.compiler.is_compiling()
    call = torch.ops.narrowcast.quantize_fp8_lines if compiling else _quantize
    return LocallyQuantized(*call(x, target, rows, columns))


def _empty(
    x: Tensor, target: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count, width = x.shape
    padded = count + -count % MULTIPLE
    return (
        x.new_empty((padded, width) if rows else (0,), dtype=target),
        x.new_empty((width, padded) if columns else (0,), dtype=target),
        x.new_empty(padded if rows else 0, dtype=torch.float32),
        x.new_empty(width if columns else 0, dtype=torch.float32),
    )


def _quantize(
    x: Tensor, target: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.contiguous()
    results = _empty(x, target, rows, columns)
    if not x.numel():
        for scales in results[2:]:
            scales.fill_(1)
    elif unsupported_reason(x.device):
        _plainly(x, *results, largest=LARGEST[target])
    else:
        from narrowcast.kernels.quantize_lines import quantize_lines_into

        quantize_lines_into(*results, x, largest=LARGEST[target])
    return results


def _plainly(
    x: Tensor,
    rows: Tensor,
    columns: Tensor,
    rows_inverse: Tensor,
    columns_inverse: Tensor,
    *,
    largest: float,
) -> None:
    """Do as the kernels do, in a pass for each operation."""
    padded = rows.shape[0] if rows.numel() else columns.shape[-1]
    value = torch.nn.functional.pad(x.float(), (0, 0, 0, padded - x.shape[0]))
    magnitude = value.abs()
    if rows.numel():
        rows_inverse.copy_(inverse_for(magnitude.amax(1), largest))
        rows.copy_(castable(value, rows_inverse[:, None], largest))
    if columns.numel():
        columns_inverse.copy_(inverse_for(magnitude.amax(0), largest))
        columns.copy_(castable(value, columns_inverse, largest).t())


_library = torch.library.Library("narrowcast", "FRAGMENT")
_library.define(
    "quantize_fp8_lines(Tensor x, ScalarType target, bool rows, bool columns) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag),
)
_library.impl("quantize_fp8_lines", _quantize, "CompositeExplicitAutograd")
torch.library.register_fake("narrowcast::quantize_fp8_lines", _empty)
