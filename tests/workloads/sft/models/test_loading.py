import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, BertModel

from narrowcast.errors import ConfigError, NarrowcastError, UnsupportedError
from narrowcast.workloads.sft.models.loading import load_model, load_tokenizer


def test_a_folder_is_loaded_as_transformers_loads_it(llama):
    ours, theirs = load_model(str(llama)), AutoModelForCausalLM.from_pretrained(llama)
    assert ours.training
    for (name, one), (other, two) in zip(
        ours.state_dict().items(), theirs.state_dict().items(), strict=True
    ):
        assert name == other
        assert torch.equal(one, two)


def test_a_dtype_is_that_asked_for_or_that_of_the_files(llama):
    assert load_model(str(llama)).dtype == torch.float32
    assert load_model(str(llama), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_on_the_meta_device_only_shapes_are_read(llama):
    (llama / "model.safetensors").rename(llama / "elsewhere.safetensors")
    try:
        model = load_model(str(llama), device="meta")
    finally:
        (llama / "elsewhere.safetensors").rename(llama / "model.safetensors")
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_the_small_model_is_the_same_from_the_same_seed_and_disturbs_no_random_numbers():
    state = torch.random.get_rng_state()
    one, again, other = (load_model("tiny", seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(one.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_the_small_tokenizer_reads_any_text_and_gives_it_back():
    tokenizer = load_tokenizer("tiny")
    text = "naïve 木 🙂\n\t<|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids[-1] == tokenizer.eos_token_id


def test_a_weight_that_the_files_lack_is_refused_and_not_made_up(llama, tmp_path):
    folder = shutil.copytree(llama, tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"have no model\.layers\.1\.mlp\.down_proj\.weight"):
        load_model(str(folder))


def test_a_weight_of_another_shape_is_refused(llama, tmp_path):
    folder = shutil.copytree(llama, tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(31)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
        load_model(str(folder))


def without_weights(folder):
    (folder / "model.safetensors").unlink()


def pickled(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")


def empty(folder):
    for file in folder.iterdir():
        file.unlink()


def cut_off(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def of_no_kind(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "abacus"}))


def not_json(folder):
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (without_weights, "has a config.json but no weights. Put its .safetensors"),
        (pickled, "a pickle, which can run arbitrary code. Save the model as safetensors"),
        (empty, "has no model: there is neither a config.json nor a .gguf file"),
        (cut_off, "cannot be loaded: "),
        (of_no_kind, "cannot be loaded: .*abacus"),
        (not_json, "cannot be loaded: "),
    ],
)
def test_a_folder_without_a_model_is_refused_in_one_line(llama, tmp_path, break_it, message):
    folder = shutil.copytree(llama, tmp_path / "m")
    break_it(folder)
    with pytest.raises(NarrowcastError, match=message) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


def test_an_encoder_is_refused(tmp_path):
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 20}
    BertModel(BertConfig(**shape, intermediate_size=16)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"have no|cannot be loaded"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["./nowhere", "/no/such/folder", "a/b/c", "no\0thing/x", "~nobody/x"]
)
def test_a_path_that_is_not_there_is_refused(name):
    with pytest.raises(ConfigError, match="does not exist"):
        load_model(name)


def test_a_name_on_the_hub_that_cannot_be_reached_says_what_to_write(monkeypatch):
    # As the variable of that name does where it is set before the import; else it is tried again.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UnsupportedError, match=r"write model\.path=FOLDER"):
        load_model("nobody/nothing-of-this-name")
