"""Checkpoints in e4m3 with one scale per 128×128 block, as those of DeepSeek-V3 and Qwen3."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import narrowcast as nc
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.precision.quantized_frozen import QuantizedFrozenLayer
from narrowcast.workloads import build_task, load_recipe
from narrowcast.workloads.sft.models.loading import load_model, tiny_tokenizer

CPU = torch.device("cpu")
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
          "weight_block_size": [128, 128]}  # fmt: skip
WORDS = ("model.tune=lora", "lora.lora_dropout=0", "device=cpu", "steps=3", "batch_size=2",
         "eval.every=0", "eval_tasks.samples=0", "data.max_seq_length=64")  # fmt: skip


def in_blocks(weight):
    """Return e4m3 codes and the fp32 scale of each block, in plain torch."""
    down, across = (-(-side // 128) for side in weight.shape)
    filled = torch.zeros(down * 128, across * 128)
    filled[: weight.shape[0], : weight.shape[1]] = weight.float()
    tiles = filled.view(down, 128, across, 128)
    scale = tiles.abs().amax((1, 3)) / 448
    codes = (tiles / scale[:, None, :, None]).reshape(filled.shape)
    return codes[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn).contiguous(), scale


def widened(codes, scale):
    """Return codes times scales in float64, in plain torch."""
    by_element = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes.double() * by_element[: codes.shape[0], : codes.shape[1]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a Llama in blocks, some of them not full, and one with its exact values."""
    folder, plain = tmp_path_factory.mktemp("blocks"), tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=192, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=260, max_position_embeddings=128,
        )
    )  # fmt: skip
    model.to(torch.bfloat16).save_pretrained(folder)
    weights, exact = load_file(folder / "model.safetensors"), {}
    for name, weight in list(weights.items()):
        exact[name] = weight
        if "proj" in name:
            weights[name], weights[f"{name}_scale_inv"] = in_blocks(weight)
            exact[name] = widened(weights[name], weights[f"{name}_scale_inv"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": BLOCKS}))
    tiny_tokenizer().save_pretrained(folder)
    model.float().load_state_dict({name: weight.float() for name, weight in exact.items()})
    model.save_pretrained(plain)
    tiny_tokenizer().save_pretrained(plain)
    return folder, plain


def task_of(folder, *more):
    words = [f"model.path={folder}", "data.path=sums", *WORDS, *more]
    return build_task(load_recipe("sft/tiny", words).recipe, device=CPU)


def test_codes_and_scales_are_those_of_the_file(saved):
    task = task_of(saved[0])
    weights = load_file(saved[0] / "model.safetensors")
    layers = {
        name: layer
        for name, layer in task.model.named_modules()
        if isinstance(layer, QuantizedFrozenLayer)
    }
    assert len(layers) == 14
    for name, layer in layers.items():
        key = name.removeprefix("base_model.model.").removesuffix(".base_layer") + ".weight"
        assert torch.equal(layer.weight_e4m3.view(torch.uint8), weights[key].view(torch.uint8))
        assert torch.equal(layer.weight_scale, weights[f"{key}_scale_inv"])
        exact = widened(weights[key], weights[f"{key}_scale_inv"])
        assert torch.equal(layer.weight.as_subclass(torch.Tensor), exact.to(layer.weight.dtype))


@pytest.mark.parametrize("again", ["false", "true"])
def test_gradients_are_those_of_the_dequantized_model(saved, again):
    grads = []
    for folder in saved:
        task = task_of(folder, f"model.gradient_checkpointing={again}")
        torch.manual_seed(1)
        trained = [(n, p) for n, p in task.model.named_parameters() if p.requires_grad]
        with torch.no_grad():
            for _, weight in trained:
                weight.add_(0.02 * torch.randn(weight.shape))
        embedded = []
        task.model.get_input_embeddings().register_forward_hook(
            lambda _module, _inputs, output, kept=embedded: kept.append(
                output.requires_grad_() if not output.requires_grad else output
            )
        )
        optimizer = torch.optim.SGD([p for _, p in trained], lr=0.0)
        run = nc.prepare(task.model, optimizer, policy="fp32")
        loss = task.loss(task.model, task.train_data.__getitems__([0, 1, 2]))
        embedded[0].retain_grad()
        run.backward(loss)
        grads.append({"input": embedded[0].grad} | {name: p.grad for name, p in trained})
    assert len(grads[0]) == 29
    for name, grad in grads[0].items():
        assert grad.abs().max() > 0
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-4, atol=1e-7)


def test_a_run_trains_resumes_and_merges_into_the_exact_values(saved, tmp_path):
    words = [f"model.path={saved[0]}", "data.path=sums", *WORDS, "precision.policy=bf16",
             "lora.merge_adapter_with_base=true", "checkpoint.every=2"]  # fmt: skip
    run = nc.train("sft/tiny", words, out=tmp_path / "r")
    for record in run:
        if getattr(record, "step", 0) == 2:
            break
    run.close()
    list(nc.resume(tmp_path / "r"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "r" / "merged_model")
    assert getattr(merged.config, "quantization_config", None) is None
    exact = load_file(saved[1] / "model.safetensors")
    adapter = load_file(tmp_path / "r" / "adapter" / "adapter_model.safetensors")
    key = "model.layers.1.mlp.down_proj"
    a, b = (adapter[f"base_model.model.{key}.lora_{part}.weight"] for part in "AB")
    expected = (exact[f"{key}.weight"] + 2 * b @ a).to(torch.bfloat16)
    assert torch.equal(merged.state_dict()[f"{key}.weight"].to(torch.bfloat16), expected)
    plan = json.loads((tmp_path / "r" / "plan.json").read_text())
    assert "block scales" in json.dumps(plan)


def test_full_training_starts_from_the_dequantized_weights(saved):
    model = load_model(str(saved[0]), dtype=torch.float32)
    exact = AutoModelForCausalLM.from_pretrained(saved[1]).state_dict()
    assert all(torch.equal(value, exact[name]) for name, value in model.state_dict().items())
    task = task_of(saved[0], "model.tune=full")
    assert all(weight.requires_grad for weight in task.model.parameters())


def test_what_would_round_twice_raises(saved, tmp_path):
    with pytest.raises(UnsupportedError, match="block scales"):
        task_of(saved[0], "model.base_dtype=e4m3", "model.base_products=fp8")
    with pytest.raises(UnsupportedError, match=r"would round|needs bitsandbytes"):
        task_of(saved[0], "model.base_dtype=nf4")
    config = json.loads((saved[0] / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [64, 64]
    for file in saved[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="one scale per 128×128 block"):
        load_model(str(tmp_path))


def test_scales_that_do_not_fit_the_weight_raise(saved, tmp_path):
    for file in saved[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    weights[name] = weights[name][:1].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="must have one scale per 128×128 block"):
        load_model(str(tmp_path))
