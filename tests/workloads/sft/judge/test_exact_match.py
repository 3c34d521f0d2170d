import random

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from transformers import GenerationConfig

import narrowcast as nc
from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica import Masks
from narrowcast.workloads.sft.judge.exact_match import answer, exact_match, wilson
from narrowcast.workloads.sft.judge.generation import greedy
from narrowcast.workloads.sft.judge.prompts import Question

TEXTS = ["What is 2 + 2?", "Hi", "Tell me of the sea, and of the ships on it.", "Why?", "7 * 6 ="]
STOP = 65


@pytest.fixture
def prompts(tokenizer):
    return [tokenizer(text)["input_ids"] for text in TEXTS]


def one_by_one(model, prompts, *, count=24):
    """What transformers itself generates, a prompt at a time: nothing is filled."""
    config = GenerationConfig(
        do_sample=False, max_new_tokens=count, eos_token_id=STOP, pad_token_id=0
    )
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.eval().generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config
            )
        found.append([token for token in out[0, len(prompt) :].tolist() if token != STOP])
    return found


def many(model, prompts, *, batch_size=3):
    return greedy(
        model, prompts, max_new_tokens=24, batch_size=batch_size, ends={STOP}, padding=259
    )


def test_many_prompts_at_once_give_what_each_gives_alone(model, prompts):
    wanted = one_by_one(model, prompts)
    assert len({len(tokens) for tokens in wanted}) > 1 or len(wanted[0]) == 24
    assert many(model.train(), prompts) == wanted


def test_an_answer_stops_at_the_token_that_ends_it(make_model, prompts):
    model = make_model()
    free = greedy(model, prompts, max_new_tokens=24, batch_size=5, ends=set(), padding=259)
    end = free[0][5]
    cut = greedy(model, prompts, max_new_tokens=24, batch_size=5, ends={end}, padding=259)
    for whole, stopped in zip(free, cut, strict=True):
        at = whole.index(end) if end in whole else len(whole)
        assert stopped == whole[:at]


def test_a_model_prepared_in_fp32_answers_as_the_plain_one(model, prompts):
    wanted = one_by_one(model, prompts)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    prepared = nc.prepare(model, torch.optim.AdamW(trained), policy="fp32")
    with prepared.autocast():
        assert many(model, prompts) == wanted


def test_a_model_prepared_in_emulated_formats_answers_as_its_passes_without_a_cache(
    make_model, prompts
):
    model = make_model()
    prepared = nc.prepare(model, torch.optim.AdamW(model.parameters()), policy="bf16")
    with prepared.autocast(), torch.no_grad():
        (found,) = many(model, prompts[:1])
        tokens = list(prompts[0])
        for token in found[:8]:
            logits = model.eval()(input_ids=torch.tensor([tokens])).logits[0, -1].float()
            # A cache rounds as the pass does, but its products are of other shapes.
            assert logits[token] >= logits.max() - 2**-7 * logits.abs().max()
            tokens.append(token)


def test_masks_that_are_in_force_are_heard(make_model, prompts):
    model = make_model()
    plain = many(model, prompts)
    with Masks(model) as masks:
        masks.lesion({0: tuple(range(16))})
        assert many(model, prompts) == one_by_one(model, prompts) != plain
    assert many(model, prompts) == plain


def test_adapters_are_heard(make_model, prompts):
    model = make_model("llama-lora")
    with model.disable_adapter():
        base = many(model, prompts)
    assert many(model, prompts) != base


def test_nothing_of_the_model_is_changed_and_its_own_settings_are_not_heeded(model, prompts):
    wanted = one_by_one(model, prompts)
    owners = [module for module in model.modules() if "generation_config" in vars(module)]
    for owner in owners:
        owner.generation_config = GenerationConfig(
            do_sample=True, temperature=5.0, repetition_penalty=3.0, max_length=7, num_beams=2
        )
    kept = [(owner.generation_config, owner.generation_config.to_dict()) for owner in owners]
    model.train()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert many(model, prompts) == wanted
    assert model.training
    assert all(module.training for module in model.modules())
    for owner, (config, values) in zip(owners, kept, strict=True):
        assert owner.generation_config is config
        assert config.to_dict() == values
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]


def test_prompts_without_room_are_refused_before_anything_is_computed(make_model, prompts):
    with pytest.raises(
        ConfigError, match=r"prompt of 500 tokens .*Write eval_tasks.max_new_tokens=12"
    ):
        many(make_model(), [[1] * 500, *prompts])
    with pytest.raises(ConfigError, match="prompt is empty"):
        many(make_model(), [[]])


def test_answers_are_compared_and_counted(make_model, template, prompts):
    model = make_model()
    said = answer(model, template, prompts, max_new_tokens=9, batch_size=2)
    references = [said[0].upper(), "something else", said[2], "no", "nothing"]
    questions = [
        Question(tuple(prompt), reference, f"row {n}")
        for n, (prompt, reference) in enumerate(zip(prompts, references, strict=True))
    ]
    found = exact_match(model, template, questions, max_new_tokens=9, batch_size=2)
    assert [each.text for each in found.answers] == said
    assert [each.right for each in found.answers] == [True, False, True, False, False]
    assert (found.by, found.right, found.rows, found.share) == ("text", 2, 5, 0.4)
    assert found.to_json()["low"] == found.interval.low


@pytest.mark.parametrize(("right", "rows"), [(0, 1), (1, 1), (0, 50), (37, 100), (100, 100)])
def test_the_interval_is_wilsons(right, rows):
    wanted = binomtest(right, rows).proportion_ci(method="wilson")
    assert wilson(right, rows) == pytest.approx((wanted.low, wanted.high), abs=1e-12)
