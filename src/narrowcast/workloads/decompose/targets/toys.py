"""Toy networks by name."""

import re
from dataclasses import replace

import torch

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.targets.induction import induction_plan
from narrowcast.workloads.decompose.targets.resid_mlp import resid_mlp_plan
from narrowcast.workloads.decompose.targets.tms import tms_plan
from narrowcast.workloads.decompose.targets.toy import Toy, ToyPlan, make_toy

TMS_NAME = re.compile(r"tms_([1-9]\d{0,3})-([1-9]\d{0,3})(-id)?", re.ASCII)
RESID_NAME = re.compile(r"resid_mlp([1-3])", re.ASCII)
NAMES = (
    "tms_5-2 (N features in M dimensions: tms_N-M; with an identity layer: tms_N-M-id), "
    "resid_mlp1, resid_mlp2, resid_mlp3 or induction"
)


def toy_target(
    name: str,
    *,
    seeds: int,
    seed: int,
    device: torch.device | str,
    steps: int | None = None,
    batch_size: int | None = None,
    trained: bool = True,
) -> Toy:
    """Return a toy by name; `steps` and `batch_size` override those of its training."""
    plan = toy_plan(name)
    how = replace(
        plan.pretraining,
        steps=plan.pretraining.steps if steps is None else steps,
        batch_size=plan.pretraining.batch_size if batch_size is None else batch_size,
    )
    plan = replace(plan, pretraining=how)
    return make_toy(plan, seeds=seeds, seed=seed, device=device, trained=trained)


def toy_plan(name: str) -> ToyPlan:
    """Return the plan of a toy network."""
    if result := TMS_NAME.fullmatch(name):
        features, hidden = int(result[1]), int(result[2])
        return tms_plan(features, hidden, identity=result[3] is not None)
    if name == "induction":
        return induction_plan()
    if result := RESID_NAME.fullmatch(name):
        return resid_mlp_plan(int(result[1]))
    raise ConfigError(f"model.toy must be {NAMES}, got {name}.")
