"""Lesions beside chance, and the arithmetic of their intervals."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from narrowcast.errors import ConfigError
from narrowcast.runs import strict_json
from narrowcast.workloads.sft.ica import FunctionalNetworks, Layout, ablate, lesioned, random_like
from narrowcast.workloads.sft.ica.study.ablate import difference, score
from narrowcast.workloads.sft.ica.study.ablation import (
    SIGNIFICANT,
    Interval,
    Level,
    Versus,
    load_ablation,
)
from narrowcast.workloads.sft.ica.study.documents import document

NETWORKS = FunctionalNetworks(
    networks={0: {0: (1, 2), 2: (5,)}, 1: {1: (0,)}},
    layout=Layout(layers=(0, 1, 2), width=16, depth=3),
)


@pytest.fixture
def documents():
    chance = torch.Generator().manual_seed(2)
    lengths = (5, 9, 7, 12)
    return [document(torch.randint(0, 64, (n,), generator=chance).tolist()) for n in lengths]


def mean_loss(model, documents):
    """The loss as torch has it."""
    with torch.no_grad():
        parts = [
            F.cross_entropy(model(each["input_ids"]).logits[0, :-1], each["input_ids"][0, 1:])
            * (each["input_ids"].shape[1] - 1)
            for each in documents
        ]
    return float(sum(parts) / sum(each["input_ids"].shape[1] - 1 for each in documents))


def test_losses_and_hits_are_those_of_torch(model, documents):
    found = score(model, documents).level
    assert found.loss == pytest.approx(mean_loss(model.eval(), documents), rel=1e-5)
    hits = [
        model(each["input_ids"]).logits[0, :-1].argmax(-1) == each["input_ids"][0, 1:]
        for each in documents
    ]
    assert found.accuracy == pytest.approx(torch.cat(hits).double().mean().item())


def test_only_what_is_learnt_is_counted(make_model):
    model = make_model("llama").eval()
    ids, learnt = [3, 9, 4, 1], [False, False, True, False]
    loss = F.cross_entropy(model(torch.tensor([ids])).logits[0, 1:2], torch.tensor([4]))
    assert score(model, [document(ids, learnt)]).level.loss == pytest.approx(loss.item(), rel=1e-5)


def test_a_lesion_is_measured_on_the_model_with_these_channels_silent(model, documents):
    before = model.eval()(documents[0]["input_ids"]).logits
    found = ablate(model, documents, NETWORKS, random_masks=3)
    assert found.whole.loss == pytest.approx(mean_loss(model, documents), rel=1e-5)
    with lesioned(model, NETWORKS.channels()):
        expected = mean_loss(model, documents)
    assert found.lesion.level.loss == pytest.approx(expected, rel=1e-5)
    assert found.lesion.cost.value == pytest.approx(expected - found.whole.loss, abs=1e-6)
    assert [each.components for each in found.each] == [(0,), (1,)]
    assert [each.channels for each in (found.lesion, *found.each)] == [4, 3, 1]
    assert found.larger.channels == 3 * 2  # 15 % of 16 channels
    assert torch.equal(model(documents[0]["input_ids"]).logits, before)


def test_the_same_seed_gives_the_same_numbers(make_model, documents):
    first, again, other = (
        ablate(make_model("gpt2"), documents, NETWORKS, random_masks=3, seed=seed)
        for seed in (0, 0, 1)
    )
    assert first == again
    assert first.lesion.level == other.lesion.level
    assert first.lesion.equal.masks != other.lesion.equal.masks


def test_progress_ends_at_the_number_of_passes_that_was_told(make_model, documents):
    told = []
    ablate(
        make_model("gpt2"),
        documents,
        NETWORKS,
        random_masks=2,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(n, len(told)) for n in range(1, len(told) + 1)]


def test_keeping_all_channels_costs_nothing(make_model, documents):
    whole = FunctionalNetworks(
        networks={0: {layer: tuple(range(16)) for layer in range(3)}},
        layout=NETWORKS.layout,
    )
    (kept,) = ablate(make_model("llama"), documents, whole, random_masks=1).preserve
    assert kept.cost == Interval(value=0.0, low=0.0, high=0.0)


def test_a_rank_becomes_the_p_value_of_a_permutation_test(make_model, documents):
    """Two-sided, times the number of components that are tested one by one."""
    ablation = ablate(make_model("llama"), documents, NETWORKS, random_masks=19)
    for found, tests in ((ablation.lesion, 1), (ablation.each[0], 2), (ablation.each[1], 2)):
        losses = [mask.loss for mask in found.equal.masks]
        above = sum(loss >= found.level.loss for loss in losses)
        below = sum(loss <= found.level.loss for loss in losses)
        expected = min(1.0, tests * 2 * (1 + min(above, below)) / 20)
        assert found.equal.p == pytest.approx(expected)


def versus(lesion, masks, *, tests=1):
    """A comparison whose interval leaves the decision to the rank."""
    value = float(lesion - masks.mean())
    return Versus(
        channels=1,
        masks=tuple(Level(loss=float(loss), accuracy=0.0) for loss in masks),
        difference=Interval(value=value, low=value, high=value),
        at_least=int((masks >= lesion).sum()),
        at_most=int((masks <= lesion).sum()),
        tests=tests,
    )


@pytest.mark.parametrize("masks", [1, 20, 39, 100])
@pytest.mark.parametrize("tests", [1, 5])
def test_random_networks_are_called_significant_at_most_at_the_stated_rate(masks, tests):
    """Of 1,000 studies of random networks, those with any call, more or less, in any test."""
    chance, calls, studies = np.random.default_rng(masks), 0, 1000
    for _ in range(studies):
        losses = chance.standard_cauchy((tests, masks + 1))
        answers = {versus(row[0], row[1:], tests=tests).answer for row in losses}
        calls += answers != {"not shown"}
    assert calls <= stats.binom.ppf(0.999, studies, SIGNIFICANT)


@pytest.mark.parametrize("tests", [1, 2, 3, 5, 20])
def test_the_fewest_masks_are_enough_and_one_less_is_not(tests):
    fewest = versus(1.0, np.zeros(1), tests=tests).fewest_masks
    for sign, answer in ((1.0, "more"), (-1.0, "less")):
        assert versus(sign, np.zeros(fewest), tests=tests).answer == answer
        assert versus(sign, np.zeros(fewest - 1), tests=tests).answer == "not shown"


def test_one_random_mask_shows_nothing(make_model, documents):
    chance = torch.Generator().manual_seed(0)
    model, found = make_model("llama"), []
    for _ in range(20):
        drawn = random_like(dict.fromkeys(range(3), (0, 1)), 16, generator=chance)
        networks = FunctionalNetworks(networks={0: drawn}, layout=NETWORKS.layout)
        found.append(ablate(model, documents, networks, random_masks=1, keep=()))
    assert {each.lesion.equal.answer for each in found} == {"not shown"}
    assert "write --random 39" in found[0].verdict()


def test_an_interval_covers_the_truth_as_often_as_it_says():
    """Against the normal distribution: 95 of 100 such intervals hold the mean they are about."""
    chance, held = np.random.default_rng(0), 0
    for trial in range(200):
        documents = chance.normal(0.3, 1.0, size=60)
        found = difference(documents, np.zeros((1, 60)), np.ones(60), seed=trial)
        held += found.low <= 0.3 <= found.high
    # Of 200 with a chance of 0.95 (bootstrap of 60: a little less), all but the last thousandth.
    assert held >= stats.binom.ppf(0.001, 200, 0.93)


def test_what_is_hard_on_both_sides_does_not_widen_the_interval():
    chance = np.random.default_rng(1)
    hard = chance.normal(0, 100, size=50)
    tokens = np.full(50, 1.0)
    found = difference(hard + 2 + chance.normal(0, 0.1, 50), hard[None], tokens, seed=0)
    assert 1.9 < found.low < found.value < found.high < 2.1


def test_the_masks_that_were_drawn_count_as_chance_too():
    masks = np.random.default_rng(2).normal(0, 1, size=(20, 1)) * np.ones((20, 30))
    found = difference(np.full(30, 5.0), masks, np.ones(30), seed=0)
    spread = masks[:, 0].std() / 20**0.5
    assert found.high - found.low == pytest.approx(2 * 1.96 * spread, rel=0.1)


def test_a_file_gives_the_ablation_back(make_model, documents, tmp_path):
    found = ablate(make_model("llama"), documents, NETWORKS, random_masks=2)
    (tmp_path / "ablation.json").write_text(strict_json.dumps(found.to_json()))
    assert load_ablation(tmp_path / "ablation.json") == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not an ablation"),
        ('{"format": "narrowcast.ablation.1"}', "not a complete ablation"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_ablation_is_refused(tmp_path, text, said):
    path = tmp_path / "ablation.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_ablation(path)


def test_a_damaged_number_is_refused(make_model, documents, tmp_path):
    path = tmp_path / "ablation.json"
    value = ablate(make_model("gpt2"), documents, NETWORKS, random_masks=1).to_json()
    value["lesion"]["level"]["loss"] = None
    path.write_text(json.dumps(value))
    with pytest.raises(ConfigError, match=r"lesion.level.loss must be a number, got None"):
        load_ablation(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"components": [2]}, "component must be one of 0, 1, got 2"),
        ({"random_masks": 0}, "random_masks must be a whole number of 1 or more"),
        ({"share": 0.0}, "must be above 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(make_model, documents, change, said):
    with pytest.raises(ConfigError, match=said):
        ablate(make_model("llama"), documents, NETWORKS, **change)


def test_one_document_says_nothing_of_chance(make_model, documents):
    with pytest.raises(ConfigError, match="needs more documents, got 1"):
        ablate(make_model("llama"), documents[:1], NETWORKS)


def test_networks_of_another_model_are_refused(make_model, documents):
    other = FunctionalNetworks(networks={0: {0: (1,)}}, layout=Layout(layers=(0,), width=32))
    with pytest.raises(ConfigError, match="have 32 channels per layer, but this model has 16"):
        ablate(make_model("llama"), documents, other)
