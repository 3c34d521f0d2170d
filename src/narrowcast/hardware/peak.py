"""The most memory that was held at any time."""

import resource
import sys

import torch


def peak_bytes(device: torch.device) -> int:
    """Return the most that tensors have taken of a GPU, or this process of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Kilobytes, except on a Mac.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
