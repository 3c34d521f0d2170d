"""Networks in a run of the engine: found when it begins, in force, and kept over a resume."""

import json

import pytest
import torch
import torch.nn.functional as F

from narrowcast.config.sections import DataSection, Recipe, Section
from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.hardware import Hardware
from narrowcast.runs import Metric, StepRecord, TaskInfo
from narrowcast.training.checkpoints.checkpoint import latest, load_checkpoint
from narrowcast.training.checkpoints.verify import first_difference
from narrowcast.training.phase_plans import plan_phases
from narrowcast.training.setup import prepare_recipe
from narrowcast.training.task import Task
from narrowcast.training.train_loop import train_loop
from narrowcast.workloads.sft.ica import (
    ICA,
    Percentile,
    functional_networks,
    load_networks,
    save_networks,
)
from narrowcast.workloads.sft.ica.applied import Applied
from narrowcast.workloads.sft.ica.freeze import Freeze
from narrowcast.workloads.sft.ica.settings import IcaSection

SEARCH = {"ica_components": 2, "ica_percentile": 90.0, "ica_component_ids": (0, 1)}


class Sentences:
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(index))


class Listened:
    """Batches that count how often they were gone through."""

    def __init__(self):
        self.times = 0

    def __iter__(self):
        self.times += 1
        data = Sentences()
        return iter([{"input_ids": torch.stack([data[i], data[i + 1]])} for i in range(0, 32, 2)])


class Course:
    """A run of six steps, as a task with networks has it."""

    def __init__(self, model, section, *, policy="fp32"):
        self.listened = Listened()
        self.applied = Applied(model, section, self.listened, seed=0)
        self.model = model
        self.task = Task(
            model=model,
            train_data=Sentences(),
            collate=torch.stack,
            loss=lambda model, ids: model(input_ids=ids, labels=ids).loss,
            evaluate=lambda model: {"loss": 0.0},
            items=lambda ids: ids.numel(),
            gemm_rows=16,
            info=TaskInfo(metrics=(Metric(name="loss"),)),
            hooks=(self.applied.hook,),
        )
        self.recipe = Recipe(
            workload="sft",
            steps=6,
            batch_size=2,
            data=DataSection(),
            model=Section(),
            optimizer={"lr": 0.01, "weight_decay": 0.1},
            precision={"policy": policy},
            checkpoint={"every": 2, "keep": 9},
        )
        anywhere = Hardware(device="cpu", name="any CPU", memory_bytes=2**30)
        plan = plan_phases(self.recipe, model, hardware=anywhere, gemm_rows=16)[0]
        self.prepared = prepare_recipe(self.recipe, self.task, plan=plan)

    def run(self, folder=None, *, steps=6, resume=None):
        records = train_loop(self.prepared, self.task, self.recipe, folder=folder, resume=resume)
        for record in records:
            if isinstance(record, StepRecord) and record.step == steps:
                break
        return self

    def logits(self):
        with torch.no_grad():
            return self.model.eval()(torch.arange(8)[None]).logits


def section(**given):
    return IcaSection(**{**SEARCH, **given})


def test_networks_are_not_wanted_by_default():
    assert not IcaSection().wanted


def test_the_search_is_part_of_a_run_and_not_of_a_plan(make_model):
    course = Course(make_model("llama"), section(mask_mode="lesion"))
    assert course.listened.times == 0
    (line, _) = course.applied.lines()
    assert line == "networks of components 0, 1: found when the run starts"
    course.run(steps=1)
    assert course.listened.times > 0
    assert course.applied.networks.size(0) > 0
    count = sum(map(len, course.applied.networks.channels().values()))
    assert course.task.notices()[0] == f"networks of components 0, 1: {count} of 48 channels"


def test_what_the_search_noticed_is_reported_when_the_run_begins_and_when_it_goes_on(
    make_model, tmp_path
):
    settings = section(freeze=True, max_iter=1)
    course = Course(make_model("llama"), settings)
    assert course.task.notices() == []
    began = course.run(tmp_path, steps=3).task.notices()
    assert any("solutions had not converged" in line for line in began)
    assert all("of 48 channels" in line or line.startswith("functional net") for line in began)
    state = load_checkpoint(latest(tmp_path / "checkpoints"))
    resumed = Course(make_model("llama"), settings).run(tmp_path, resume=state)
    assert resumed.task.notices() == began


