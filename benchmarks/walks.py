"""How far a reader walks: files entered and jumps between files on four ways through the engine.

    python benchmarks/walks.py [--json PATH]

A walk is every call of a function of ours while something happens once, on a CPU where formats are
emulated. A jump is a call into another file than the call before it. The figures say whether an
idea lives in one place; they are a direction, not a gate.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F

import narrowcast as nc

HOME = str(Path(nc.__file__).parent) + "/"
AIMS = {
    "prepare(fp16)": (15, 50),
    "step, fp16": (12, 50),
    "step, fp8-delayed and split": (15, 80),
    "a quickstart step with a health reading": (30, 180),
}
"""Files and jumps that would do, by a reading of the engine as it was."""


class Walk:
    """Notes the file of each call of ours inside the block."""

    def __init__(self, *, without: tuple[str, ...] = ()) -> None:
        self._without = without
        self.calls: list[str] = []

    def __enter__(self) -> "Walk":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(HOME):
            path = name.removeprefix(HOME)
            if not path.startswith(self._without):
                self.calls.append(path)

    @property
    def files(self) -> set[str]:
        return set(self.calls)

    @property
    def packages(self) -> set[str]:
        return {path.partition("/")[0] for path in self.files if "/" in path}

    @property
    def jumps(self) -> int:
        return sum(a != b for a, b in zip(self.calls, self.calls[1:], strict=False))


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 16)
    )


def prepared_walk() -> Walk:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    with Walk() as walk:
        nc.prepare(net, optimizer, policy="fp16", clip_norm=1.0)
    return walk


def step_walk(policy: str) -> Walk:
    net = model()
    run = nc.prepare(net, torch.optim.AdamW(net.parameters()), policy=policy, clip_norm=1.0)
    x, y = torch.randn(8, 32), torch.randint(0, 16, (8,))
    walk = Walk()
    for number in range(5):
        with run.autocast():
            loss = F.cross_entropy(net(x), y)
        if number < 4:  # the first ones settle what is decided once
            run.step(loss)
        else:
            with walk:
                run.step(loss)
    return walk


def trainer_walk() -> Walk:
    # Through the command line, so that the script runs on any version of the code.
    from narrowcast.cli.entry import run_command
    from narrowcast.runs import RunFolder, StepRecord

    walk = Walk(without=("numerics/",))
    write = RunFolder.write

    def noting(folder: RunFolder, record: Any) -> None:
        write(folder, record)
        if isinstance(record, StepRecord) and record.step == 4:
            walk.__enter__()
        elif isinstance(record, StepRecord) and record.step == 5:
            walk.__exit__()

    RunFolder.write = noting  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            words = ["steps=6", "health.every=5", "batch_size=2", "--out", f"{folder}/run", "-q"]
            assert run_command(["train", "quickstart", *words]) == 0
    finally:
        RunFolder.write = write  # type: ignore[method-assign]
    return walk


WALKS: dict[str, Callable[[], Walk]] = {
    "prepare(fp16)": prepared_walk,
    "step, fp16": lambda: step_walk("fp16"),
    "step, fp8-delayed and split": lambda: step_walk("fp8-delayed, params=bf16, master=split"),
    "a quickstart step with a health reading": trainer_walk,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--list", action="store_true", help="list the files of each walk")
    given = parser.parse_args()
    rows = {}
    for name, take in WALKS.items():
        take()  # once for imports and caches
        walk = take()
        rows[name] = {
            "files": len(walk.files),
            "packages": len(walk.packages),
            "jumps": walk.jumps,
            "calls": len(walk.calls),
        }
        if given.list:
            print(name, *sorted(walk.files), sep="\n  ")
    print(f"{'walk':42} {'files':>6} {'aim':>4} {'jumps':>6} {'aim':>4} {'calls':>6}")
    for name, row in rows.items():
        files, jumps = AIMS[name]
        print(f"{name:42} {row['files']:6} {files:4} {row['jumps']:6} {jumps:4} {row['calls']:6}")
    if given.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
        found = {"commit": commit.stdout.strip(), "torch": torch.__version__, "walks": rows}
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
