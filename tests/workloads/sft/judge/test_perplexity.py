import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.judge.perplexity import (
    Perplexity,
    Window,
    make_windows,
    perplexity,
    perplexity_of_windows,
)

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 2


def test_a_text_that_fits_has_the_loss_that_transformers_computes(model, tokenizer):
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    found = perplexity(model, tokenizer, TEXT, length=256)
    with torch.no_grad():
        loss = model.eval()(input_ids=ids, labels=ids).loss.item()
    assert found.nats == pytest.approx(loss, rel=1e-6)
    assert found.tokens == ids.numel() - 1
    assert found.perplexity == math.exp(found.nats)


@pytest.mark.parametrize("overlap", [1, 7, 16])
def test_windows_are_predicted_from_what_stands_before_in_them(make_model, tokenizer, overlap):
    model, ids = make_model().eval(), tokenizer(TEXT)["input_ids"]
    length = 32
    found = perplexity(
        model, tokenizer, TEXT, length=length, overlap=overlap, batch_size=3, tokens=101
    )
    ids, nats, at = ids[:101], [], 1
    while at < len(ids):  # token by token, each from the window it stands in
        start = 0 if at < length else (at - overlap) // (length - overlap) * (length - overlap)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids[start:at]])).logits[0, -1]
        nats.append(-logits.double().log_softmax(0)[ids[at]].item())
        at += 1
    assert found.tokens == 100
    assert found.nats == pytest.approx(sum(nats) / len(nats), rel=1e-5)


@given(st.integers(2, 200), st.integers(2, 40), st.data())
def test_every_token_but_the_first_is_predicted_once(count, length, data):
    overlap = data.draw(st.integers(1, length - 1))
    tokens = range(count)
    windows = make_windows(tokens, length=length, overlap=overlap)
    assert [t for w in windows for t in w.tokens[w.known :]] == list(tokens)[1:]
    assert all(len(window.tokens) <= length for window in windows)


def test_texts_do_not_see_one_another(make_model, tokenizer):
    model = make_model()
    one, other = (perplexity(model, tokenizer, text, length=64) for text in (TEXT[:40], TEXT[9:50]))
    both = perplexity(model, tokenizer, [TEXT[:40], TEXT[9:50]], length=64)
    nats = one.nats * one.tokens + other.nats * other.tokens
    assert both.tokens == one.tokens + other.tokens
    assert both.nats == pytest.approx(nats / both.tokens, rel=1e-6)


def test_modes_stay_as_they_were(model, tokenizer):
    model.eval()
    modes = {}
    for number, module in enumerate(model.modules()):
        module.training = bool(number % 3)
        modes[module] = module.training
    perplexity(model, tokenizer, TEXT, length=64)
    assert {module: module.training for module in model.modules()} == modes


def test_nothing_to_predict_and_windows_that_do_not_move_are_refused(make_model):
    with pytest.raises(ConfigError, match="fewer than two tokens"):
        perplexity_of_windows(make_model(), [Window((1,), 1)])
    with pytest.raises(ConfigError, match="overlap must be between 1 and 3"):
        make_windows(range(9), length=4, overlap=4)


def test_a_hopeless_model_has_a_perplexity_without_end():
    assert Perplexity(1000.0, 5).perplexity == math.inf


def test_smollm2_has_on_wikitext_the_loss_that_transformers_computes(real):
    folder = real("data/smollm2-hf")
    text = real("shared/data/text/wikitext2_test.txt").read_text()[:10_000]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = perplexity(model, tokenizer, text, length=512, tokens=512)
    ids = torch.tensor([tokenizer(text)["input_ids"][:512]])
    with torch.no_grad():
        loss = model.eval()(input_ids=ids, labels=ids).loss.item()
    assert found.tokens == 511
    assert found.nats == pytest.approx(loss, rel=1e-6)
    assert found.nats == pytest.approx(2.832, abs=5e-4)