def test_a_recipe_sets_which_tokens_are_skipped_and_how_channels_are_clipped(make_model):
    given = {"skip_first": 2, "clip_activations": 95.0, "max_iter": 50}
    course = Course(make_model("llama"), section(freeze=True, **given)).run(steps=1)
    expected = functional_networks(
        make_model("llama"),
        Listened(),
        ica=ICA(components=2, clip_activations=95.0, max_iter=50),
        selector=Percentile(90.0),
        skip_first=2,
    )
    assert course.applied.networks == expected
    assert expected.provenance.signals == "skip_first=2, clip_activations=95"


@pytest.mark.parametrize("mode", ["lesion", "preserve", "scale"])
def test_masks_are_in_force_in_training_and_can_be_lifted(model, mode):
    factor = {"scale": 2.0} if mode == "scale" else {}
    course = Course(model, section(mask_mode=mode, **factor)).run()
    networks = course.applied.networks
    expected = torch.ones(3, 16)
    for layer, channels in networks.channels().items():
        expected[layer, list(channels)] = factor.get("scale", 0.0)
    if mode == "preserve":
        expected = 1 - expected
    assert torch.equal(course.applied.masks.factors(), expected)
    masked = course.logits()
    with course.applied.lifted():
        lifted = course.logits()
    assert not torch.equal(masked, lifted)
    assert torch.equal(course.logits(), masked)
    course.applied.masks.remove()
    assert torch.equal(course.logits(), lifted)


def test_layers_that_are_not_named_are_not_masked(make_model):
    course = Course(make_model("gpt2"), section(mask_mode="preserve", ica_mask_layers="0:2")).run(
        steps=1
    )
    factors = course.applied.masks.factors()
    assert bool((factors[2] == 1).all())
    assert bool((factors[:2] == 0).any(1).all())


@pytest.mark.parametrize("site", ["mlp_output", "down_input"])
@pytest.mark.parametrize("name", ["llama", "llama-lora", "gpt2-lora"])
def test_a_resumed_run_searches_nothing_and_is_the_same_run(make_model, tmp_path, name, site):
    # Adapters learn at both sites; at down_input the checkpoint's B is no longer zero.
    settings = section(mask_mode="lesion", freeze=True, site=site, ica_component_ids=(1,))
    straight = Course(make_model(name), settings).run()
    Course(make_model(name), settings).run(tmp_path, steps=3)
    state = load_checkpoint(latest(tmp_path / "checkpoints"))
    resumed = Course(make_model(name), settings).run(tmp_path, resume=state)
    assert resumed.listened.times == 0
    assert resumed.applied.networks == straight.applied.networks
    assert torch.equal(resumed.applied.masks.factors(), straight.applied.masks.factors())
    assert first_difference(straight.prepared.state_dict(), resumed.prepared.state_dict()) is None


@pytest.mark.parametrize("policy", ["fp32", "bf16, params=bf16, master=split"])
def test_frozen_rows_do_not_move_by_a_bit(make_model, policy):
    model = make_model("llama")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    course = Course(model, section(mask_mode="freeze"), policy=policy).run()
    after = course.prepared.fp32_state_dict()
    for layer, rows in course.applied.networks.channels().items():
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        stayed = (after[name] == before[name]).all(1).nonzero()[:, 0].tolist()
        assert stayed == list(rows)
    assert course.applied.masks is None


def test_a_template_is_taken_as_it_is(make_model, tmp_path):
    path = tmp_path / "networks.json"
    found = Course(make_model("llama"), section(freeze=True)).run(steps=1).applied.networks
    save_networks(found, path)
    given = IcaSection(mask_mode="key", ica_template_path=str(path))
    course = Course(make_model("llama"), given).run(steps=1)
    assert course.listened.times == 0
    assert course.applied.networks == found
    assert "mask_mode=key is an old name of lesion" in course.applied.lines()[1]
    silent = (course.applied.masks.factors() == 0).nonzero().tolist()
    assert silent == [[n, c] for n, some in found.channels([0]).items() for c in some]


