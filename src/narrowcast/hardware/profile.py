"""What host and device do in some steps of a run: a trace, and a table of operations by time."""

import json
import resource
import sys
from pathlib import Path
from typing import Any, final

import torch

FOLDER, TRACE, TABLE = "profile", "trace.json", "operations.json"
MOST_ROWS = 200
"""Operations in the table, those that take longest first."""


@final
class StepProfile:
    """Runs torch's profiler over some steps. Synchronises with the device before and after them."""

    def __init__(self, *, first: int, steps: int, device: torch.device, folder: Path) -> None:
        self._first, self._last = first, first + steps - 1
        self._device, self._folder = device, folder
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """Begin with the first of the steps; also in the midst of them, where a run is resumed."""
        if self._profiler is not None or not self._first <= step <= self._last:
            return
        from torch.profiler import ProfilerActivity, profile  # a third of a second

        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)
        self._profiler.start()

    def after(self, step: int) -> None:
        """Write the trace and the table after the last of the steps."""
        if step >= self._last:
            self.close()

    def close(self) -> None:
        """Write the profile unless it was never started or is written already."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        profiler.stop()
        folder = self._folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / TRACE))
        (folder / TABLE).write_text(json.dumps(_table(profiler), indent=1) + "\n")


def _table(profiler: Any) -> list[dict[str, Any]]:
    """Return operations by the time they take themselves: on the device, and then on the host."""
    rows = [
        {
            "operation": each.key,
            "calls": each.count,
            "device_ms": each.self_device_time_total / 1e3,
            "host_ms": each.self_cpu_time_total / 1e3,
        }
        for each in profiler.key_averages()
    ]
    rows.sort(key=lambda row: (-row["device_ms"], -row["host_ms"]))
    return rows[:MOST_ROWS]


def peak_bytes(device: torch.device) -> int:
    """Return the most that tensors have taken of a GPU, or this process of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Kilobytes, except on a Mac.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
