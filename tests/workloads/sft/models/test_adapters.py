"""Kinds of adapters and noise, against their published formulas."""

import json
import math

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.neftune import neftune_post_forward_hook

import narrowcast as nc
from narrowcast.errors import UnsupportedError
from narrowcast.workloads import build_task, load_recipe
from narrowcast.workloads.sft.models.base import add_embedding_noise

SMALL = ("device=cpu", "steps=3", "batch_size=4", "eval.every=0", "eval_tasks.samples=0",
         "precision.policy=fp32", "optimizer.lr=1e-2", "data.max_seq_length=96")  # fmt: skip
LORA = ("model.tune=lora", "lora.lora_r=4", "lora.lora_alpha=6", "lora.lora_dropout=0")


@pytest.fixture
def words(llama, tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": f"Count to {n}.", "completion": "abcdefghij"[: n % 9 + 1]} for n in range(20)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return lambda *more: [f"model.path={llama}", f"data.path={path}", *SMALL, *more]


@pytest.mark.parametrize("kind", ["use_rslora", "use_dora"])
def test_trained_adapters_are_the_published_formula(kind, words, llama, tmp_path):
    run = nc.train("sft/tiny", words(*LORA, f"lora.{kind}=true"), out=tmp_path / "r")
    list(run)
    weights = run.prepared.model.state_dict()
    plain = AutoModelForCausalLM.from_pretrained(llama)
    scale = 6 / (math.sqrt(4) if kind == "use_rslora" else 4)
    changed = 0
    for name, layer in plain.named_modules():
        key = f"base_model.model.{name}"
        if f"{key}.lora_A.default.weight" not in weights:
            continue
        a, b = (weights[f"{key}.lora_{part}.default.weight"] for part in "AB")
        value = layer.weight + scale * b @ a
        if kind == "use_dora":  # arXiv 2402.09353, equation 5: norms of rows, as the layer has them
            magnitude = weights[f"{key}.lora_magnitude_vector.default.weight"]
            value = magnitude[:, None] * value / value.norm(dim=1, keepdim=True)
            changed += not torch.equal(magnitude, layer.weight.norm(dim=1))
        layer.weight = nn.Parameter(value)
    assert changed == (14 if kind == "use_dora" else 0)
    ids = torch.arange(30)[None]
    saved = AutoModelForCausalLM.from_pretrained(llama)
    saved = PeftModel.from_pretrained(saved, tmp_path / "r" / "adapter").eval()
    with torch.no_grad():
        expected = plain(ids).logits
        torch.testing.assert_close(run.prepared.model.eval()(ids).logits, expected)
        torch.testing.assert_close(saved(ids).logits, expected)


def test_dora_raises_where_it_has_no_plain_weights(words):
    recipe = load_recipe("sft/tiny", words(*LORA, "lora.use_dora=true", "model.base_dtype=e4m3"))
    with pytest.raises(UnsupportedError, match=r"lora\.use_dora=true is not supported"):
        build_task(recipe.recipe, device=torch.device("cpu"))


def test_embedding_noise_is_that_of_transformers(llama):
    ids = torch.arange(24).view(2, 12)
    outputs = []
    for ours in (True, False):
        model = AutoModelForCausalLM.from_pretrained(llama).train()
        if ours:
            add_embedding_noise(model, 5.0)
        else:
            embedding = model.get_input_embeddings()
            embedding.neftune_noise_alpha = 5.0
            embedding.register_forward_hook(neftune_post_forward_hook)
        torch.manual_seed(7)
        outputs.append(model(ids).logits)
        calm = model.eval()(ids).logits
        assert not torch.allclose(outputs[-1], calm)
    assert torch.equal(*outputs)
    torch.testing.assert_close(calm, AutoModelForCausalLM.from_pretrained(llama).eval()(ids).logits)


def test_a_run_with_noise_is_resumed_bit_exactly(words, tmp_path):
    noisy = words(*LORA, "model.neftune_noise_alpha=5", "checkpoint.every=2")
    whole = [r.loss for r in nc.train("sft/tiny", noisy, out=tmp_path / "a") if hasattr(r, "loss")]
    run = nc.train("sft/tiny", noisy, out=tmp_path / "b")
    next(record for record in run if getattr(record, "step", 0) == 2 and hasattr(record, "loss"))
    run.close()
    rest = [r.loss for r in nc.resume(tmp_path / "b") if hasattr(r, "loss")]
    assert rest
    assert rest == whole[-len(rest) :]
    calm = [r.loss for r in nc.train("sft/tiny", words(*LORA), out=tmp_path / "c")
            if hasattr(r, "loss")]  # fmt: skip
    assert calm != whole
