"""Where Triton kernels can run: on CUDA devices, and anywhere under Triton's interpreter.

The interpreter runs a kernel as numpy code. It is Triton's own switch (TRITON_INTERPRET=1, set
before Triton is imported), and how the kernels are tested on machines without a GPU.
"""

import functools
import importlib.util
import os

import torch


def interpreted() -> bool:
    """Say whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unsupported_reason(device: torch.device) -> str:
    """Say why no kernel can run on a device; nothing where it can."""
    if not _triton_is_installed():
        return "Triton is not installed"
    if device.type != "cuda" and not interpreted():
        return f"Triton has no kernels for {device.type}"
    return ""


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_capturing(device: torch.device | None = None) -> bool:
    """Say whether a CUDA graph is being captured, which runs its launches again as they are now.

    `device` is where the work is, if that is known.
    """
    on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    return on_gpu and torch.cuda.is_current_stream_capturing()
