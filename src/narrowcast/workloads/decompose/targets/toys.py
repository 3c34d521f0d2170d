"""Toy networks by name, as recipes ask for them."""

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

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
    trained: Mapping[str, Tensor] | None = None,
) -> Toy:
    """Return a toy network of `seeds` seeds, trained, checked and frozen; see `make_toy`.

    `steps` and `batch_size` are those of its training; none: what it is known to learn with.
    """
    plan = toy_plan(name)
    how = replace(
        plan.pretraining,
        steps=plan.pretraining.steps if steps is None else steps,
        batch_size=plan.pretraining.batch_size if batch_size is None else batch_size,
    )
    plan = replace(plan, pretraining=how)
    return make_toy(plan, seeds=seeds, seed=seed, device=device, trained=trained)


def toy_plan(name: str) -> ToyPlan:
    """Return how a toy network is made; nothing is made yet."""
    if result := TMS_NAME.fullmatch(name):
        features, hidden = int(result[1]), int(result[2])
        return tms_plan(features, hidden, identity=result[3] is not None)
    if name == "induction":
        return induction_plan()
    if result := RESID_NAME.fullmatch(name):
        return resid_mlp_plan(int(result[1]))
    raise ConfigError(f"model.toy must be {NAMES}, got {name}.")
