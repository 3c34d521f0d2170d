"""Transformers that look up what followed a token: their rows, their algebra, what they learn."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.components.decomposition import Decomposition
from narrowcast.workloads.decompose.components.masked import SiteMask
from narrowcast.workloads.decompose.components.sites import find_sites
from narrowcast.workloads.decompose.targets.induction import (
    InductionRows,
    InductionTransformer,
    plan_for,
)
from narrowcast.workloads.decompose.targets.toy import make_toy
from narrowcast.workloads.decompose.targets.toys import toy_target

ROWS = InductionRows(ordinary=12, length=10)


def small(steps=250):
    plan = plan_for(ROWS, width=16, steps=steps)
    plan = replace(plan, pretraining=replace(plan.pretraining, batch_size=64))
    return make_toy(plan, seeds=2, seed=0, device="cpu")


@pytest.fixture(scope="module")
def learnt():
    return small()


def test_rows_are_what_they_are_said_to_be():
    generator = torch.Generator().manual_seed(0)
    rows = ROWS.draw(2, 500, device="cpu", generator=generator).flatten(0, 1)
    begin, marker = 12, 13
    answers = ROWS.answers(rows.view(2, 500, 10)).flatten()
    places = set()
    for row, answer in zip(rows.tolist(), answers.tolist(), strict=True):
        assert row[0] == begin
        assert row[-1] == marker
        assert row.count(marker) == 2
        assert row.count(begin) == 1
        at = row.index(marker)
        assert row[at + 1] == answer < 12
        places.add(at)
    assert places == set(range(1, 8))
    assert len(set(answers.tolist())) == 12


def test_one_seed_by_hand():
    network = InductionTransformer(ROWS, 8, seeds=3, generator=torch.Generator().manual_seed(0))
    tokens = ROWS.draw(3, 4, device="cpu")
    for seed in range(3):
        stream = network.embed[seed][tokens[seed]]
        for block in network.blocks:
            placed = stream + network.positions[seed]
            q, k = placed @ block.q_proj.weight[seed].T, placed @ block.k_proj.weight[seed].T
            scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(10, 10).triu(1).bool(), -torch.inf)
            gathered = scores.softmax(-1) @ (stream @ block.v_proj.weight[seed].T)
            stream = stream + gathered @ block.o_proj.weight[seed].T
        expected = stream[:, -1] @ network.unembed.weight[seed].T
        assert torch.allclose(network(tokens)[seed], expected, atol=1e-4)
        loss = F.cross_entropy(expected, ROWS.answers(tokens)[seed])
        assert network.loss(tokens)[seed].item() == pytest.approx(loss.item(), rel=1e-4)


def test_it_learns_to_look_up_and_needs_both_layers_for_it(learnt):
    network, tokens = learnt.target, ROWS.draw(2, 1000, device="cpu")
    with torch.no_grad():
        assert (network.accuracy(tokens) > 0.95).all()
        weight = network.blocks[0].o_proj.weight
        kept = weight.clone()
        weight.zero_()
        lesioned = network.accuracy(tokens)
        weight.copy_(kept)
    assert (lesioned < 0.5).all()


def test_one_that_was_not_trained_is_refused():
    with pytest.raises(ConfigError, match=r"induction did not learn its task.*accuracy must be"):
        toy_target("induction", seeds=2, seed=0, device="cpu", steps=0)


def test_with_all_of_its_components_and_what_they_leave_it_is_itself(learnt):
    tokens = learnt.draw(6)
    target = deepcopy(learnt.target)
    sites = find_sites(target, dict.fromkeys(learnt.sites, 20))
    assert len(sites) == 8
    with torch.no_grad():
        expected = learnt.target(tokens)
        decomposition = Decomposition(target, sites, seeds=2)
        everything = SiteMask(torch.ones(2, 6 * ROWS.length, 20), 0.0, 1.0)
        made = decomposition(tokens, masks=[everything] * 8).output
    assert made.shape == (2, 6, ROWS.vocabulary)
    assert torch.allclose(made, expected, atol=1e-4)
