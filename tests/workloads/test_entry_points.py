"""A package outside the tree brings a workload, and one that is broken brings no trouble."""

import os
import subprocess
import sys

import pytest

from narrowcast.runs import EvalRecord, RunFolder

CODE = """
from pathlib import Path
from narrowcast.config.workload import Command, Workload

WORKLOAD = Workload(
    name="line", about="fits a line", sections="nc_line.parts:SECTIONS",
    task="nc_line.parts:build_task",
    commands=(Command("line", "nc_line.parts:line"),),
    recipes=Path(__file__).parent / "recipes",
)
"""
PARTS = """
import click
import torch
from pydantic import Field
from narrowcast.config import DataSection, Section, Sections
from narrowcast.training.task import Task

class Slope(Section):
    of: float = Field(default=2.0, description="what is to be found")

SECTIONS = Sections(data=DataSection, model=Section, slope=Slope)

def build_task(recipe, *, device):
    slope = recipe.section(Slope).of
    torch.manual_seed(recipe.seed)
    return Task(
        model=torch.nn.Linear(1, 1).to(device),
        train_data=[i / 50 - 1 for i in range(100)],
        collate=lambda samples: torch.tensor(samples)[:, None],
        loss=lambda model, x: (model(x) - slope * x).square().mean(),
        evaluate=lambda model: {"loss": abs(model.weight.item() - slope)},
        items=len,
        gemm_rows=recipe.batch_size,
    )

@click.command()
def line():
    click.echo("a straight one")
"""
RECIPE = """
description: fits a line
workload: line
steps: 200
batch_size: 20
optimizer: {lr: 0.1, weight_decay: 0}
lr_schedule: {name: cosine}
precision: {policy: fp32}
"""


def install(folder, package, name, value):
    """Put down what pip would: a package's metadata, and in it an entry point."""
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[narrowcast.workloads]\n{name} = {value}\n")


@pytest.fixture
def narrowcast(tmp_path):
    """Run a command in a process that has two more packages: one that works, and one that fails."""
    site = tmp_path / "site"
    (site / "nc_line" / "recipes").mkdir(parents=True)
    (site / "nc_line" / "__init__.py").write_text(CODE)
    (site / "nc_line" / "parts.py").write_text(PARTS)
    (site / "nc_line" / "recipes" / "steep.yaml").write_text(RECIPE)
    (site / "nc_broken.py").write_text("raise RuntimeError('half installed')")
    install(site, "nc-line", "line", "nc_line:WORKLOAD")
    install(site, "nc-broken", "broken", "nc_broken:WORKLOAD")
    path = os.pathsep.join([str(site), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def run(*words):
        command = [sys.executable, "-m", "narrowcast", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run


def test_an_installed_workload_is_listed_beside_the_others_and_a_broken_one_is_named(narrowcast):
    ended = narrowcast("recipes")
    assert ended.returncode == 0
    listed = {line.split()[0] for line in ended.stdout.splitlines()}
    assert {"quickstart", "tutorial", "line/steep"} <= listed
    assert "'broken' of nc-broken cannot be imported" in ended.stderr
    assert "RuntimeError: half installed" in ended.stderr


def test_an_installed_workload_is_trained_with_settings_of_its_own(narrowcast, tmp_path):
    out = tmp_path / "run"
    ended = narrowcast("train", "line/steep", "slope.of=3", "--out", str(out), "--quiet")
    assert ended.returncode == 0, ended.stderr
    with RunFolder.open(out) as run:
        (judged,) = [r for r in run.records() if isinstance(r, EvalRecord)]
        assert run.read_json("resolved.json")["slope.of"]["value"] == 3
    assert judged.metrics["loss"] < 0.01


def test_an_installed_workload_brings_its_command(narrowcast):
    assert "line  fits a line" in " ".join(narrowcast("--help").stdout.split()).replace(" f", "  f")
    assert narrowcast("line").stdout == "a straight one\n"
