"""One number on its way from the device to the host."""

from typing import final

from torch import Tensor

from narrowcast.hardware.async_copy import AsyncCopy


@final
class HostNumber:
    """The value of a tensor without dimensions, as it is now; it may change afterwards."""

    def __init__(self, tensor: Tensor) -> None:
        self._arriving = AsyncCopy(tensor)

    def value(self) -> float:
        """Return the number. Waits for the device."""
        return float(self._arriving.wait().item())
