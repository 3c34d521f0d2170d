"""`narrowcast lm-eval`: the results of lm-eval are those of the trained model."""

import json

import pytest
import torch
from click.testing import CliRunner

import narrowcast as nc
from narrowcast.cli.entry import narrowcast as command
from narrowcast.workloads.sft.judge.lm_eval import load_trained

WORDS = (
    "epochs=null", "steps=2", "batch_size=2", "device=cpu", "precision.policy=fp32",
    "eval.every=0", "health.every=0", "model.path=tiny",
)  # fmt: skip
QUESTIONS = [("The sky is", 0), ("Grass is", 1), ("Snow is", 2), ("One and one is", 0)]
CHOICES = ["blue", "green", "white"]


@pytest.fixture
def home(tmp_path):
    rows = [{"prompt": f"Say {n}.", "completion": f"It is {n}."} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    questions = [{"question": text, "answer": answer} for text, answer in QUESTIONS]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, questions)))
    task = {
        "task": "colours", "dataset_path": "json", "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "asked.jsonl")}},
        "output_type": "multiple_choice", "doc_to_text": "{{question}}",
        "doc_to_choice": CHOICES, "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/colours.yaml").write_text(json.dumps(task))  # JSON is YAML
    return tmp_path


def run_lm_eval(*words):
    return CliRunner().invoke(command, ["lm-eval", *map(str, words)])


@pytest.mark.parametrize("tune", ["full", "lora"])
def test_accuracy_is_that_of_the_saved_model(home, tune):
    pytest.importorskip("lm_eval")
    import transformers
    from safetensors.torch import load_file

    run = home / "run"
    words = [*WORDS, f"data.path={home}/rows.jsonl", f"model.tune={tune}"]
    merged = ["lora.merge_adapter_with_base=true"] if tune == "lora" else []
    for _ in nc.train("sft/tiny", [*words, *merged], out=run):
        pass
    folder = run / ("merged_model" if tune == "lora" else "final_model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    right = 0
    for text, answer in QUESTIONS:
        scores = []
        for choice in CHOICES:
            start, whole = (tokenizer(each)["input_ids"] for each in (text, f"{text} {choice}"))
            with torch.no_grad():
                chances = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            scores.append(sum(chances[at - 1, whole[at]] for at in range(len(start), len(whole))))
        right += int(torch.stack(scores).argmax()) == answer
    done = run_lm_eval(run, "colours", "--include-path", home / "tasks", "--device", "cpu")
    assert done.exit_code == 0, done.output
    written = json.loads((run / "lm_eval.json").read_text())
    assert written["results"]["colours"]["acc"] == right / len(QUESTIONS)
    assert f"colours  acc {right / len(QUESTIONS):.4f}" in done.output
    if merged:
        for _ in nc.train("sft/tiny", words, out=home / "adapter"):
            pass
        model, _ = load_trained(str(home / "adapter"), device="cpu", dtype=torch.float32)
        expected = load_file(folder / "model.safetensors")
        for name, weight in expected.items():
            torch.testing.assert_close(model.get_parameter(name), weight)


def test_mistakes_are_one_line(home):
    pytest.importorskip("lm_eval")
    for _ in nc.train(
        "sft/tiny", [*WORDS, f"data.path={home}/rows.jsonl", "model.tune=lora"], out=home / "run"
    ):
        pass
    done = run_lm_eval(home / "run", "no_such_task", "--device", "cpu")
    assert "lm-eval failed" in str(done.exception)
    done = run_lm_eval(home, "colours")
    assert "resolved.json" in str(done.exception)
