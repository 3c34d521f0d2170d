import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from narrowcast.config.sections import DataSection, Recipe, Section
from narrowcast.hardware import Hardware, detect_hardware
from narrowcast.runs import Metric, TaskInfo
from narrowcast.training.phase_plans import plan_phases
from narrowcast.training.setup import prepare_recipe
from narrowcast.training.task import Task


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads on a model this small wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class SineModel(nn.Module):
    """A small network with what a step carries over: dropout, running means, a tied weight."""

    def __init__(self):
        super().__init__()
        self.rise = nn.Linear(1, 16)
        self.norm = nn.BatchNorm1d(16)
        self.first = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.1)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.fall = nn.Linear(16, 1)

    def forward(self, x):
        x = torch.tanh(self.norm(self.rise(x)))
        x = x + self.drop(torch.tanh(self.first(x)))
        return self.fall(x + torch.tanh(self.second(x)))


@dataclass(frozen=True)
class SineData:
    samples: int = 100

    def __len__(self):
        return self.samples

    def __getitems__(self, indices):
        x = torch.tensor(indices, dtype=torch.float32)[:, None] * (2 / self.samples) - 1
        return x, torch.sin(math.pi * x)


def sine_task(*, seed=0, samples=100, device="cpu", **parts):
    """The sine from -π to π, to be learnt from its values; `parts` are other parts of the task."""
    torch.manual_seed(seed)

    def evaluate(model):
        x, y = (t.to(device) for t in SineData(37).__getitems__(list(range(37))))
        return {"error": (model(x) - y).square().mean().item()}

    usual = {
        "model": SineModel().to(device),
        "train_data": SineData(samples),
        "loss": lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        "items": lambda batch: len(batch[0]),
        "evaluate": evaluate,
        "info": TaskInfo(metrics=(Metric(name="error"),)),
        "gemm_rows": 8,  # the batch size of `sine_recipe`
    }
    return Task(**{**usual, **parts})


def sine_recipe(policy="fp32", *, steps=10, **settings):
    sections = {
        "precision": {"policy": policy},
        "optimizer": {"lr": 0.01},
        "lr_schedule": {"name": "cosine", "warmup": 1},
        **settings,
    }
    return Recipe(
        **{
            "workload": "sine",
            "steps": steps,
            "batch_size": 8,
            "data": DataSection(),
            "model": Section(),
            **sections,
        }
    )


# Every CPU can emulate every format; a probe would try in a child process what this one can do.
EMULATING = Hardware(device="cpu", name="any CPU", memory_bytes=2**30)


@dataclass(frozen=True)
class Ready:
    """All that `train` needs, made from one recipe."""

    task: Task
    recipe: Recipe
    prepared: object

    def but(self, **parts):
        """Return the same run with other parts of its task."""
        return replace(self, task=replace(self.task, **parts))


@pytest.fixture
def ready():
    """Make a run of the sine task ready: `ready("fp16", steps=20,
    gradient_accumulation_steps=2)`."""

    def make(policy="fp32", *, samples=100, device="cpu", task=None, parts=None, **settings):
        recipe = sine_recipe(policy, **settings)
        task = task or sine_task(seed=recipe.seed, samples=samples, device=device, **(parts or {}))
        hardware = detect_hardware(device) if device != "cpu" else EMULATING
        planned = plan_phases(recipe, task.model, hardware=hardware, gemm_rows=task.gemm_rows)[0]
        return Ready(task, recipe, prepare_recipe(recipe, task, plan=planned))

    return make
