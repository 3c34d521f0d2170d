"""All pieces of a model at once, and what people do with such a model besides training it.

On a CPU the kernels run in Triton's interpreter, in fp32, as in `test_elementwise.py`.
"""

import copy

import pytest
import torch
from torch.optim import SGD

import narrowcast as nc

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.interpreted

ALL = ["loss", "mask", "rms_norm", "rotary", "swiglu"]
HAVE = {
    "Llama": ALL, "Mistral": ALL, "Qwen2": ALL, "Qwen3": ALL, "Gemma": ALL, "Gemma2": ALL[1:],
    "Gemma3Text": ALL, "Phi": ["loss", "gelu", "layer_norm", "mask", "rotary"], "Phi3": ALL,
    "SmolLM3": ALL, "Olmo": ["loss", "mask", "rotary", "swiglu"], "Olmo2": ALL,
    "GPT2": ["loss", "gelu", "layer_norm", "mask"],
}  # fmt: skip
SHORT = ("Mistral", "Qwen2", "Qwen3", "Gemma", "Phi", "Phi3", "Olmo", "Olmo2", "GPT2")
"""Families whose blocks are all alike: what two of them do to one another, Llama's show."""
TERMS = 128
"""More than are summed anywhere in these models, in a layer; there are six layers to go through,
and the interpreter cuts where a GPU rounds to nearest."""
ROUNDINGS = 6 * TERMS * 2.0**-23
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ONE_BLOCK = {"num_hidden_layers": 1, "num_key_value_heads": 4}
"""With a key for each query, where the interpreter has less to do: two blocks share keys."""
TIED = {
    "Llama": ONE_BLOCK | {"tie_word_embeddings": True},
    "Qwen3": {"tie_word_embeddings": True},
    "GPT2": {},
}
"""Families whose head is their embedding: as they come, or if asked to."""


def fused(model, pieces):
    trained = [p for p in model.parameters() if p.requires_grad]
    return nc.prepare(model, SGD(trained, 0.1), policy="fp32", fuse=pieces)


def trained_once(model, pieces, batch):
    run = fused(model, pieces)
    tokens, labels = batch
    with run.autocast():
        loss = model(tokens, labels=labels, use_cache=False).loss
    assert run.step(loss).applied
    return run


@pytest.fixture
def batch(sentences):
    """A few tokens of each sample, of which the first, and of one the last, are to be ignored."""
    return tuple(each[:, [2, 3, 4, 8]].to(DEVICE) for each in sentences)


@pytest.fixture
def pair(language_model):
    """Two of a family alike, one to prepare and one to compare it with."""

    def make(family, **settings):
        if family in SHORT:
            settings |= {"n_layer": 1} if family == "GPT2" else ONE_BLOCK
        return tuple(language_model(family, **settings).to(DEVICE) for _ in range(2))

    return make


def grads_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_grads(model, plain):
    found, expected = grads_of(model), grads_of(plain)
    assert found.keys() == expected.keys()
    assert found
    for name, grad in expected.items():
        assert (found[name] - grad).abs().max() <= ROUNDINGS * grad.abs().max(), name


@pytest.mark.parametrize("family", HAVE)
def test_all_pieces_at_once_give_the_loss_and_gradients_of_none(pair, batch, family):
    model, plain = pair(family)
    fused(model, HAVE[family])
    tokens, labels = batch
    losses = [each(tokens, labels=labels).loss for each in (model, plain)]
    for loss in losses:
        loss.backward()
    assert abs(losses[0] - losses[1]) <= ROUNDINGS * losses[1]
    assert_same_grads(model, plain)


@pytest.mark.parametrize(
    ("family", "reentrant"),
    [("Llama", False), ("Llama", True), ("Gemma3Text", True), ("GPT2", True)],
)
def test_checkpointed_blocks_give_the_same_gradients(pair, batch, family, reentrant):
    model, plain = pair(family)
    for each in (model, plain):
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()  # what a reentrant checkpoint asks of its inputs
    plain.enable_input_require_grads()
    fused(model, HAVE[family])
    tokens, labels = batch
    for each in (model, plain):
        each(tokens, labels=labels, use_cache=False).loss.backward()
    assert_same_grads(model, plain)


@pytest.mark.parametrize("family", TIED)
def test_a_tied_head_stays_tied_and_gets_both_gradients(pair, batch, family):
    model, plain = pair(family, **TIED[family])
    fused(model, HAVE[family])
    for each in (model, plain):
        assert each.get_output_embeddings().weight is each.get_input_embeddings().weight
        each(batch[0], labels=batch[1]).loss.backward()
    assert_same_grads(model, plain)


@pytest.mark.parametrize("family", ["Llama", "Gemma3Text"])
def test_what_is_trained_generates_and_is_saved_as_any_other(pair, batch, family, tmp_path):
    model, plain = pair(family, **ONE_BLOCK)
    trained_once(model, HAVE[family], batch)
    model.eval()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).to(DEVICE)
    assert type(again) is type(plain)
    kept, loaded = model.state_dict(), again.state_dict()
    assert kept.keys() == loaded.keys() == plain.state_dict().keys()
    assert all(torch.equal(kept[name], loaded[name]) for name in kept)
    given = {"input_ids": batch[0], "max_new_tokens": 2, "do_sample": False}
    assert torch.equal(model.generate(**given), again.generate(**given))


def test_a_model_generates_with_its_cache_and_trains_on(pair, batch):
    model, _ = pair("Llama")
    run = trained_once(model, ALL, batch)
    model.eval()
    given = {"input_ids": batch[0], "max_new_tokens": 2, "do_sample": False}
    cached, anew = (model.generate(use_cache=each, **given) for each in (True, False))
    assert torch.equal(cached, anew)
    model.train()
    with run.autocast():
        loss = model(batch[0], labels=batch[1]).loss
    assert run.step(loss).applied


def test_adapters_are_trained_saved_and_put_on_again(pair, batch, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "up_proj", "down_proj"], init_lora_weights=False
    )
    base, other = pair("Llama", **ONE_BLOCK)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, config).train()
    plain = copy.deepcopy(model)
    fused(model, ALL)
    tokens, labels = batch
    for each in (model, plain):
        each(tokens, labels=labels).loss.backward()
    assert_same_grads(model, plain)
    model.eval()
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(other, tmp_path).eval()
    given = {"input_ids": tokens, "max_new_tokens": 2, "do_sample": False}
    assert torch.equal(model.generate(**given), again.generate(**given))
