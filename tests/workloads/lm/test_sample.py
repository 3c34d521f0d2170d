import math

import pytest
import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError, DivergedError
from narrowcast.workloads.lm.model import build_gpt
from narrowcast.workloads.lm.sample import complete, sample
from narrowcast.workloads.lm.settings import LmModel
from narrowcast.workloads.lm.text import ByteTokenizer

MODEL = build_gpt(
    LmModel(layers=1, width=16, heads=2), vocab=256, length=8, seed=1, device=torch.device("cpu")
)


class Constant(nn.Module):
    """Predict the same logits whatever it reads."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits.expand(*tokens.shape, -1)


def draw(
    model: nn.Module, *, count: int, seed: int = 0, **planned: float | int | None
) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return list(sample(model, [65], count=count, context=8, generator=generator, **planned))


def test_temperature_zero_takes_the_likeliest_token_each_time():
    expected = [65]
    for _ in range(20):
        with torch.no_grad():
            expected.append(int(MODEL(torch.tensor([expected[-8:]]))[0, -1].argmax()))
    assert draw(MODEL, count=20, temperature=0) == expected[1:]


def test_one_choice_left_is_the_likeliest():
    assert draw(MODEL, count=20, top_k=1, temperature=3.0) == draw(MODEL, count=20, temperature=0)


def test_a_tiny_temperature_is_as_good_as_zero():
    assert draw(MODEL, count=20, temperature=1e-40) == draw(MODEL, count=20, temperature=0)


def test_a_seed_means_one_text():
    first, again, other = (draw(MODEL, count=30, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature):
    logits, count = [0.0, 1.0, -1.0, 0.5], 2000
    drawn = draw(Constant(logits), count=count, temperature=temperature)
    weights = [math.exp(logit / temperature) for logit in logits]
    for token, weight in enumerate(weights):
        share = weight / sum(weights)
        deviation = math.sqrt(share * (1 - share) / count)
        assert abs(drawn.count(token) / count - share) < 5 * deviation


def test_top_k_draws_from_the_k_likeliest_only():
    drawn = draw(Constant([0.0, 1.0, -1.0, 0.9]), count=200, temperature=10.0, top_k=2)
    assert set(drawn) == {1, 3}


def test_tokens_beyond_the_vocabulary_are_never_drawn():
    assert set(draw(Constant([0.0, 0.0, 50.0]), count=50, vocab=2)) == {0, 1}


def test_tokens_come_one_by_one():
    generator = torch.Generator()
    endless = sample(MODEL, [65], count=10**9, context=8, generator=generator)
    assert 0 <= next(endless) < 256


def test_sampling_leaves_the_mode_of_the_model_alone():
    MODEL.train()
    draw(MODEL, count=2)
    assert all(module.training for module in MODEL.modules())


def test_a_text_is_continued_as_text():
    text = complete(MODEL, ByteTokenizer(), prompt="é", count=5, context=8, temperature=0)
    tokens = sample(
        MODEL, list("é".encode()), count=5, context=8, generator=torch.Generator(), temperature=0
    )
    assert text == bytes(tokens).decode(errors="replace")


def test_a_diverged_model_is_said_to_be_one():
    with pytest.raises(DivergedError, match="an earlier checkpoint"):
        draw(Constant([0.0, math.nan]), count=1)


@pytest.mark.parametrize(
    ("asked", "why"),
    [({"temperature": -1.0}, "must be 0"), ({"top_k": 0}, "must be 1 or more")],
)
def test_a_choice_without_meaning_is_refused(asked, why):
    with pytest.raises(ConfigError, match=why):
        draw(MODEL, count=1, **asked)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ConfigError, match="Write at least one character"):
        next(sample(MODEL, [], count=1, context=8, generator=torch.Generator()))