def test_a_template_that_has_changed_since_is_refused_when_a_run_goes_on(make_model, tmp_path):
    path = tmp_path / "networks.json"
    first = Course(make_model("llama"), section(freeze=True)).run(steps=1).applied.networks
    save_networks(first, path)
    given = IcaSection(mask_mode="lesion", ica_template_path=str(path))
    Course(make_model("llama"), given).run(tmp_path / "run", steps=3)
    state = load_checkpoint(latest(tmp_path / "run" / "checkpoints"))
    other = section(freeze=True, ica_percentile=80.0)
    save_networks(Course(make_model("llama"), other).run(steps=1).applied.networks, path)
    course = Course(make_model("llama"), given)
    with pytest.raises(CheckpointError, match="changed since the run started"):
        course.run(tmp_path / "run", resume=state)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mask_mode": "lesion", "ica_component_ids": (2,)}, "must be between 0 and 1"),
        (
            {"mask_mode": "lesion", "ica_mask_layers": "1:9"},
            "has layer 8, but the model has 3 layers",
        ),
        ({"mask_mode": "lesion", "ica_mask_layers": "x"}, "separated by commas, got 'x'"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_anything_runs(make_model, given, said):
    with pytest.raises(ConfigError, match=said):
        Applied(make_model("llama"), section(**given), [], seed=0)


def test_on_the_meta_device_nothing_is_touched(make_model):
    model = make_model("llama").to("meta")
    applied = Applied(model, section(mask_mode="lesion"), [], seed=0)
    assert applied.masks is None
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ica_component_ids": (7,)}, "component must be one of 0, 1, got 7"),
        ({"ica_template_path": "missing.json"}, "missing.json cannot be read"),
    ],
)
def test_a_template_without_what_is_asked_for_is_refused(make_model, tmp_path, change, said):
    path = tmp_path / "networks.json"
    save_networks(
        Course(make_model("llama"), section(freeze=True)).run(steps=1).applied.networks, path
    )
    given = IcaSection(**{"mask_mode": "lesion", "ica_template_path": str(path), **change})
    with pytest.raises(ConfigError, match=said):
        Applied(make_model("llama"), given, [], seed=0)


def test_the_folder_gets_the_networks_and_both_measurements(make_model, tmp_path):
    course = Course(make_model("llama"), section(mask_mode="lesion")).run()
    ids = torch.arange(8)[None]

    def evaluate():
        logits = course.logits()[0]
        return {"loss": F.cross_entropy(logits[:-1], ids[0, 1:]).item()}

    course.applied.write(tmp_path, evaluate)
    assert load_networks(tmp_path / "networks.json") == course.applied.networks
    found = json.loads((tmp_path / "masked.json").read_text())
    course.applied.masks.remove()
    assert found["lifted"] == evaluate()
    assert found["masked"] != found["lifted"]


def test_what_is_saved_is_the_model_without_masks(make_model):
    course = Course(make_model("llama"), section(mask_mode="lesion")).run()
    fresh = make_model("llama")
    fresh.load_state_dict(course.model.state_dict())  # no name more, no name less
    with course.applied.lifted():
        expected = course.logits()
    assert torch.equal(fresh.eval()(torch.arange(8)[None]).logits, expected)


def test_a_frozen_adapter_of_a_checkpoint_may_have_learnt(make_model):
    """At down_input the rows of A stay while B learns; a new freeze must refuse such an adapter."""
    model = make_model("llama-lora")
    freeze = Freeze(model, {0: (1,)}, site="down_input")
    state = freeze.state_dict()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight += ".lora_B." in name
    with pytest.raises(ConfigError, match="already has nonzero weights"):
        Freeze(model, {0: (1,)}, site="down_input")
    again = Freeze.resumed(model, {0: (1,)}, state, site="down_input")
    assert again.names == freeze.names
    assert again.drift() == 0.0
