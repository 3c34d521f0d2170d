"""Which layer multiplies in fp8 natively, by how its operands are scaled."""

from torch import nn

from narrowcast.precision.fp8.blockwise import Fp8BlockLinear
from narrowcast.precision.fp8.rowwise import Fp8RowLinear
from narrowcast.precision.fp8.tensorwise import Fp8Linear


def native_linear(scaling: str) -> type[nn.Linear]:
    """Return the class of linear layers with native fp8 products whose operands are so scaled."""
    match scaling:
        case "row":
            return Fp8RowLinear
        case "block":
            return Fp8BlockLinear
        case _:
            return Fp8Linear
