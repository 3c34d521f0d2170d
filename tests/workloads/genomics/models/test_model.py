"""Models of sequences: what they promise of padding, strands, the future and gradients."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.models.config import PRESETS, GenomicConfig
from narrowcast.workloads.genomics.models.heads import NextTokenHead, SequenceHead
from narrowcast.workloads.genomics.models.model import (
    GenomicModel,
    _Continuation,
    choose,
    generate,
)
from narrowcast.workloads.genomics.models.patches import ByteLM, threshold_for

BACKBONES = ("hyena", "attention", "cnn")
COMPLEMENT = [0, 1, 2, 4, 3, 6, 5, 7]  # two pairs of letters, and what is its own complement


def config_of(backbone, **more):
    fields = {"vocab_size": 8, "width": 32, "layers": 2, "max_length": 64, "heads": 2}
    return GenomicConfig(**fields | {"backbone": backbone} | more)


def model_of(backbone, *, complement=None, **more):
    torch.manual_seed(0)
    config = config_of(backbone, **more)
    if config.patching != "entropy":
        return GenomicModel(config, complement)
    byte_lm = ByteLM(8)  # as it knows nothing, half of the letters are above its usual doubt
    threshold = threshold_for(byte_lm.entropy(some_tokens()), patch_size=2)
    config = dataclasses.replace(config, entropy_threshold=threshold)
    return GenomicModel(config, complement, byte_lm)


def some_tokens(rows=3, length=41, seed=0):
    return torch.randint(3, 7, (rows, length), generator=torch.Generator().manual_seed(seed))


EVERY = [
    {"backbone": backbone, "causal": causal, "patching": patching}
    for backbone in BACKBONES
    for causal in (True, False)
    for patching in ("none", "static", "entropy")
]


@pytest.mark.parametrize("config", EVERY, ids=str)
def test_padding_does_not_change_what_is_real(config):
    model = model_of(**config).double()
    lengths = (41, 23, 1)
    tokens = some_tokens()
    mask = torch.arange(41) < torch.tensor(lengths)[:, None]
    states = model(tokens, mask)
    assert states.shape == (3, 41, 32)
    again = model(tokens.where(mask, 0), mask)
    for row, length in enumerate(lengths):
        alone = model(tokens[row : row + 1, :length])[0]
        torch.testing.assert_close(states[row, :length], alone, rtol=0, atol=1e-10)
        torch.testing.assert_close(states[row, :length], again[row, :length], rtol=0, atol=1e-10)


@pytest.mark.parametrize("config", [each for each in EVERY if each["causal"]], ids=str)
def test_a_causal_model_does_not_see_what_comes_later(config):
    model = model_of(**config).double()
    tokens = some_tokens(rows=1)
    states = model(tokens)
    for place in range(1, 41, 4):
        changed = tokens.clone()
        changed[:, place:] = some_tokens(rows=1, seed=place)[:, place:]
        before = model(changed)[:, :place]
        torch.testing.assert_close(before, states[:, :place], rtol=0, atol=1e-10)


@pytest.mark.parametrize("patching", ["none", "static", "entropy"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_states_of_the_other_strand_are_the_same_in_reverse(backbone, patching):
    more = {"complement": COMPLEMENT, "reverse_complement": True, "patching": patching}
    model = model_of(backbone, **more).double()
    tokens = some_tokens()
    other = torch.tensor(COMPLEMENT)[tokens.flip(1)]
    states = model(tokens)
    torch.testing.assert_close(model(other), states.flip(1), rtol=0, atol=1e-10)
    assert (states - states.flip(1)).abs().max() > 1e-3
    for pool in ("mean", "max", "attention"):
        head = SequenceHead(32, 3, pool).double()
        torch.testing.assert_close(head(model(other)), head(states), rtol=0, atol=1e-10)


def test_strands_of_several_lengths_turn_round_each_at_its_own_end():
    model = model_of("hyena", complement=COMPLEMENT, reverse_complement=True).double()
    tokens, mask = some_tokens(), torch.arange(41) < torch.tensor([[41], [23], [7]])
    states = model(tokens, mask)
    alone = model(torch.tensor(COMPLEMENT)[tokens[1:2, :23].flip(1)])
    torch.testing.assert_close(states[1, :23].flip(0), alone[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("config", EVERY, ids=str)
def test_every_parameter_receives_a_gradient(config):
    model = model_of(**config)
    model(some_tokens()).square().sum().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


@pytest.mark.parametrize("config", EVERY, ids=str)
def test_stages_hold_every_parameter_once(config):
    model = model_of(**config)
    held = [id(p) for stage in model.stages() for p in stage.parameters()]
    assert sorted(held) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp8-delayed"])
@pytest.mark.parametrize(
    ("backbone", "patching"), [*((each, "none") for each in BACKBONES), ("hyena", "entropy")]
)
def test_trains_under_policies(backbone, patching, policy):
    model = nn.Sequential(model_of(backbone, causal=True, patching=patching), NextTokenHead(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run = nc.prepare(model, optimizer, policy=policy)
    tokens = some_tokens() * 0 + torch.arange(41) % 4 + 3
    losses = []
    for _ in range(10):
        with run.autocast():
            logits = model(tokens)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        run.backward(loss)
        assert [n for n, p in model.named_parameters() if p.grad is None] == []
        run.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_patches_of_entropy_are_of_several_lengths_and_the_same_under_a_policy():
    model, tokens = model_of("hyena", patching="entropy"), some_tokens()
    patches = model.patches(tokens)
    assert len(patches.lengths.unique()) > 3
    run = nc.prepare(model, torch.optim.AdamW(model.parameters()), policy="fp8-delayed")
    with run.autocast():
        assert torch.equal(model.patches(tokens).ids, patches.ids)


@pytest.mark.parametrize("policy", ["bf16", "fp8-delayed"])
def test_filters_are_computed_in_fp32_under_any_policy(policy):
    model = model_of("hyena")
    plain = model.blocks[0].mixer.filter(64)
    run = nc.prepare(model, torch.optim.AdamW(model.parameters()), policy=policy)
    with run.autocast():
        assert torch.equal(model.blocks[0].mixer.filter(64), plain)


def test_compiles_into_one_graph():
    model, tokens = model_of("hyena", patching="entropy", layers=1), some_tokens()
    mask = torch.arange(41) < torch.tensor([[41], [23], [7]])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens, mask), model(tokens, mask))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_build(name):
    with torch.device("meta"):
        model = GenomicModel(GenomicConfig(vocab_size=12, **PRESETS[name]))
    assert len(model.blocks) == PRESETS[name]["layers"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"order": 1}, "order must be 2 or more"),
        ({"width": 0}, "width must be 1 or more, got 0"),
        ({"backbone": "attention", "heads": 5}, "5 heads"),
        ({"kernel": 4}, "must be odd"),
        ({"min_patch": 8, "max_patch": 4}, "at most max_patch"),
        ({"reverse_complement": True, "causal": True}, "Set one of them to false"),
    ],
)
def test_impossible_shapes_are_refused(wrong, told):
    with pytest.raises(ConfigError, match=told):
        dataclasses.replace(config_of("hyena"), **wrong)


@pytest.mark.parametrize("table", [None, [0, 1], [0, 1, 2, 4, 5, 6, 3, 7]])
def test_complements_that_are_none_are_refused(table):
    with pytest.raises(ConfigError, match="complement"):
        GenomicModel(config_of("hyena", reverse_complement=True), table)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("prompt", [1, 2, 9])
def test_cached_states_are_those_of_the_whole_sequence(order, prompt):
    model = model_of("hyena", causal=True, order=order).double().eval()
    tokens = torch.randint(8, (2, prompt + 7), generator=torch.Generator().manual_seed(3))
    continuation = _Continuation(model, room=7)
    for end in range(prompt, prompt + 8):
        with torch.no_grad():
            expected = model(tokens[:, :end])[:, -1:]
            states = continuation.read(tokens[:, :end])
        torch.testing.assert_close(states, expected, rtol=0, atol=1e-10)


def test_a_hyena_generates_what_it_would_without_states():
    torch.manual_seed(0)
    model, head = model_of("hyena", causal=True).double().eval(), NextTokenHead(32, 8).double()
    begun = torch.tensor([[3, 4, 5], [6, 3, 3]])
    written = generate(model, head, begun, count=12, generator=torch.Generator().manual_seed(1))
    generator, expected = torch.Generator().manual_seed(1), begun
    with torch.no_grad():
        for _ in range(12):
            logits = head(model(expected)[:, -1])
            expected = torch.cat([expected, choose(logits, generator=generator)], 1)
    assert torch.equal(written, expected)
