"""Text in the report of a language model: what is written, when, and that training is unchanged."""

import html
from dataclasses import replace

import pytest
import torch

import narrowcast as nc
from narrowcast.errors import ConfigError
from narrowcast.runs import RunFolder, SampleRecord, StepRecord, StrategyRecord, same_trajectory
from narrowcast.training.checkpoints.verify import difference_between
from narrowcast.training.evaluation import sampled_steps
from narrowcast.workloads import build_task
from narrowcast.workloads.lm.report import sections
from narrowcast.workloads.lm.sample import continue_all
from narrowcast.workloads.lm.task import build_language_model

TINY = [
    "model.layers=1", "model.width=16", "model.heads=2", "data.length=32", "batch_size=32",
    "steps=60", "eval.every=20", "precision.policy=fp32", "samples.tokens=8", "health.every=0",
    "data.eval_windows=8",
]  # fmt: skip


def samples(records):
    return [record for record in records if isinstance(record, SampleRecord)]


def test_the_likeliest_tokens_are_those_of_one_pass_per_prefix():
    recipe = nc.load_recipe("quickstart", TINY).recipe
    model = build_language_model(recipe, device=torch.device("cpu")).model.eval()
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4]]
    written = continue_all(model, prompts, count=6, seed=0, temperature=0, vocab=256)
    for prompt, row in zip(prompts, written, strict=True):
        tokens = list(prompt)
        for _ in range(6):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        assert row == tokens[len(prompt) :]


def test_a_run_with_samples_trains_like_one_without():
    with_samples, without = (
        list(nc.train("quickstart", [*TINY, words]))
        for words in ("samples.temperature=1", "samples.tokens=0")
    )
    assert len(samples(with_samples)) == 6
    assert not samples(without)
    others = [record for record in with_samples if not isinstance(record, SampleRecord)]
    assert all(map(same_trajectory, others, without))


@pytest.mark.parametrize("words", [[], ["strategy=hybrid"], ["precision.policy=bf16"]])
def test_a_resumed_run_writes_the_same_text(words, tmp_path):
    words = [*TINY, *words, "checkpoint.every=25"]
    with nc.train("quickstart", words, out=tmp_path / "straight") as run:
        list(run)
    with nc.train("quickstart", words, out=tmp_path / "left") as run:
        for record in run:
            if isinstance(record, StepRecord) and record.step == 43:
                break
    with nc.resume(tmp_path / "left") as run:
        assert run.resumed_from == 25
        list(run)
    assert difference_between(tmp_path / "straight", tmp_path / "left") is None
    with RunFolder.open(tmp_path / "left") as folder:
        assert len(samples(folder.records())) == 6


def test_hybrid_training_samples_the_weights_that_it_selected():
    words = [
        *TINY,
        "strategy=hybrid",
        "samples.temperature=0",
        "eval.every=60",
        "optimizer.lr=0.02",
    ]
    run = nc.train("quickstart", words)
    records = list(run)
    (chosen,) = [r.what for r in records if isinstance(r, StrategyRecord) and r.event == "readout"]
    assert chosen != "trained"
    lm = build_language_model(run.recipe, device=torch.device("cpu"))
    lm.model.load_state_dict(run.prepared.fp32_state_dict())
    drawn = lm.task().samples.draw(lm.model.eval())
    assert drawn == [(r.prompt, r.text) for r in samples(records)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["steps=1000", "eval.every=100"], {200, 300, 400, 500, 700, 800, 900, 1000}),
        (["steps=1000", "eval.every=0"], {1000}),
        (["steps=6", "eval.every=1"], {6}),
        (["steps=1", "eval.every=1"], set()),
    ],
)
def test_text_is_drawn_as_often_as_two_percent_of_the_work_allow(words, expected):
    recipe = nc.load_recipe("quickstart", [*TINY, *words]).recipe
    task = build_task(recipe, device=torch.device("cpu"))
    task = replace(task, samples=replace(task.samples, passes=0.3))
    steps = sampled_steps(recipe, task)
    assert steps == expected
    assert len(steps) * 0.3 <= 0.02 * 3 * recipe.steps


def test_text_is_escaped_in_the_report(tmp_path):
    prompt = "<script>alert('x')</script> & \x00"
    record = SampleRecord(step=3, prompt=prompt, text="</pre><b>\ud800", seconds=0.1)
    (section,) = sections(tmp_path, [record])
    assert "<script>" not in section.html
    assert "<b>" not in section.html
    assert html.escape("<script>alert('x')</script> & \N{REPLACEMENT CHARACTER}") in section.html
    section.html.encode()


def test_the_report_shows_the_text_of_every_sampled_step(tmp_path):
    words = [*TINY, 'samples.prompts=["def f(x):"]']
    with nc.train("quickstart", words, out=tmp_path / "run") as run:
        records = list(run)
    page = (tmp_path / "run/report.html").read_text()
    assert "Samples of text" in page
    assert {record.prompt for record in samples(records)} == {"def f(x):"}
    assert len(samples(records)) == 3
    assert "def f(x):" in page


def test_a_model_that_predicts_nan_ends_its_text():
    recipe = nc.load_recipe("quickstart", TINY).recipe
    model = build_language_model(recipe, device=torch.device("cpu")).model
    torch.nn.init.constant_(model.norm.weight, float("nan"))
    assert continue_all(model, [[1, 2]], count=4, seed=0, temperature=1, vocab=256) == [[]]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (['samples.prompts=["a prompt of more than 24 bytes"]'], "at most 24 tokens"),
        (['samples.prompts=["x"]', "data.text=synthetic"], "samples.prompts needs text"),
        (["samples.temperature=-1"], "temperature"),
    ],
)
def test_samples_that_cannot_be_drawn_raise(words, answer):
    with pytest.raises(ConfigError, match=answer):
        nc.train("quickstart", [*TINY, *words])
