"""What `benchmarks/decompose.py` times on both sides is the same decomposition."""

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

from narrowcast.runs import StepRecord
from narrowcast.workloads import load_recipe
from narrowcast.workloads.decompose.report.schema import Decomposition, Site
from narrowcast.workloads.decompose.settings import (
    DecompositionSection,
    ImportanceSection,
    LossesSection,
    SitesSection,
)
from narrowcast.workloads.decompose.targets.toys import toy_plan

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
NAMES = {
    "stochastic": "stochastic",
    "layerwise": "stochastic_layerwise",
    "subset": "stochastic_subset",
    "pgd_subset": "pgd_subset",
    "faithfulness": "faithfulness",
    "minimality": "minimality",
}


@pytest.fixture
def cases(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from decompose_reference import cases

    return cases


def weighed(objective):
    """Return the coefficients of the reference, by the names that recipes have for the terms."""
    found = {theirs: getattr(objective, ours) for ours, theirs in NAMES.items()}
    return {name: value for name, value in found.items() if value is not None}


def same(case, recipe):
    losses = recipe.section(LossesSection)
    chosen = {name: term.coefficient for name, term in losses.chosen.items()}
    importance = recipe.section(ImportanceSection)
    reference = case.settings
    assert weighed(reference.objective) == chosen
    assert (reference.objective.p, None) == (losses.minimality.p, losses.minimality.p_final)
    assert (reference.importance, reference.hidden) == (importance.kind, importance.hidden)
    assert reference.lr == recipe.optimizer.lr
    assert recipe.optimizer.weight_decay == 0
    assert recipe.clip_norm is None
    return losses


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_toy_is_decomposed_alike(cases, kind):
    for case in cases.toy_cases(kind, bf16=True):
        recipe = load_recipe(case.recipe, case.words).recipe
        same(case, recipe)
        batch = next(case.batches(torch.device("cpu")))
        assert len(batch) == recipe.batch_size
        plan = toy_plan(recipe.model.toy)
        assert batch.shape[1] == plan.probe.shape[1]
        # Sites have other paths there; the last part of each name is the same.
        found = {
            name: size
            for name, _ in case.target().named_modules()
            for pattern, size in case.settings.patterns.items()
            if fnmatchcase(name, pattern)
        }
        assert found == {pattern.rpartition(".")[2]: size for pattern, size in plan.sites.items()}
        assert dict(case.settings.tied) == dict(plan.tied)


def test_a_language_model_is_decomposed_alike(cases, tmp_path):
    pytest.importorskip("transformers")
    small = cases.Size(
        layers=1, width=16, mlp=32, vocabulary=40, components=8, hidden=8, batch=2, length=16,
        tokens=2**12, pretraining=1,
    )  # fmt: skip
    case = cases.language_case(tmp_path, small, device=torch.device("cpu"))
    recipe = load_recipe(case.recipe, case.words).recipe
    losses = same(case, recipe)
    assert (losses.pgd_subset.steps, losses.pgd_subset.step_size) == (1, 1.0)
    assert recipe.section(SitesSection).patterns == dict(case.settings.patterns)
    assert recipe.section(DecompositionSection).clip_components is None
    assert next(case.batches(torch.device("cpu"))).shape == (recipe.batch_size, recipe.data.length)


def test_studies_tell_right_from_wrong(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from decompose_reference.studies import STUDIES

    def found(**changes):
        told = {"alive": (5,), "l0": (0.2,), "identity_error": (0,), "cosine": (0.9998,)}
        told |= {"norm_ratio": (0.998,), **changes}
        site = Site(name="linear1", inputs=5, outputs=2, components=20, **told)
        return Decomposition(
            target="TMS", seeds=(0,), drawn_seed=0, alive_threshold=0.0, sites=(site,)
        )

    right = STUDIES["S4"].right
    assert right(found(), 0) == []
    assert right(found(cosine=(0.998,)), 0) == ["linear1: cosine 0.99800"]
    assert right(found(norm_ratio=()), 0) == ["linear1: norm ratio was not measured"]
    assert right(found(identity_error=(1,), l0=(0.4,)), 0) == [
        "linear1: identity error 1",
        "linear1: L0 0.4",
    ]


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from decompose_reference import kept

    return kept


def test_evaluations_are_in_the_file_until_their_section_ends(kept, tmp_path):
    path = tmp_path / "figures.json"
    path.write_text('{"S4": "known", "S6 so far": []}')
    figures = kept.Figures(path, {"device": "cpu"})
    figures.so_far("S6")([{"step": 5}])
    assert json.loads(path.read_text()) == {
        "S4": "known",
        "S6 so far": [{"step": 5}],
        "device": "cpu",
    }
    figures["S6"] = {"steps": 9}
    assert json.loads(path.read_text()) == {"S4": "known", "S6": {"steps": 9}, "device": "cpu"}


def test_a_run_that_was_left_goes_on_and_one_of_other_settings_is_refused(kept, tmp_path):
    words = ["device=cpu", "steps=4", "eval.every=2", "batch_size=16", "eval_tasks.pgd_steps=0"]
    words += ["model.pretrain_steps=300", "checkpoint.every=2"]

    def steps(words):
        run = kept.records_of("decompose/tms_5-2", words, tmp_path / "run")
        return (record.step for record in run if isinstance(record, StepRecord))

    first = steps(words)
    assert [next(first) for _ in range(3)] == [1, 2, 3]
    first.close()
    assert list(steps(words)) == [1, 2, 3, 4]
    assert list(steps(words)) == [1, 2, 3, 4]  # of the file: it is finished
    with pytest.raises(SystemExit, match="has a run of other settings"):
        list(steps([*words, "seed=1"]))
