import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis.strategies import integers, sampled_from
from torch import nn

from narrowcast.errors import ConfigError
from narrowcast.training.evaluation import in_eval_mode
from narrowcast.workloads.lm.model import GPT, build_gpt
from narrowcast.workloads.lm.settings import LmModel

CPU = torch.device("cpu")
VOCAB, LENGTH = 48, 24
KINDS = {
    "gelu, rmsnorm, tied": LmModel(layers=2, width=32, heads=4),
    "gelu, layernorm, biases": LmModel(layers=2, width=32, heads=4, norm="layernorm", bias=True),
    "swiglu, grouped, untied": LmModel(
        layers=2, width=32, heads=4, kv_heads=2, mlp="swiglu", tied=False
    ),
}


def gpt(kind: str = "gelu, rmsnorm, tied", *, seed: int = 0) -> GPT:
    return build_gpt(KINDS[kind], vocab=VOCAB, length=LENGTH, seed=seed, device=CPU)


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@given(kind=sampled_from(sorted(KINDS)), position=integers(1, LENGTH - 1), seed=integers(0, 99))
@settings(max_examples=20)
def test_a_later_token_never_changes_earlier_logits(kind, position, seed):
    model, before = gpt(kind), tokens(2, LENGTH, seed=seed)
    after = before.clone()
    after[:, position:] = (before[:, position:] + 1) % VOCAB
    with torch.no_grad():
        assert torch.equal(model(before)[:, :position], model(after)[:, :position])


@pytest.mark.parametrize("kind", KINDS)
def test_an_earlier_token_changes_every_later_logit(kind):
    model, before = gpt(kind), tokens(1, LENGTH)
    after = before.clone()
    after[:, 0] = (before[:, 0] + 1) % VOCAB
    with torch.no_grad():
        changed = (model(before) != model(after)).any(-1)
    assert changed.all()


def test_a_model_without_rotation_is_torchs_own_transformer():
    settings = KINDS["gelu, layernorm, biases"]
    model = gpt("gelu, layernorm, biases")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
        model.rotary.copy_(torch.tensor([1.0, 0.0]).expand_as(model.rotary))
    x = model.embed(tokens(3, LENGTH))
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    for block in model.blocks:
        layer = nn.TransformerEncoderLayer(
            settings.width,
            settings.heads,
            settings.hidden_width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        names = {
            "self_attn.in_proj_": "attn.qkv.",
            "self_attn.out_proj.": "attn.out.",
            "linear1.": "mlp.up.",
            "linear2.": "mlp.down.",
            "norm1.": "attn_norm.",
            "norm2.": "mlp_norm.",
        }
        ours = block.state_dict()
        layer.load_state_dict(
            {
                f"{a}{part}": ours[f"{b}{part}"]
                for a, b in names.items()
                for part in ("weight", "bias")
            }
        )
        x = layer(x, src_mask=mask, is_causal=True)
    expected = F.linear(model.norm(x), model.embed.weight)
    # Sums of up to 128 terms, in another order.
    error = 128 * 2.0**-24 * expected.abs().max().item()
    torch.testing.assert_close(model(tokens(3, LENGTH)), expected, rtol=0, atol=error)


def test_grouped_heads_equal_full_heads_that_repeat_their_keys_and_values():
    grouped = LmModel(layers=1, width=32, heads=4, kv_heads=2)
    few = build_gpt(grouped, vocab=VOCAB, length=LENGTH, seed=0, device=CPU)
    many = build_gpt(
        grouped.model_copy(update={"kv_heads": None}),
        vocab=VOCAB,
        length=LENGTH,
        seed=1,
        device=CPU,
    )
    state = few.state_dict()
    query, key, value = state["blocks.0.attn.qkv.weight"].split((32, 16, 16))
    repeated = [
        part.unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1) for part in (key, value)
    ]
    state["blocks.0.attn.qkv.weight"] = torch.cat((query, *repeated))
    many.load_state_dict(state)
    x = tokens(2, LENGTH)
    error = 32 * 2.0**-24
    torch.testing.assert_close(few(x), many(x), rtol=0, atol=error * few(x).abs().max().item())


def test_a_model_without_preferences_has_the_loss_of_a_guess():
    model = gpt("swiglu, grouped, untied")
    with torch.no_grad():
        model.head.weight.zero_()
        logits = model(tokens(2, LENGTH))
    loss = F.cross_entropy(logits.flatten(0, 1), tokens(2, LENGTH, seed=1).flatten())
    assert loss.item() == pytest.approx(math.log(VOCAB), rel=2.0**-20)


