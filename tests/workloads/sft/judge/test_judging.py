"""A judge of a real run of the engine, interrupted and taken up again."""

import json
import math

import pytest
import torch

from narrowcast.config.sections import DataSection, Recipe, Section
from narrowcast.errors import ConfigError
from narrowcast.hardware import Hardware
from narrowcast.runs import EvalRecord, Metric, StepRecord, TaskInfo
from narrowcast.training.checkpoints.checkpoint import latest, load_checkpoint
from narrowcast.training.phase_plans import plan_phases
from narrowcast.training.setup import prepare_recipe
from narrowcast.training.task import Task
from narrowcast.training.train_loop import train_loop
from narrowcast.workloads.sft.data.prepare import prepare_data
from narrowcast.workloads.sft.data.settings import SftData
from narrowcast.workloads.sft.judge.exact_match import answer
from narrowcast.workloads.sft.judge.judging import Judge
from narrowcast.workloads.sft.judge.perplexity import perplexity
from narrowcast.workloads.sft.judge.prompts import questions_from
from narrowcast.workloads.sft.judge.report import read_samples
from narrowcast.workloads.sft.judge.settings import EvalTasksSection

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
STEPS = 4


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "text.txt").write_text(TEXT)
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(30)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def judged(files, tokenizer, template):
    data = prepare_data(SftData(path=str(files / "rows.jsonl")), tokenizer, seed=0)

    def judge(model, **settings):
        section = EvalTasksSection(
            **{
                "perplexity": str(files / "text.txt"),
                "perplexity_length": 64,
                "exact_match": str(files / "rows.jsonl"),
                "exact_match_rows": 3,
                "max_new_tokens": 6,
                "samples": 2,
                "batch_size": 2,
                **settings,
            }
        )
        shown = data.validation.rows
        return Judge(section, template, model=model, steps=STEPS, eval_every=1, shown=shown)

    return judge, data


def run(model, judge, data, folder, *, steps=STEPS, policy="fp32", resume=None):
    def write_results(folder, prepared):
        with torch.no_grad(), prepared.autocast():
            judge.after(prepared.model, folder)

    task = Task(
        model=model,
        train_data=data.train,
        loss=lambda model, batch: model(**batch).loss,
        evaluate=lambda model: {"loss": 0.0, **judge.metrics(model)},
        items=lambda batch: batch["input_ids"].numel(),
        gemm_rows=64,
        info=TaskInfo(metrics=(Metric(name="loss"), *judge.info_metrics())),
        hooks=judge.hooks(),
        write_results=write_results,
    )
    recipe = Recipe(
        workload="sft",
        steps=STEPS,
        batch_size=2,
        data=DataSection(),
        model=Section(),
        optimizer={"lr": 0.01},
        precision={"policy": policy},
        checkpoint={"every": 2, "keep": 9},
        eval={"every": 1},
        health={"every": 0},
    )
    anywhere = Hardware(device="cpu", name="any CPU", memory_bytes=2**30)
    plan = plan_phases(recipe, model, hardware=anywhere, gemm_rows=64)[0]
    prepared = prepare_recipe(recipe, task, plan=plan)
    records = []
    for record in train_loop(prepared, task, recipe, folder=folder, resume=resume):
        records.append(record)
        if isinstance(record, StepRecord) and record.step == steps < STEPS:
            break
    found = [record for record in records if isinstance(record, EvalRecord)]
    return {record.step: record.metrics for record in found}


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_a_run_is_measured_before_and_at_its_end(make_model, judged, tokenizer, tmp_path, policy):
    make, data = judged
    model = make_model()
    base = perplexity(model, tokenizer, TEXT, length=64)
    metrics = run(model, make(model), data, tmp_path, policy=policy)
    assert [set(metrics[step]) - {"loss"} for step in (1, 2, 3)] == [set()] * 3
    assert set(metrics[STEPS]) == {"loss", "text_perplexity", "exact_match"}
    kept = json.loads((tmp_path / "judged.json").read_text())
    close = {"fp32": 1e-6, "fp16": 2**-8}[policy]
    assert kept["before"]["perplexity"]["nats"] == pytest.approx(base.nats, rel=close)
    assert kept["after"]["perplexity"]["perplexity"] == metrics[STEPS]["text_perplexity"]
    assert kept["after"]["exact_match"]["share"] == metrics[STEPS]["exact_match"]
    if policy == "fp32":
        now = perplexity(model, tokenizer, TEXT, length=64)
        assert kept["after"]["perplexity"]["nats"] == pytest.approx(now.nats, rel=1e-6)
        assert not math.isclose(now.nats, base.nats, rel_tol=1e-3)


