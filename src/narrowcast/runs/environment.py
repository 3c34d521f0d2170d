"""The environment of a run: versions, machine, commit and time, as plain JSON values."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

GIT_SECONDS = 5
"""Longer than git needs to read HEAD on a slow network disk."""


def describe_environment() -> dict[str, Any]:
    """Return the machine and the working directory of this process."""
    return {**describe_machine(), "folder": str(Path.cwd())}


def describe_machine() -> dict[str, Any]:
    """Return versions, commit and hardware. Imports torch, and waits for the GPU driver."""
    import torch

    gpus = [
        torch.cuda.get_device_properties(index)
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "narrowcast": _package_version("narrowcast"),
        "commit": git_commit(Path.cwd()),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": _cores(),
        "memory_bytes": host_memory_bytes(),
        "cuda": torch.version.cuda,
        "gpus": [
            {
                "name": gpu.name,
                "capability": f"{gpu.major}.{gpu.minor}",
                "memory_bytes": gpu.total_memory,
            }
            for gpu in gpus
        ],
    }


def git_commit(folder: Path) -> str | None:
    """Return the commit checked out in `folder`, or None without git or a checkout."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--verify", "HEAD"],
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _package_version(package: str) -> str | None:
    # Imported here: it brings in the email package, a third of this package's import time.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _cores() -> int:
    """Return the number of cores this process may use, which a container can limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def host_memory_bytes() -> int | None:
    """Return the memory of the machine; None if unknown (Windows)."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
