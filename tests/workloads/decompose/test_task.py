"""Decompositions through the trainer: what is refused, resumed, clipped, found and left behind."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import narrowcast as nc
from narrowcast.errors import ConfigError
from narrowcast.runs import EvalRecord, StepRecord
from narrowcast.workloads import build_task, load_recipe
from narrowcast.workloads.decompose.component_files import (
    COMPONENTS,
    Components,
    likeness,
    read_components,
)
from narrowcast.workloads.decompose.components.sites import Site
from narrowcast.workloads.decompose.evaluation.toy_table import SiteTable
from narrowcast.workloads.decompose.judging import DecompositionResult, FiringCounts, SiteResult
from narrowcast.workloads.decompose.model import clip_each_seed
from narrowcast.workloads.decompose.report import schema

TMS = "decompose/tms_5-2"
SMALL = ("batch_size=64", "eval.every=0", "model.pretrain_batch_size=256",
         "model.pretrain_steps=800", "eval_tasks.batches=1", "eval_tasks.pgd_steps=2",
         "decomposition.warmup_steps=5", "health.every=0")  # fmt: skip
ADVERSARIES = (
    "losses.pgd_subset.coefficient=0.5", "losses.pgd_subset.steps=2",
    "losses.pgd_subset.early_steps=1", "losses.pgd_subset.early_until=0.5",
    "losses.persistent_pgd.coefficient=0.5", "losses.persistent_pgd.every=2",
    "decomposition.clip_components=0.01", "decomposition.clip_importance=1.0",
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(folder, *words, recipe=TMS):
    return list(nc.train(recipe, [*SMALL, *words], out=folder))


@pytest.fixture(scope="module")
def finished(one_thread, tmp_path_factory):
    """A folder of a run of two seeds, and its records."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    words = ("steps=4", "eval.every=2", "health.every=2", "decomposition.seeds=2")
    return folder, trained(folder, *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.toy="], "one target"),
        (["model.toy=tms_5"], "model.toy must be"),
        (["model.path=somewhere"], "one target"),
        (["sites.names=[linear1]"], "names need components"),
        (["sites.names=[linear1, linear2]", "sites.components=[3]"], "one per name"),
        (
            ["sites.names=[linear1, linear1]", "sites.components=[3, 4]"],
            "linear1 is listed 2",
        ),
        (["sites.names=[nowhere]", "sites.components=3"], "matches no module"),
        (["sites.names=[linear1, linear*]", "sites.components=3"], "do not overlap"),
        (["sites.components=100000"], "must be between 1"),
        (["losses.pgd.steps=3"], "no coefficient"),
        (["losses.minimality.coefficient=0"], "coefficient"),
        (["eval_tasks.groups=[nothing*]"], "eval_tasks.groups must match"),
        (["memory.activation_checkpointing=blocks"], r"losses\.stochastic\.recompute=true"),
        (["importance.hidden=[]"], "importance.hidden"),
        (["importance.kind=scalar"], "importance.kind"),
        (["importance.blocks=2"], "only for kind=global_transformer"),
        (["data.text=[some.txt]"], "cannot be set with model.toy=tms_5-2"),
        (["data.length=64"], "Leave data.length out"),
        (["importance.kind=global_transformer", "importance.hidden=[8, 8]"], "one hidden width"),
        (["model.pretrain_steps=1"], "did not learn its task"),
        (["losses.pgd.coefficient=1", "losses.pgd.early_steps=2"], "early_steps"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(words, said):
    with pytest.raises(ConfigError, match=said):
        build_task(load_recipe(TMS, [*SMALL, *words]).recipe, device=torch.device("cpu"))


def test_a_loss_without_terms_is_refused():
    names = ("minimality", "stochastic", "stochastic_layerwise")
    words = [f"losses.{name}.coefficient=null" for name in names]
    with pytest.raises(ConfigError, match="no loss has a coefficient"):
        load_recipe(TMS, words)


def test_a_term_that_a_recipe_sets_is_left_out_by_a_coefficient_of_null(tmp_path):
    words = ["losses.stochastic_layerwise.coefficient=null", "steps=1", "checkpoint.every=1"]
    (told,) = (r for r in trained(tmp_path / "run", *words) if isinstance(r, StepRecord))
    assert told.loss_parts.keys() == {"minimality", "stochastic"}
    again = [r for r in nc.resume(tmp_path / "run", ["steps=2"]) if isinstance(r, StepRecord)]
    assert again[-1].loss_parts.keys() == told.loss_parts.keys()


@pytest.mark.parametrize("words", [(), ADVERSARIES], ids=["plain", "adversaries"])
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(tmp_path, words):
    asked = ("steps=12", "checkpoint.every=6", "decomposition.seeds=2", *words)
    whole = trained(tmp_path / "whole", *asked)
    run = nc.train(TMS, [*SMALL, *asked], out=tmp_path / "cut")
    before = []
    for record in run:
        before.append(record)
        if isinstance(record, StepRecord) and record.step == 6:
            break
    run.close()
    after = list(nc.resume(tmp_path / "cut"))
    one, other = (load_file(tmp_path / name / COMPONENTS) for name in ("whole", "cut"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    losses = [record.loss for record in whole if isinstance(record, StepRecord)]
    again = {r.step: r.loss for r in (*before, *after) if isinstance(r, StepRecord)}
    assert losses == list(again.values())


def test_each_seed_is_clipped_as_torch_clips_a_model():
    torch.manual_seed(0)
    together = [nn.Parameter(torch.randn(3, 4, 5)), nn.Parameter(torch.randn(3, 7))]
    for parameter in together:
        parameter.grad = torch.randn_like(parameter) * torch.tensor([0.001, 1.0, 50.0]).view(
            3, *[1] * (parameter.dim() - 1)
        )
    alone = []
    for seed in range(3):
        parts = [nn.Parameter(p.detach()[seed].clone()) for p in together]
        for part, parameter in zip(parts, together, strict=True):
            part.grad = parameter.grad[seed].clone()
        nn.utils.clip_grad_norm_(parts, 0.5)
        alone.append(parts)
    clip_each_seed(together, 0.5)
    for seed, parts in enumerate(alone):
        for part, parameter in zip(parts, together, strict=True):
            torch.testing.assert_close(parameter.grad[seed], part.grad)


def test_a_finished_run_leaves_components_that_add_up_and_a_page(finished):
    folder, records = finished
    told = [record.metrics for record in records if isinstance(record, EvalRecord)]
    assert [*told[-1]][:2] == ["identity_error", "right"]
    found = schema.read(folder)
    assert [site.name for site in found.sites] == ["linear1", "linear2"]
    assert found.seeds == (0, 1)
    assert len(found.pgd) == 1
    kept = load_file(folder / COMPONENTS)
    weight = kept["decomposition.target.linear1.weight"]
    left = weight.mT - kept["sites/linear1/V"] @ kept["sites/linear1/U"]
    turned = weight - kept["sites/linear2/V"] @ kept["sites/linear2/U"]
    squares = (left.square().sum((1, 2)) + turned.square().sum((1, 2))) / 20
    assert squares.mean().item() == pytest.approx(told[-1]["faithfulness"], rel=1e-5)
    torch.testing.assert_close(kept["sites/linear2/V"], kept["sites/linear1/U"].mT)
    second = read_components(folder, seed=1)["linear1"]
    assert second.v.shape == (5, 20)
    # The page, the numbers and the file have the same components for alive.
    counts = [kept[f"sites/{site.name}/alive"].sum(1).tolist() for site in found.sites]
    assert counts == [list(site.alive) for site in found.sites]
    assert [len(site.largest) for site in found.sites] == [site.alive[0] for site in found.sites]
    page = (folder / "report.html").read_text()
    assert "linear2" in page


def test_components_of_the_first_sites_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr("narrowcast.workloads.decompose.results.MOST_COMPARED", 1)
    trained(tmp_path / "run", "steps=1")
    first, second = schema.read(tmp_path / "run").sites
    assert first.largest
    assert not second.largest


def test_components_are_kept_with_every_digit_they_were_trained_with(tmp_path):
    policy = "precision.policy=bf16,params=bf16,master=split"
    # Not two dimensions: pairs may be complex numbers, which are left as they are.
    trained(tmp_path / "run", "steps=2", "model.toy=tms_4-3", policy)
    kept = load_file(tmp_path / "run" / COMPONENTS)
    for name in ("sites/linear1/V", "sites/linear2/U"):
        assert not torch.equal(kept[name], kept[name].bfloat16().to(kept[name].dtype))


FOUND = {
    "in superposition": ("steps=800", "optimizer.lr=1e-2", "batch_size=512"),
    "with room for all": (
        "steps=1300", "model.toy=tms_5-5", "model.pretrain_steps=3000", "sites.components=5",
        "sites.tied=false", "batch_size=1024", "losses.faithfulness.coefficient=1.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", FOUND.values(), ids=FOUND)
def test_the_features_of_a_toy_are_found(tmp_path, words):
    """In fewer steps than the recipe has; all seeds of both in full: benchmarks/decompose.py."""
    trained(tmp_path / "run", "decomposition.seeds=2", "decomposition.warmup_steps=200", *words)
    found = schema.read(tmp_path / "run")
    for site in found.sites:
        assert site.identity_error == (0, 0)
        assert site.alive == (5, 5)
        assert min(site.cosine) > 0.99
        assert all(0.97 < ratio < 1.03 for ratio in site.norm_ratio)
        assert all(0.15 < count < 0.35 for count in site.l0)
    assert all(verdict.right for verdict in found.verdicts)


def test_runs_are_compared_component_by_component(finished, tmp_path):
    from click.testing import CliRunner

    from narrowcast.workloads.decompose.command import decompose

    folder = str(finished[0])
    same = CliRunner().invoke(decompose, ["compare", folder, folder, "--json"])
    assert same.exit_code == 0, same.output
    for row in json.loads(same.output):
        assert row["mmcs"] == pytest.approx([1.0, 1.0])
    trained(tmp_path / "other", "steps=1", "decomposition.seeds=2")
    other = CliRunner().invoke(decompose, ["compare", folder, str(tmp_path / "other")])
    assert "linear1" in other.output
    missing = CliRunner().invoke(decompose, ["compare", folder, folder, "--seed", "7"])
    assert isinstance(missing.exception, ConfigError)


def test_decompositions_of_different_targets_are_not_compared(finished, tmp_path):
    trained(tmp_path / "run", "steps=1", "seed=1")
    first, *others = (
        read_components(folder, seed=seed)
        for folder, seed in ((finished[0], 0), (finished[0], 1), (tmp_path / "run", 0))
    )
    assert likeness(first, first)[0]["mmcs"] == pytest.approx([1.0, 1.0])
    for other in others:
        with pytest.raises(ConfigError, match="linear1 has different weights in the two targets"):
            likeness(first, other)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.pretrain_steps=3"], r"pretrain_steps=3 and model\.pretrain_batch_size=256"),
        (
            ["model.toy=induction", "model.pretrain_steps=1", "model.pretrain_batch_size=2"],
            r"pretrain_steps=1 and model\.pretrain_batch_size=2",
        ),
    ],
)
def test_refusal_of_an_untrained_toy_names_its_steps_and_batch_size(words, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        trained(tmp_path / "run", *words)


def test_verdict_says_why_a_toy_does_not_match_the_ground_truth(finished):
    for verdict in schema.read(finished[0]).verdicts:
        assert not verdict.right
        assert "wrong by more than 0.2" in verdict.said
        assert "a component of linear1 has cosine" in verdict.said


def test_right_components_have_no_faults_and_wrong_ones_are_named():
    table = SiteTable(
        errors=torch.tensor([0, 0, 2, 0]),
        alive=torch.tensor([5] * 4),
        least_cosine=torch.tensor([1.0, 0.9, 1.0, 1.0]),
        norm_ratio=torch.tensor([1.0, 1.0, 1.0, 1.2]),
    )
    site = Site("linear1", "linear", 5, 2, 20, bias=False)
    counts = FiringCounts(4, 20, threshold=0.1, device="cpu")
    found = DecompositionResult(
        sites=(SiteResult(site=site, counts=counts, table=table),),
        divergences={},
        faithfulness=torch.zeros(4),
        tolerance=0.2,
        language={},
    )
    assert found.right.tolist() == [True, False, False, False]
    assert found.faults(0) == []
    said = [found.faults(seed) for seed in (1, 2, 3)]
    assert [len(each) for each in said] == [1, 1, 1]
    for (fault,), part in zip(said, ("cosine 0.900", "2 importances", "1.200 times"), strict=True):
        assert part in fault


def test_three_runs_are_compared_pair_by_pair(finished):
    from click.testing import CliRunner

    from narrowcast.workloads.decompose.command import decompose

    folder = str(finished[0])
    same = CliRunner().invoke(decompose, ["compare", folder, folder, folder, "--json"])
    for row in json.loads(same.output):
        assert (row["mmcs"], row["lowest"]) == pytest.approx((1.0, 1.0))
        assert row["in_all"] == row["alive"][0] == row["alive"][2]
        assert 0 < row["chance"] < 1
    text = CliRunner().invoke(decompose, ["compare", folder, folder, folder]).output
    assert [line.split()[:2] for line in text.splitlines()[1:]] == [
        ["linear1", "1.0000"],
        ["linear2", "1.0000"],
    ]


def test_chance_is_the_similarity_of_random_components():
    alone = torch.arange(500) == 0
    one = Components(v=torch.ones(3, 500), u=torch.ones(500, 3), alive=alone)
    every = Components(v=one.v, u=one.u, alive=~alone)
    (row,) = likeness({"a": one}, {"a": every})
    assert row["mmcs"] == pytest.approx([1.0, 1.0])
    # In three dimensions, the cosine of two random directions is uniform in [-1, 1]. The best of
    # 499 products of two such cosines is near 1, and their mean is near 0.
    assert row["chance"][0] > 0.8
    assert row["chance"][1] == pytest.approx(0, abs=0.06)


def test_a_shuffled_target_has_the_same_numbers_elsewhere(tmp_path):
    words = [*SMALL, "decomposition.seeds=2"]
    plain, shuffled = (
        build_task(load_recipe(TMS, [*words, *more]).recipe, device=torch.device("cpu"))
        for more in ([], ["model.shuffle=true"])
    )
    one, other = (task.model.decomposition.target.state_dict() for task in (plain, shuffled))
    for seed in range(2):
        before, after = one["linear1.weight"][seed], other["linear1.weight"][seed]
        assert not torch.equal(before, after)
        assert torch.equal(before.flatten().sort().values, after.flatten().sort().values)
    assert torch.equal(other["linear2.weight"], other["linear1.weight"].mT)
    assert torch.equal(one["linear2.bias"], other["linear2.bias"])


def test_a_run_starts_from_the_components_of_another(finished, tmp_path):
    folder = finished[0]
    words = ["decomposition.seeds=2", f"decomposition.start_from={folder}", "steps=1"]
    task = build_task(load_recipe(TMS, [*SMALL, *words]).recipe, device=torch.device("cpu"))
    stored = load_file(folder / COMPONENTS)
    assert torch.equal(task.model.decomposition.components["linear1"].V, stored["sites/linear1/V"])
    for name, weight in task.model.importance.state_dict().items():
        assert torch.equal(weight, stored[f"importance.{name}"])
    trained(tmp_path / "run", *words, "optimizer.lr=1e-9")
    after = load_file(tmp_path / "run" / COMPONENTS)["sites/linear1/V"]
    torch.testing.assert_close(after, stored["sites/linear1/V"], rtol=0, atol=1e-6)  # no warm-up


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seed=3"], "has not decomposed these weights of linear1"),
        (["sites.components=7"], "has other components or importance functions"),
        (["importance.hidden=[3]"], "has other components or importance functions"),
        (["decomposition.start_from=nowhere"], "has no components.safetensors"),
    ],
)
def test_a_start_that_does_not_fit_raises(finished, words, said):
    words = ["decomposition.seeds=2", f"decomposition.start_from={finished[0]}", *words]
    with pytest.raises(ConfigError, match=said):
        build_task(load_recipe(TMS, [*SMALL, *words]).recipe, device=torch.device("cpu"))
