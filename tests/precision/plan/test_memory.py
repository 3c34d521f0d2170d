"""Which modules are blocks, and what is refused before anything is changed."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import narrowcast as nc
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.hardware import Hardware
from narrowcast.precision.plan.memory import block_names
from narrowcast.workloads.lm.model import build_gpt
from narrowcast.workloads.lm.settings import LmModel

CPU = Hardware(device="cpu", name="a CPU", memory_bytes=None)
GPU = Hardware(device="cuda:0", name="a GPU", memory_bytes=None, capability=(9, 0))


def layer():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))


def gpt():
    settings = LmModel(layers=3, width=16, heads=2)
    return build_gpt(settings, vocab=32, length=8, seed=0, device=torch.device("meta"))


def llama():
    with torch.device("meta"):
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=16,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=3,
                num_attention_heads=2,
            )
        )


def t5():
    config = T5Config(
        vocab_size=16, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, num_decoder_layers=2
    )
    with torch.device("meta"):
        return T5ForConditionalGeneration(config)


BLOCKS = {
    "gpt": (gpt, ["blocks.0", "blocks.1", "blocks.2"]),
    "llama": (llama, [f"model.layers.{i}" for i in range(3)]),
    "t5": (t5, [*(f"encoder.block.{i}" for i in "01"), *(f"decoder.block.{i}" for i in "01")]),
    "torch": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2),
        ["layers.0", "layers.1"],
    ),
    "the model is the list": (
        lambda: nn.Sequential(*(layer() for _ in range(12))),
        [str(i) for i in range(12)],
    ),
}


@pytest.mark.parametrize(("build", "names"), BLOCKS.values(), ids=BLOCKS)
def test_repeated_modules_are_found_wherever_they_lie_prepared_or_not(build, names):
    model = build()
    assert list(block_names(model)) == names
    plan = nc.plan(model, "bf16", hardware=CPU, memory=nc.Memory(activation_checkpointing="blocks"))
    assert list(plan.memory.blocks) == names
    assert "recomputed in the backward pass" in str(plan)
    assert plan.to_json()["memory"]["activation_checkpointing"] == "blocks"


def test_a_prepared_model_has_the_blocks_it_had():
    model = nn.Sequential(*(layer() for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = nc.prepare(model, optimizer, policy="fp16")
    assert block_names(run.model) == ("0", "1", "2")


def test_layers_side_by_side_are_no_blocks_and_globs_say_what_is():
    model = nn.Sequential(
        nn.ModuleDict({"a": layer(), "b": nn.Tanh()}), nn.ModuleList([nn.Linear(4, 4)] * 2)
    )
    with pytest.raises(ConfigError, match=r"no list of several modules .*memory\.blocks"):
        block_names(model)
    assert block_names(model, ["0.a"]) == ("0.a",)
    assert block_names(model, ["0.*", "1.*"]) == ("0.a", "0.b", "1.0")
    with pytest.raises(ConfigError, match=r"matches no module \(did you mean 0\.a"):
        block_names(model, ["0.aa"])
    with pytest.raises(ConfigError, match=r'ModuleList, which is never called itself.*"1\.\*"'):
        block_names(model, ["1"])


REFUSED = {
    "checkpoint=block": ({"activation_checkpointing": "block"}, "did you mean blocks"),
    "offload=moments": ({"offload": ["moments"]}, "must be some of optimizer, activations"),
    "a text": (
        {"activation_checkpointing": "blocks", "blocks": "layers.*"},
        r"Write \['layers\.\*'\]",
    ),
    "blocks of nothing": ({"blocks": ["layers.*"]}, "memory.blocks has no effect"),
}


@pytest.mark.parametrize(("given", "words"), REFUSED.values(), ids=REFUSED)
def test_what_means_nothing_is_refused_with_what_to_write(given, words):
    with pytest.raises(ConfigError, match=words):
        nc.Memory(**given)


@pytest.mark.parametrize("what", ["optimizer", "activations"])
def test_a_cpu_has_nothing_to_offload(what):
    with pytest.raises(UnsupportedError, match=r"needs a GPU, got cpu.*Leave memory\.offload out"):
        nc.plan(gpt(), "bf16", hardware=CPU, memory=nc.Memory(offload=[what]))


def test_a_plan_says_which_bytes_leave_the_device():
    plan = nc.plan(gpt(), "fp32", hardware=GPU, memory=nc.Memory(offload=["optimizer"]))
    parameters = sum(p.numel() for p in gpt().parameters())
    assert plan.memory.on_host == 8 * parameters
    without = nc.plan(gpt(), "fp32", hardware=GPU)
    assert sum(without.bytes.values()) - sum(plan.bytes.values()) == plan.memory.on_host
    assert "in pinned host memory" in str(plan)


def test_what_transformers_compute_again_is_not_computed_a_third_time():
    model = llama()
    model.gradient_checkpointing_enable()
    memory = nc.Memory(activation_checkpointing="blocks")
    with pytest.raises(ConfigError, match="own gradient checkpointing is on"):
        nc.plan(model, "bf16", hardware=CPU, memory=memory)
    model.gradient_checkpointing_disable()
    assert nc.plan(model, "bf16", hardware=CPU, memory=memory).memory.blocks


def test_products_that_are_written_over_cannot_be_kept():
    model = nn.Sequential(layer(), layer())
    with pytest.raises(UnsupportedError, match=r"0\.1 overwrites .*inplace=False"):
        nc.plan(model, "fp32", hardware=CPU, memory=nc.Memory(activation_checkpointing="selective"))
