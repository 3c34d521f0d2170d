"""Linear layers of several networks at once: each seed multiplies by weights of its own."""

from typing import final

import torch
from torch import Tensor, nn


@final
class SeededLinear(nn.Module):
    """`nn.Linear` of as many networks as there are seeds, side by side.

    The first dimension of the input is the seed; those between it and the last are rows. Weights
    begin at zero: who makes the network knows how they should begin, and from which generator.
    """

    def __init__(
        self,
        seeds: int,
        d_in: int,
        d_out: int,
        *,
        bias: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.seeds, self.d_in, self.d_out = seeds, d_in, d_out
        self.weight = nn.Parameter(torch.zeros(seeds, d_out, d_in, device=device))
        self.bias = nn.Parameter(torch.zeros(seeds, d_out, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1, -2)  # (seeds, rows, d_in)
        if self.bias is None:
            product = torch.bmm(rows, self.weight.mT)
        else:
            product = torch.baddbmm(self.bias[:, None], rows, self.weight.mT)
        return product.view(*x.shape[:-1], self.d_out)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"seeds={self.seeds}, d_in={self.d_in}, d_out={self.d_out}, bias={bias}"