@pytest.mark.parametrize("kind", KINDS)
def test_an_untrained_model_is_hardly_worse_than_a_guess(kind):
    model, data = gpt(kind), tokens(64, LENGTH + 1)
    with torch.no_grad():
        loss = F.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())
    # Logits of variance 0.4 cost half of that on average; allow all of it.
    assert math.log(VOCAB) - 0.4 < loss.item() < math.log(VOCAB) + 0.4


def test_what_is_added_to_the_stream_starts_smaller_in_deeper_models():
    settings = LmModel(layers=8, width=64, heads=4)
    model = build_gpt(settings, vocab=VOCAB, length=LENGTH, seed=0, device=CPU)
    deviation = math.sqrt(2 / (5 * 64))
    for name, expected in {
        "embed": deviation,
        "blocks.3.attn.qkv": deviation,
        "blocks.3.attn.out": deviation / 4,
        "blocks.3.mlp.up": deviation,
        "blocks.3.mlp.down": deviation / 4,
    }.items():
        weight = model.get_parameter(f"{name}.weight")
        # A standard deviation estimated from n values is off by 1/sqrt(2n); five times that.
        assert weight.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * weight.numel()))


def test_a_tied_head_is_the_embedding_itself():
    model = gpt()
    assert model.head.weight is model.embed.weight


def test_a_seed_means_one_model_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    first, again, other = gpt(seed=5), gpt(seed=5), gpt(seed=6)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.embed.weight, again.embed.weight)
    assert not torch.equal(first.embed.weight, other.embed.weight)


def test_a_model_built_on_a_device_equals_one_built_in_place():
    built = gpt("gelu, layernorm, biases")
    plain = GPT(KINDS["gelu, layernorm, biases"], vocab=VOCAB, length=LENGTH)
    plain.initialise(torch.Generator().manual_seed(0))
    x = tokens(1, LENGTH)
    assert torch.equal(built(x), plain(x))


def test_the_rotary_table_is_not_saved():
    assert not [name for name in gpt().state_dict() if "rotary" in name]


def test_policies_find_the_names_they_match():
    names = {name for name, _ in gpt("swiglu, grouped, untied").named_modules()}
    inside = ["attn.qkv", "attn.out", "mlp.up", "mlp.gate", "mlp.down", "attn_norm", "mlp_norm"]
    assert {"embed", "norm", "head"} <= names
    assert {f"blocks.{n}.{name}" for n in (0, 1) for name in inside} <= names


def test_a_text_longer_than_the_positions_is_refused():
    model = gpt()
    with pytest.raises(ConfigError, match=f"at most {LENGTH}.*data.length=25"):
        model(tokens(1, LENGTH + 1))


def test_eval_mode_gives_every_module_its_own_mode_back():
    model = gpt()
    model.blocks[0].eval()
    before = [module.training for module in model.modules()]
    with in_eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before
    with contextlib.suppress(ZeroDivisionError), in_eval_mode(model):
        _ = 1 / 0
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_given_targets_returns_the_cross_entropy_of_its_logits(kind):
    model, data = gpt(kind), tokens(2, LENGTH + 1)
    inputs, targets = data[:, :-1], data[:, 1:]
    logits = model(inputs).flatten(0, 1)
    assert torch.equal(model(inputs, targets), F.cross_entropy(logits, targets.flatten()))
    each = F.cross_entropy(logits, targets.flatten(), reduction="none").view(2, LENGTH)
    assert torch.equal(model(inputs, targets, reduction="none"), each)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_models_loss_and_gradients_on_a_gpu_are_those_of_its_logits(dtype):
    model, data = gpt().cuda(), tokens(2, LENGTH + 1).cuda()
    model.tie()
    inputs, targets = data[:, :-1], data[:, 1:]
    with torch.autocast("cuda", dtype=dtype):
        losses = (
            model(inputs, targets),
            F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten()),
        )
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=VOCAB * 2.0**-24)
    weights = list(model.parameters())
    scaled = (torch.autograd.grad(1024 * loss, weights) for loss in losses)
    for mine, plain in zip(*scaled, strict=True):
        # Gradients of logits are rounded to 16 bits at another size, forward and backward.
        error = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(mine, plain, rtol=0, atol=error * plain.abs().max().item())


def loss_and_gradients(model, run):
    data = tokens(2, LENGTH + 1)
    loss = run(data[:, :-1], data[:, 1:])
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("kind", KINDS)
def test_traced_as_one_graph_a_model_computes_the_same_loss_and_gradients(kind):
    model = gpt(kind)
    eager = loss_and_gradients(model, model)
    traced = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled = loss_and_gradients(model, traced)
    for expected, result in zip(eager, compiled, strict=True):
        # Sums of up to 128 terms, in another order, forward and backward through two layers.
        error = 4 * 128 * 2.0**-24 * expected.abs().max().item()
        torch.testing.assert_close(result, expected, rtol=0, atol=error)
