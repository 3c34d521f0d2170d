"""The worst masks that are found, against the term of training and against exhaustive search."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from narrowcast.workloads.decompose.components.decomposition import Decomposition
from narrowcast.workloads.decompose.components.masked import SiteMask
from narrowcast.workloads.decompose.components.sites import find_sites
from narrowcast.workloads.decompose.judging import quality_bar
from narrowcast.workloads.decompose.losses.adversary import PGD
from narrowcast.workloads.decompose.losses.terms import Step
from narrowcast.workloads.decompose.targets.tms import TMS


@pytest.fixture
def step():
    """A step of a toy network of two seeds, with random components."""
    torch.manual_seed(0)
    target = TMS(4, 2, seeds=2, generator=torch.Generator().manual_seed(0)).double()
    sites = find_sites(target, {"linear1": 3, "linear2": 2})
    decomposition = Decomposition(target, sites, seeds=2).double()
    x = torch.rand(2, 12, 4, dtype=torch.float64)
    lower = [torch.rand(2, 12, c, dtype=torch.float64).requires_grad_() for c in (3, 2)]
    return Step(
        decomposition=decomposition,
        args=(x,),
        batch_dim=1,
        target=decomposition(x).output,
        lower=lower,
        upper=lower,
        progress=torch.tensor(0.0),
        divergence="mse",
    )


def part_of(step, rows):
    return replace(
        step,
        args=(step.args[0][:, rows],),
        target=step.target[:, rows],
        lower=[each[:, rows] for each in step.lower],
    )


def test_one_batch_is_the_term_of_training(step):
    torch.manual_seed(1)
    bar = quality_bar([step])
    torch.manual_seed(1)
    expected = PGD(coefficient=1.0, step_size=0.1)(step, 20)
    assert torch.allclose(bar, expected, rtol=1e-12)
    assert not bar.requires_grad


def test_batches_are_judged_together(step):
    torch.manual_seed(2)
    whole = quality_bar([step])
    torch.manual_seed(2)
    parts = quality_bar([part_of(step, slice(0, 3)), part_of(step, slice(3, 12))])
    assert torch.allclose(parts, whole, rtol=1e-9)


def test_no_corner_of_the_cube_is_much_worse(step):
    worst = torch.zeros(2, dtype=torch.float64)
    for corner in product((0.0, 1.0), repeat=7):
        s = torch.tensor(corner, dtype=torch.float64)
        ones = torch.ones(2, 12, dtype=torch.float64)
        masks = [
            SiteMask(step.lower[0].detach(), s[:3], s[5] * ones),
            SiteMask(step.lower[1].detach(), s[3:5], s[6] * ones),
        ]
        made = step.decomposition(*step.args, masks=masks).output
        worst = torch.maximum(worst, (made - step.target).square().mean((1, 2)))
    torch.manual_seed(3)
    found = torch.stack([quality_bar([step]) for _ in range(5)]).amax(0)
    assert (found >= 0.8 * worst).all()
