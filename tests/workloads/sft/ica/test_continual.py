"""The continual-learning study."""

import json

import pytest
import torch

from narrowcast.cli.entry import run_command
from narrowcast.workloads.sft.data.templates import select_template
from narrowcast.workloads.sft.ica.study.continual import (
    MADE,
    Learned,
    TaskTraining,
    continual,
    load_task,
    summary,
)
from narrowcast.workloads.sft.judge.forgetting import Accuracies
from narrowcast.workloads.sft.models.loading import load_model, tiny_tokenizer

CHANNELS = {0: (1, 5, 9), 2: (4,)}
SHORT = TaskTraining(steps=3, batch_size=4, lr=3e-3, max_new_tokens=3)


@pytest.fixture(scope="module")
def template():
    return select_template("auto", tiny_tokenizer())


@pytest.fixture(scope="module")
def tasks(template):
    return [load_task(name, template, most_questions=4, max_length=64) for name in MADE[:2]]


def learned(method, template, tasks, models):
    def load():
        models.append(load_model("tiny"))
        return models[-1]

    return continual(
        load, template, tasks, method=method, channels=CHANNELS, site="mlp_output", training=SHORT
    )


def test_held_out_questions_are_not_learned(template, tasks):
    prompts = {question.prompt for question in tasks[0].questions}
    rows = [tuple(tasks[0].train.rows.row(n)[0].tolist()) for n in range(len(tasks[0].train))]
    assert len(prompts) == 4
    assert len(rows) == 260 - 4
    assert not any(row[: len(prompt)] == prompt for prompt in prompts for row in rows)


def test_frozen_rows_stay_through_all_tasks(template, tasks):
    models = []
    result = learned("freeze", template, tasks, models)
    assert len(result.accuracies.matrix) == 2
    first = load_model("tiny").model.layers
    for layer, after in enumerate(models[0].model.layers):
        before, now = (each.mlp.down_proj.weight for each in (first[layer], after))
        rows = list(CHANNELS.get(layer, ()))
        assert torch.equal(before[rows], now[rows])
        assert not torch.equal(before, now)


@pytest.mark.parametrize("method", ["lora", "lesion"])
def test_a_method_leaves_no_masks_behind_and_adapters_alone_change(method, template, tasks):
    models = []
    learned(method, template, tasks, models)
    base, first = models[0], load_model("tiny")
    ids = torch.arange(12)[None]
    changed = {
        name
        for name, weight in first.state_dict().items()
        if not torch.equal(weight, base.state_dict().get(name.replace("_proj.", "_proj.base_layer.")
                                                         if method == "lora" else name, weight))
    }  # fmt: skip
    assert (changed == set()) == (method == "lora")
    if method == "lesion":  # nor gates in the saved model
        plain = load_model("tiny")
        plain.load_state_dict(base.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(plain.eval()(ids).logits, base.eval()(ids).logits)


def test_forgetting_is_the_loss_from_the_best():
    matrix = ((0.5, 0.0, 0.0), (0.8, 0.9, 0.1), (0.2, 0.7, 0.6))
    result = Learned(
        method="full", seed=0, tasks=("a", "b", "c"), accuracies=Accuracies(matrix=matrix),
        before=(0.0, 0.0, 0.0), nats=(1.0, 2.0),
    )  # fmt: skip
    assert result.forgetting == pytest.approx((0.6, 0.2))
    head, ((name, average, backward, forgetting, *_),) = summary([result])
    assert (name, average, backward, forgetting) == ("full", "50.0%", "-25.0%", "40.0%")
    assert head[-2:] == ["loss on text, before", "after"]


def test_the_command_takes_files_and_writes_a_page(tmp_path, capsys):
    for number in (1, 2):
        rows = [{"question": f"{n} + {number}?", "answer": str(n + number)} for n in range(20)]
        (tmp_path / f"t{number}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "text.txt").write_text("one and two are three. " * 10)
    words = ["ica", "continual", "tiny", *(str(tmp_path / f"t{n}.jsonl") for n in (1, 2))]
    words += ["--methods", "freeze", "--steps", "1", "--batch-size", "2", "--questions", "2"]
    words += ["--max-new-tokens", "2", "--device", "cpu", "--text", str(tmp_path / "text.txt")]
    out = ["-o", str(tmp_path / "c.json"), "--html", str(tmp_path / "c.html")]
    assert run_command([*words, *out]) == 0
    assert "backward transfer" in capsys.readouterr().out
    (result,) = json.loads((tmp_path / "c.json").read_text())["results"]
    assert result["tasks"] == ["t1", "t2"]
    assert len(result["nats"]) == 2
    assert "freeze: accuracy on each task" in (tmp_path / "c.html").read_text()
    assert run_command([*words, "--methods", "sleep"]) == 2
    assert "must be some of full" in capsys.readouterr().err
