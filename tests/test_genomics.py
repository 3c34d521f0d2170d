"""Fine-tuners for programs are their recipes, and tell what the records of a run say."""

import itertools

import pytest
import torch
from torch import nn

from narrowcast.errors import ConfigError
from narrowcast.genomics import (
    DomainAdaptation,
    FineTuner,
    GenomeAnnotation,
    GenomeGeneration,
    ProteinFunction,
    SequenceClassification,
    VariantEffect,
)
from narrowcast.precision.plan.tasks import TASKS
from narrowcast.runs import EvalRecord, StepRecord
from narrowcast.workloads import build_task, load_recipe
from narrowcast.workloads.genomics.settings import (
    GenomicData,
    GenomicModelSection,
    Objective,
    Tuning,
)

TUNERS = (
    GenomeAnnotation, VariantEffect, ProteinFunction, GenomeGeneration, DomainAdaptation,
    SequenceClassification,
)  # fmt: skip
SMALL = {
    "epochs": None, "steps": 8, "batch_size": 8, "width": 16, "layers": 1, "device": "cpu",
    "eval.every": 0, "eval.keep_best": False, "eval.patience": 0,
}  # fmt: skip


@pytest.mark.parametrize("tuner", TUNERS)
def test_every_fine_tuner_is_a_recipe_of_its_task(tuner, tmp_path):
    made = tuner(out=tmp_path)
    recipe = load_recipe(f"genomics/{made.recipe}", made.overrides).recipe
    assert recipe.section(Objective).task == tuner.recipe
    assert recipe.precision.task == tuner.task


def test_settings_by_name_reach_their_section(tmp_path):
    names = ["a, b", "1", "true", 'q"z', "ü"]
    tuner = VariantEffect(
        tmp_path / "my data, x.csv", out=tmp_path, test="t.csv", base="runs/base", max_length=512,
        labels=names, backbone="cnn", layerwise_decay=0.5, batch_size=3, label="1",
        **{"optimizer.lr": 1e-5, "data.reverse_complement": True},
    )  # fmt: skip
    recipe = load_recipe("genomics/variant_effect", tuner.overrides).recipe
    data, model = recipe.section(GenomicData), recipe.section(GenomicModelSection)
    assert data.path == str(tmp_path / "my data, x.csv")
    assert (data.test, data.max_length, data.label) == ("t.csv", 512, "1")
    assert (model.path, model.backbone, model.reverse_complement) == ("runs/base", "cnn", False)
    assert recipe.section(Objective).labels == tuple(names)
    assert recipe.section(Tuning).layerwise_decay == 0.5
    assert (recipe.batch_size, recipe.optimizer.lr, data.reverse_complement) == (3, 1e-5, True)


def test_a_name_that_two_sections_have_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.reverse_complement or model\.reverse_complement"):
        VariantEffect(out=tmp_path, reverse_complement=True)


def test_a_name_that_no_section_has_is_refused_when_it_runs(tmp_path):
    with pytest.raises(ConfigError, match="Did you mean"):
        VariantEffect(out=tmp_path / "r", max_lenght=5).run()


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Sequences whose class is which letter they begin with."""
    path = tmp_path_factory.mktemp("genomics") / "t.csv"
    texts = ["".join(letters) for letters in itertools.product("ACGT", repeat=3)]
    rows = [f"{text * 5},{text[0] in 'AC'}" for text in texts]
    path.write_text("\n".join(["sequence,label", *rows]))
    return path


@pytest.fixture(scope="module")
def overflown(table):
    """A run in fp16 whose first scale is far too large, and its records."""
    tuner = VariantEffect(
        table,
        out=table.parent / "fp16",
        **SMALL,
        **{
            "precision.task": None, "precision.policy": "fp16", "health.every": 2,
            "precision.loss_scale.init_scale": 2.0**40, "precision.loss_scale.max_scale": 2.0**40,
            "precision.loss_scale.backoff_factor": 2.0**-8,
        },
    )  # fmt: skip
    records = []
    measured = tuner.fine_tune(records.append)
    return tuner, records, measured


def test_what_is_told_of_precision_is_what_the_records_say(overflown):
    tuner, records, _ = overflown
    steps = [record for record in records if isinstance(record, StepRecord)]
    skipped = [record.step for record in steps if not record.applied]
    assert skipped
    found = tuner.precision_stats()
    history = found.pop("history")
    mode = found.pop("mode")
    scales = [record.loss_scale for record in steps]
    assert "fp16" in mode
    assert found == {
        "enabled": True,
        "scale": scales[-1],
        "current_scale": scales[-1],
        "overflow_count": len(skipped),
        "scale_updates": len([1 for a, b in itertools.pairwise(scales) if a != b]),
        "total_steps": 8,
        "training_steps": 8 - len(skipped),
        "overflow_rate": len(skipped) / 8,
    }
    assert scales[-1] < scales[0] == 2.0**40
    size = sum(p.numel() for p in tuner_model(tuner).parameters())
    assert list(history) == list(range(1, 9))
    for step, told in history.items():
        record = steps[step - 1]
        assert told == {
            "gradient_norm": pytest.approx(record.grad_norm, nan_ok=True),
            "param_count": size,
            "scale": record.loss_scale,
            "overflow_count": len([each for each in skipped if each <= step]),
        }


def tuner_model(tuner):
    recipe = load_recipe(f"genomics/{tuner.recipe}", tuner.overrides).recipe
    return build_task(recipe, device=torch.device("meta")).model


def test_fine_tuning_returns_the_last_evaluation(overflown):
    _, records, measured = overflown
    *_, last = [record for record in records if isinstance(record, EvalRecord)]
    assert measured == last.metrics
    assert "auroc" in measured


def test_in_fp32_there_is_no_scale_and_nothing_is_enabled(table, tmp_path):
    plain = {"precision.task": None, "precision.policy": "fp32"}
    tuner = VariantEffect(table, out=tmp_path / "r", **SMALL, **plain)
    tuner.fine_tune()
    found = tuner.precision_stats()
    assert (found["enabled"], found["scale"], found["overflow_count"]) == (False, 1.0, 0)


class Stranger(nn.Module):
    """A model of somebody else."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 2))

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize("tuner", TUNERS)
def test_a_model_of_somebody_else_is_made_ready_and_learns(tuner, tmp_path):
    torch.manual_seed(0)
    model, made = Stranger(), tuner(out=tmp_path)
    assert isinstance(made, FineTuner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    prepared = made.optimize_for_task(model, optimizer)
    assert model.body[2].p == tuner.dropout
    # It has no blocks that could be computed again, and that is told.
    wants = TASKS[tuner.task].activation_checkpointing != "none"
    assert (
        any("memory.activation_checkpointing" in why for why in made.precision(model).left_out)
        is wants
    )
    x = torch.randn(64, 8)
    wanted = (x[:, 0] > 0).long()
    losses = []
    for _ in range(30):
        with prepared.autocast():
            loss = nn.functional.cross_entropy(model(x).float(), wanted)
        prepared.step(loss)
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_data_that_is_no_file_is_refused_with_what_to_write(tmp_path):
    with pytest.raises(
        ConfigError, match=r"data.path must be a path, got a dict.*to_csv\(path, index=False\)"
    ):
        VariantEffect({"sequence": ["ACGT"]}, out=tmp_path)
