import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.fork_server import ForkedPopen

from narrowcast.cli.entry import run_command
from narrowcast.training.checkpoints.checkpoint import checkpoint_step
from narrowcast.training.checkpoints.verify import difference_between


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let runs here and in other processes add in the same order; a tiny model is no slower."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def narrowcast(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run a command in this process, which saves the seconds torch takes to import."""

    def run(*words: object) -> Ended:
        capsys.readouterr()
        code = run_command([str(word) for word in words])
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture
def resumed_from(narrowcast: Callable[..., Ended]) -> Callable[..., Path]:
    """Resume a copy of a finished run as if it had been killed after a step.

    It all happens in this process; tests of `resume` and `verify-resume` kill real ones.
    """

    def resume(straight: Path, step: int) -> Path:
        resumed = straight.with_name(f"resumed-{step}")
        shutil.copytree(straight, resumed)
        for checkpoint in (resumed / "checkpoints").iterdir():
            if checkpoint.name > f"step-{step:06d}":
                shutil.rmtree(checkpoint)
        for name in ("finished.json", "model.safetensors", "report.html"):
            (resumed / name).unlink()
        ended = narrowcast("resume", resumed)
        assert (ended.code, ended.err) == (0, "")
        assert difference_between(straight, resumed) is None
        return resumed

    return resume


@pytest.fixture
def resumed_halfway(
    narrowcast: Callable[..., Ended], resumed_from: Callable[..., Path], tmp_path: Path
) -> Callable[..., Path]:
    """Train a run, and resume a copy of it from the checkpoint halfway."""

    def train(*words: object, every: int) -> Path:
        saving = (f"checkpoint.every={every}", "checkpoint.keep=100")
        ended = narrowcast("train", *words, *saving, "--out", tmp_path / "straight")
        assert (ended.code, ended.err) == (0, "")
        saved = sorted((tmp_path / "straight/checkpoints").iterdir())
        return resumed_from(tmp_path / "straight", checkpoint_step(saved[len(saved) // 2 - 1]))

    return train


@pytest.fixture
def start() -> Callable[..., subprocess.Popen[str]]:
    """Start a command in a process of its own, as a shell does, without the import of torch."""
    # As a user has it: no kernels on a CPU, rather than those of the interpreter.
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    def begin(*words: object, **options: object) -> subprocess.Popen[str]:
        options.setdefault("env", known)
        return ForkedPopen(
            [sys.executable, "-m", "narrowcast", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,  # type: ignore[call-overload]
        )

    return begin


@pytest.fixture
def finish(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., Ended]:
    """Run a command in a process of its own to its end."""

    def run(*words: object, **options: object) -> Ended:
        process = start(*words, **options)
        out, err = process.communicate(timeout=120)
        return Ended(process.returncode, out, err)

    return run
