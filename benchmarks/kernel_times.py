"""What the device does in a step, kernel by kernel: for the benchmarks that profile one.

It asks nothing of narrowcast, so that a script which uses it runs with the sources of any commit.
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch.autograd import DeviceType

KINDS = {
    "attention": ("flash", "fmha", "sdpa", "scaled_dot_product"),
    "products": ("nvjet", "gemm", "cutlass", "splitk", "conv", "wgrad", "dgrad", "fprop",
                 "aten::mm", "aten::addmm", "aten::bmm"),
    "update": ("adam", "norm_out", "multi_tensor", "lpnorm", "l2_norm", "update"),
    "copies and casts": ("copy", "memcpy", "memset", "fill"),
}  # fmt: skip
"""Words in the names of kernels, looked for in this order; all other kernels are `other`. Of
attention first: its kernels are made of cutlass and called fprop, too."""


def kind_of(name: str) -> str:
    """Return what a kernel is for."""
    small = name.lower()
    return next((k for k, words in KINDS.items() if any(w in small for w in words)), "other")


def kernel_times(
    step: Callable[[], object], *, steps: int, on_gpu: bool
) -> tuple[Counter[str], Counter[str]]:
    """Return milliseconds and launches of each kernel in a step; of each operation on a CPU."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as found:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    spent, launched = Counter[str](), Counter[str]()
    for event in found.events():
        if event.device_type == kind:
            microseconds = event.device_time_total if on_gpu else event.self_cpu_time_total
            spent[event.name] += microseconds / steps / 1e3
            launched[event.name] += 1 / steps
    return spent, launched
