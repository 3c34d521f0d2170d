"""Numbers on their way from the device to the host, which nothing waits for until they are read."""

from typing import final

import torch
from torch import Tensor


@final
class AsyncCopy:
    """The values of a tensor as they are now; they may change afterwards."""

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            # `item` later would wait for everything queued by then, not for these numbers alone.
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._copied = torch.cuda.Event()
            # The copy is queued on the tensor's device, which need not be the current one.
            self._copied.record(torch.cuda.current_stream(tensor.device))
        else:
            self._host = tensor.detach().clone()

    def wait(self) -> Tensor:
        """Return them, on the host. Waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host
