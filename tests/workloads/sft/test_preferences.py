import json

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

import narrowcast as nc
from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.runs import EvalRecord, StepRecord
from narrowcast.workloads import build_task, load_recipe
from narrowcast.workloads.sft.objectives import REWARDS, preference_loss
from narrowcast.workloads.sft.settings import DpoSection

SMALL = ("device=cpu", "batch_size=4", "eval_tasks.samples=0", "precision.policy=fp32")
RAW = ("data.template_format=basic", "data.instruction_template={instruction}{response}")
CPU = torch.device("cpu")
PAIRS = [
    {
        "prompt": f"Count to {n}: ",
        "chosen": " ".join("abcdefghij"[: n % 9 + 1]),
        "rejected": "no" * (n % 5 + 1),
    }
    for n in range(40)
]


pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL and transformers


@pytest.fixture
def pairs(tmp_path):
    """Forty pairs of unequal length."""
    return written(tmp_path / "pairs.jsonl", PAIRS)


def written(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def words(model, rows, *more):
    kind = (
        () if any(word.startswith("dpo.loss_type") for word in more) else ("dpo.loss_type=sigmoid",)
    )
    return [f"model.path={model}", f"data.path={rows}", "data.max_seq_length=96", *SMALL, *kind,
            *more]  # fmt: skip


def task_of(model, rows, *more):
    recipe = load_recipe("sft/tiny", words(model, rows, *more)).recipe
    return build_task(recipe, device=CPU)


def moved(model):
    """Change the trained weights as training would, the same way for equal models."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.requires_grad:
                weight += 0.02 * torch.randn(weight.shape, generator=generator)


def our_loss(task, numbers):
    """Return the loss of pairs after the model has moved away from the reference."""
    run = nc.prepare(task.model, torch.optim.SGD(task.model.parameters(), lr=0.1), policy="fp32")
    task.before_first_step(run)
    moved(task.model)
    return task.loss(task.model, task.train_data.__getitems__(numbers))


def their_loss(folder, numbers, out, *, lora=False, **settings):
    """Return TRL's trainer and its loss of pairs after the same move."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    reference = None
    if lora:
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        config = LoraConfig(r=4, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
    else:
        reference = AutoModelForCausalLM.from_pretrained(folder)
    config = DPOConfig(
        output_dir=str(out), report_to=[], use_cpu=True, bf16=False, max_length=96, **settings
    )
    trainer = DPOTrainer(
        model,
        ref_model=reference,
        args=config,
        train_dataset=Dataset.from_list(PAIRS),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    batch = trainer.data_collator([trainer.train_dataset[n] for n in numbers])
    return trainer, batch


@pytest.mark.parametrize(
    ("kind", "smoothing", "flat"),
    [("sigmoid", 0.0, "true"), ("ipo", 0.0, "false"), ("hinge", 0.0, "true"),
     ("robust", 0.1, "false"), ("sigmoid_norm", 0.0, "true"), ("apo_zero", 0.0, "false"),
     ("apo_down", 0.0, "true")],
)  # fmt: skip
def test_loss_gradients_and_rewards_equal_those_of_trl(
    kind, smoothing, flat, llama, pairs, tmp_path
):
    numbers = [3, 8, 17, 22, 31]
    more = (f"dpo.loss_type={kind}", f"dpo.label_smoothing={smoothing}", "dpo.beta=0.3")
    task = task_of(llama, pairs, "data.validation_split=0", f"data.packing={flat}", *RAW, *more)
    ours = our_loss(task, numbers)
    ours.total.backward()
    trainer, batch = their_loss(
        llama, numbers, tmp_path, loss_type=[kind], label_smoothing=smoothing, beta=0.3
    )
    moved(trainer.model.train())
    theirs = trainer.compute_loss(trainer.model, batch)
    theirs.backward()
    torch.testing.assert_close(ours.total, theirs, rtol=1e-5, atol=1e-6)
    grads = {name: weight.grad for name, weight in trainer.model.named_parameters()}
    for name, weight in task.model.named_parameters():
        torch.testing.assert_close(weight.grad, grads[name], rtol=1e-4, atol=1e-6, msg=name)
    for name in REWARDS:
        (measured,) = trainer._metrics["train"][name]
        assert ours.parts[name].item() == pytest.approx(measured, rel=1e-4, abs=1e-6)


def test_adapters_learn_what_they_learn_with_trl(llama, pairs, tmp_path):
    numbers = [1, 2, 5]
    lora = ("model.tune=lora", "lora.lora_r=4", "lora.lora_alpha=8", "lora.lora_dropout=0")
    task = task_of(llama, pairs, "data.validation_split=0", *RAW, *lora)
    trainer, batch = their_loss(llama, numbers, tmp_path, lora=True)
    theirs = dict(trainer.model.named_parameters())
    with torch.no_grad():
        for name, weight in task.model.named_parameters():
            theirs[name].copy_(weight)
    ours = our_loss(task, numbers).total
    ours.backward()
    moved(trainer.model.train())
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=1e-6)
    trained = [n for n, weight in task.model.named_parameters() if weight.requires_grad]
    assert len(trained) == 28
    for name, weight in task.model.named_parameters():
        if weight.requires_grad:
            torch.testing.assert_close(weight.grad, theirs[name].grad, rtol=1e-4, atol=1e-7)


def test_label_smoothing_weighs_the_opposite_preference():
    ratios = torch.tensor([[0.3, -2.0], [0.5, 1.0]], dtype=torch.float64)
    settings = DpoSection(loss_type="sigmoid", beta=0.2, label_smoothing=0.1)
    delta = 0.2 * (ratios[0] - ratios[1])
    expected = -0.9 * torch.sigmoid(delta).log() - 0.1 * torch.sigmoid(-delta).log()
    losses = preference_loss(ratios, torch.ones(2, 2), settings)
    torch.testing.assert_close(losses, expected)


def test_the_cross_entropy_of_chosen_responses_can_be_added(llama, pairs):
    totals = []
    for weight in (0.0, 0.5):
        task = task_of(llama, pairs, f"dpo.sft_weight={weight}")
        totals.append(our_loss(task, [0, 1, 2]).total.item())
    batch = task.train_data.__getitems__([0, 1, 2])
    logits = task.model(batch["input_ids"][:3]).logits.flatten(0, 1)
    nll = torch.nn.functional.cross_entropy(
        logits[batch["places"][0].flatten()], batch["targets"][0].flatten()
    )
    assert totals[1] - totals[0] == pytest.approx(0.5 * nll.item(), rel=1e-5)


@pytest.mark.parametrize("tune", ["full", "lora"])
def test_a_resumed_run_is_the_run_it_would_have_been(tune, llama, pairs, tmp_path):
    more = (f"model.tune={tune}", "steps=4", "checkpoint.every=2", "eval.every=2")
    whole = list(nc.train("sft/tiny", words(llama, pairs, *more), out=tmp_path / "whole"))
    steps = [record for record in whole if isinstance(record, StepRecord)]
    rewards = [record.loss_parts["rewards/chosen"] for record in steps]
    assert rewards[0] == 0.0
    assert rewards[1] != 0.0
    run = nc.train("sft/tiny", words(llama, pairs, *more), out=tmp_path / "part")
    for record in run:
        if isinstance(record, EvalRecord) and record.step == 2:
            assert set(REWARDS) < set(record.metrics)
            break
    run.close()
    list(nc.resume(tmp_path / "part"))
    name = (
        "adapter/adapter_model.safetensors" if tune == "lora" else "final_model/model.safetensors"
    )
    one, other = (load_file(tmp_path / folder / name) for folder in ("whole", "part"))
    assert all(torch.equal(value, other[key]) for key, value in one.items())


def test_more_steps_than_the_reference_was_computed_for_raise(llama, pairs, tmp_path):
    short = words(llama, pairs, "steps=2", "data.validation_split=0.2", "eval.every=0")
    list(nc.train("sft/tiny", short, out=tmp_path / "r"))
    with pytest.raises(CheckpointError, match="reference log-probabilities"):
        list(nc.resume(tmp_path / "r", ["steps=20"]))


def rows_read(llama, tmp_path, rows):
    """Return prompts and responses of the pairs in a file of rows."""
    task = task_of(llama, written(tmp_path / "rows.jsonl", rows), "data.validation_split=0")
    tokenizer, data = AutoTokenizer.from_pretrained(llama), task.train_data.rows
    result = []
    for number in range(len(data)):
        tokens, learnt = data.row(number)
        result.append([tokenizer.decode(tokens[learnt == flag].tolist()) for flag in (False, True)])
    return result


def test_messages_and_texts_with_the_same_content_are_the_same_pairs(llama, tmp_path):
    def said(role, text):
        return {"role": role, "content": text}

    ask, good, bad = (said("user", "Why?"), said("assistant", "So."), said("assistant", "No."))
    plain = {"prompt": "Why?", "chosen": "So.", "rejected": "No."}
    listed = {"prompt": [ask], "chosen": [good], "rejected": [bad]}
    implicit = {"chosen": [ask, good], "rejected": [ask, bad]}
    both = {"prompt": "Why?", "chosen": [ask, good], "rejected": [ask, bad]}
    forms = [rows_read(llama, tmp_path, [row] * 4) for row in (plain, listed, implicit, both)]
    assert forms[0] == forms[1] == forms[2] == forms[3]
    first, second = said("user", "Hm?"), said("assistant", "Ah.")
    longer = {"chosen": [first, second, ask, good], "rejected": [first, second, ask, bad]}
    prompt, answer = rows_read(llama, tmp_path, [longer] * 4)[0]
    assert "Ah." in prompt
    assert answer == forms[0][0][1] == "So.<|im_end|>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "a", "rejected": "b"}, "needs a column called prompt"),
        ({"prompt": "a", "chosen": "b"}, "must have the columns prompt"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "must be text or a list of messages"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "the response is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "the same"),
        (
            {"prompt": "a", "chosen": [{"role": "user", "content": "c"}], "rejected": "b"},
            "must start with the messages",
        ),
    ],
)
def test_bad_pairs_raise_with_what_to_write(row, message, llama, tmp_path):
    path = written(tmp_path / "rows.jsonl", [row] * 4)
    with pytest.raises(ConfigError, match=message):
        task_of(llama, path)


def test_settings_that_do_not_fit_preferences_raise(llama, pairs):
    for word in ("data.loss_on=all", "data.format=messages"):
        with pytest.raises(ConfigError, match=r"dpo\.loss_type needs"):
            task_of(llama, pairs, word)
    with pytest.raises(ConfigError, match=r"needs dpo\.loss_type"):
        task_of(llama, pairs, "dpo.loss_type=none", "dpo.beta=0.2")
    with pytest.raises(ConfigError, match=r"dpo\.loss_type=sigmoid"):
        task_of(llama, pairs, "dpo.loss_type=none")
    with pytest.raises(ConfigError, match="has no label_smoothing"):
        task_of(llama, pairs, "dpo.loss_type=ipo", "dpo.label_smoothing=0.1")


def test_pairs_with_one_prompt_are_not_split(llama, tmp_path):
    rows = [
        {"prompt": f"q{n // 4}", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(40)
    ]
    task = task_of(llama, written(tmp_path / "r.jsonl", rows), "data.validation_split=0.3")
    assert len(task.train_data) == 28