def test_samples_are_of_the_model_before_and_after(make_model, judged, template, tmp_path):
    make, data = judged
    model = make_model()
    run(model, make(model), data, tmp_path)
    for which, weights in (("before", make_model()), ("after", model)):
        for sample in read_samples(tmp_path):
            prompt = template.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
            (text,) = answer(weights, template, [prompt], max_new_tokens=6, batch_size=1)
            assert getattr(sample, which) == text
    assert all(sample.reference.startswith("#### ") for sample in read_samples(tmp_path))


def test_a_resumed_run_leaves_what_one_without_a_break_does(make_model, judged, tmp_path):
    make, data = judged
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    straight.mkdir(), broken.mkdir()
    model = make_model()
    whole = run(model, make(model, every=2), data, straight)
    model = make_model()
    run(model, make(model, every=2), data, broken, steps=3)
    state = load_checkpoint(latest(broken / "checkpoints"))
    with torch.no_grad():
        other = make_model()
        for parameter in other.parameters():
            parameter += 1  # what it was before comes from the checkpoint
    rest = run(other, make(other, every=2), data, broken, resume=state)
    assert set(whole[2]) == {"loss", "text_perplexity", "exact_match"}
    assert rest == {step: whole[step] for step in (3, 4)}
    for name in ("judged.json", "samples.json"):
        assert (straight / name).read_bytes() == (broken / name).read_bytes()


def test_what_was_measured_is_measured_again_only_where_the_model_is_another(
    make_model, judged, tmp_path
):
    judge, model = judged[0](make_model()), make_model()
    asked = []
    model.register_forward_hook(lambda *_: asked.append(1))
    judge._judgement(model)
    first = len(asked)
    judge._judgement(model)
    assert len(asked) == first + 1  # one look, to see that it is the same
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] += 1
    judge._judgement(model)
    assert len(asked) == 2 * first + 1


def test_nothing_asked_for_is_nothing_done(make_model, judged, tmp_path):
    judge = judged[0](
        make_model(),
        perplexity=None,
        perplexity_length=None,
        exact_match=None,
        exact_match_rows=100,
        samples=0,
    )
    assert (judge.info_metrics(), judge.hooks(), judge.metrics(make_model())) == ((), (), {})
    judge.after(make_model(), tmp_path)
    assert not (tmp_path / "judged.json").exists()


def test_other_files_are_other_data(make_model, judged, files):
    make, model = judged[0], make_model()
    first = make(model).digest()
    assert make(model).digest() == first
    (files / "text.txt").write_text(TEXT.replace("fox", "cat"))
    second = make(model).digest()
    rows = (files / "rows.jsonl").read_text()
    (files / "rows.jsonl").write_text(rows.replace('#### 1"', '#### 2"'))
    assert len({first, second, make(model).digest()}) == 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"every": 3}, None),
        ({"exact_match": "none.jsonl"}, "none.jsonl cannot be read: No such file"),
        ({"exact_match": "a\0b.jsonl"}, "zero byte"),
        ({"perplexity": "none.txt"}, "eval_tasks.perplexity: none.txt: no such file"),
        ({"perplexity_length": 513}, "Write eval_tasks.perplexity_length=512"),
        ({"max_new_tokens": 500}, r"line 1 has a prompt of \d+ tokens.*exceeds the model's 512"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_first_step(
    make_model, judged, settings, said
):
    if said is None:
        judged[0](make_model(), **settings)
        return
    with pytest.raises(ConfigError, match=said):
        judged[0](make_model(), **settings)


def test_a_time_at_which_nothing_is_evaluated_is_refused(make_model, template, files):
    section = EvalTasksSection(perplexity=str(files / "text.txt"), every=6)
    for eval_every in (0, 4):
        with pytest.raises(ConfigError, match=r"eval_tasks.every must be.*Write eval.every=6"):
            Judge(section, template, model=make_model(), steps=9, eval_every=eval_every)


def test_gsm8k_is_asked_as_it_stands(real, template):
    path = real("shared/data/sft/gsm8k_test.jsonl.gz")
    first, *_, last = questions_from(path, template, most=100)
    assert last.location.endswith("line 100")
    text = template.tokenizer.decode(first.prompt)
    assert text.startswith("<|im_start|>user\nJanet")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert first.reference.endswith("#### 18")
