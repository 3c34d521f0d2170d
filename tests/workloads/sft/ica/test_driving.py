"""Tokens that drive components, and stability over documents."""

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from narrowcast.cli.entry import run_command
from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica import (
    FunctionalNetworks,
    Layout,
    bootstrap,
    driving_tokens,
)

WIDTH, LOUD = 16, 7


@pytest.fixture
def model():
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_embd": WIDTH, "n_head": 2, "vocab_size": 40, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).eval()


@pytest.fixture
def documents():
    chance = np.random.default_rng(0)
    return [{"input_ids": torch.tensor(chance.integers(1, 20, (1, 24)))} for _ in range(6)]


def networks(*channels):
    layout = Layout(layers=(0, 1), width=WIDTH, depth=2)
    return FunctionalNetworks(networks=dict(enumerate(channels)), layout=layout)


def mlp_outputs(model, documents, *, skip_first):
    """Return signals of both layers by transformers' own module, and the tokens."""
    rows, heard = [], []
    hooks = [
        block.mlp.register_forward_hook(lambda _m, _a, out: heard.append(out[0].detach()))
        for block in model.transformer.h
    ]
    with torch.no_grad():
        for each in documents:
            heard.clear()
            model(**each)
            rows.append(torch.cat(heard, 1)[skip_first:])
    for hook in hooks:
        hook.remove()
    tokens = torch.cat([each["input_ids"][0][skip_first:] for each in documents])
    return torch.cat(rows).double().numpy(), tokens.numpy()


def test_activities_are_root_mean_squares_of_standardised_channels(model, documents):
    chosen = networks({0: (1, 5), 1: (3,)}, {1: (0, 2)})
    (first, _) = driving_tokens(model, documents, chosen, least_count=2, most=40)
    signals, tokens = mlp_outputs(model, documents, skip_first=1)
    scaled = (signals - signals.mean(0)) / signals.std(0)
    activity = np.sqrt((scaled[:, [1, 5, WIDTH + 3]] ** 2).mean(1))
    kinds, counts = np.unique(tokens, return_counts=True)
    expected = {
        int(kind): activity[tokens == kind].mean() / activity.mean()
        for kind, count in zip(kinds, counts, strict=True)
        if count >= 2
    }
    assert {each.token: each.activity for each in first.tokens} == pytest.approx(expected, rel=1e-4)
    activities = [each.activity for each in first.tokens]
    assert activities == sorted(activities, reverse=True)
    assert first.occurrences[0].activity == pytest.approx(
        activity.max() / activity.mean(), rel=1e-4
    )
    assert len(first.occurrences) == len(documents)


def test_a_channel_that_reacts_to_one_token_is_driven_by_it(model, documents):
    ids = {}
    model.register_forward_pre_hook(
        lambda _m, _a, kwargs: ids.update(now=kwargs["input_ids"]), with_kwargs=True
    )

    def planted(_module, _inputs, output):
        output = output.clone()
        output[..., 4] += 50.0 * (ids["now"] == LOUD)
        return output

    model.transformer.h[1].mlp.register_forward_hook(planted)
    first, second = driving_tokens(model, documents, networks({1: (4,)}, {0: (4,)}))
    assert first.tokens[0].token == LOUD
    assert first.tokens[0].activity > 2 * first.tokens[1].activity
    assert first.occurrences[0].token == LOUD
    assert second.tokens[0].activity < 2 * second.tokens[1].activity
    row = [tuple(each["input_ids"][0].tolist()) for each in documents]
    shown = first.occurrences[0]
    text = (*shown.before, shown.token, *shown.after)
    assert any(text == each[i : i + len(text)] for each in row for i in range(len(each)))


def test_networks_found_again_in_every_resample_are_stable():
    stable, drifting = {0: (1, 2, 3, 4)}, [{1: (n, n + 1)} for n in range(0, 12, 2)]
    turn = iter(range(100))

    def find(documents):
        assert len(documents) == 5
        return networks(stable, drifting[1 + next(turn) % 5])

    first, second = bootstrap(networks(stable, drifting[0]), list(range(5)), find, resamples=5)
    assert (first.iou, first.low, first.recovered) == (1.0, 1.0, 1.0)
    assert (second.iou, second.recovered) == (0.0, 0.0)


def test_too_few_occurrences_raise(model, documents):
    with pytest.raises(ConfigError, match="No token occurs 99 times"):
        driving_tokens(model, documents, networks({0: (1,)}), least_count=99)


def test_commands_print_tokens_and_stability_and_write_pages(tmp_path, capsys):
    (tmp_path / "t.txt").write_text("the cat sat on the mat, the dog ran to the cat. " * 20)
    few = ["--samples", "4", "--max-length", "32", "--device", "cpu"]
    file = str(tmp_path / "n.json")
    words = ["ica", "build", "tiny", str(tmp_path / "t.txt"), "-o", file, *few, "--components", "2"]
    assert run_command([*words, "--bootstrap", "2", "--html", str(tmp_path / "n.html")]) == 0
    assert "found again" in capsys.readouterr().out
    assert "Stability over documents" in (tmp_path / "n.html").read_text()
    words = ["ica", "tokens", "tiny", str(tmp_path / "t.txt"), "--networks", file, *few]
    assert run_command([*words, "--html", str(tmp_path / "t.html")]) == 0
    assert "component 1: " in capsys.readouterr().out
    assert "Tokens that drive each component" in (tmp_path / "t.html").read_text()
