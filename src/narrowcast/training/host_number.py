"""A number on its way from the device to the host, which nothing waits for until it is read."""

from typing import final

import torch
from torch import Tensor


@final
class HostNumber:
    """The value of a tensor without dimensions, as it is now; it may change afterwards."""

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            # `item` later would wait for everything queued by then, not for this number alone.
            self._host = torch.empty((), dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._host = tensor.detach().clone()

    def value(self) -> float:
        """Return the number. Waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._host.item())
