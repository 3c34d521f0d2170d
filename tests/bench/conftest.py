"""A recipe of a language model, and one of a task that is nothing like it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from narrowcast.bench import model as bench_model
from narrowcast.config.sections import DataSection, Recipe, Section
from narrowcast.runs import Metric, TaskInfo
from narrowcast.training.task import Task

TINY = """\
workload: lm
steps: 4
batch_size: 2
device: cpu
data: {length: 16, eval_windows: 2}
model: {layers: 1, width: 16, heads: 2}
optimizer: {lr: 0.01}
"""


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    """Several workers share the cores, and a tiny model is no slower."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def tiny(tmp_path):
    """A recipe that a step takes milliseconds of."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return str(path)


class Waves:
    """Sines of different frequencies, and which of two halves each is from."""

    def __len__(self) -> int:
        return 64

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        frequencies = torch.tensor(indices, dtype=torch.float32)[:, None]
        x = torch.sin(frequencies * torch.linspace(0, math.pi, 16))
        return x, (frequencies[:, 0] < 32).long()


SERIES = TaskInfo(
    unit="series", plural="series", metrics=(Metric(name="accuracy", better="higher"),)
)


def _loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


def _evaluate(model: nn.Module) -> dict[str, float]:
    x, y = Waves().__getitems__(list(range(64)))
    return {"accuracy": (model(x).argmax(1) == y).float().mean().item()}


def _waves_task(recipe: Recipe, *, device: torch.device) -> Task:
    """Tell slow waves from fast ones."""
    torch.manual_seed(recipe.seed)
    made = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 2))
    return Task(
        model=made.to(device),
        train_data=Waves(),
        loss=_loss,
        evaluate=_evaluate,
        items=lambda batch: len(batch[0]),
        gemm_rows=4,
        info=SERIES,
    )


@pytest.fixture
def waves(monkeypatch) -> Callable[..., Recipe]:
    """Make a recipe of a task that is no language model; benches build that task from it."""
    monkeypatch.setattr(bench_model, "build_task", _waves_task)

    def make(**settings: Any) -> Recipe:
        given = {"steps": 4, "batch_size": 4, "device": "cpu", "optimizer": {"lr": 0.01}}
        sections = {"data": DataSection(), "model": Section()}
        return Recipe(workload="waves", **{**given, **sections, **settings})

    return make
