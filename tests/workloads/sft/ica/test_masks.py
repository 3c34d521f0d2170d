import copy

import pytest
import torch
from torch import nn

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica import (
    Masks,
    ModelSignals,
    lesioned,
    preserved,
    random_like,
    scaled,
)
from narrowcast.workloads.sft.ica.blocks import find_blocks

CHOSEN = {0: (1, 5), 2: (0, 15)}


def logits(model, batch):
    with torch.no_grad():
        return model.eval()(**batch).logits


def outputs(model, batches):
    """What the MLPs put out, layer by layer."""
    return next(iter(ModelSignals(model, batches))).unflatten(1, (3, 16))


def is_chosen():
    chosen = torch.zeros(3, 16, dtype=torch.bool)
    for layer, channels in CHOSEN.items():
        chosen[layer, list(channels)] = True
    return chosen


def test_a_lesion_silences_exactly_what_is_listed(model, batches):
    with lesioned(model, CHOSEN):
        heard = outputs(model, batches)
    assert torch.equal((heard == 0).all(0), is_chosen())


def test_preserving_silences_all_else_in_every_layer(model, batches):
    with preserved(model, CHOSEN):
        heard = outputs(model, batches)
    assert torch.equal((heard == 0).all(0), ~is_chosen())
    assert (heard[:, 1] == 0).all()


def test_scaling_is_a_product(make_model, batches):
    model = make_model("gpt2")
    before = outputs(model, batches)[:, 0]
    with scaled(model, {0: (1, 5)}, 4.0):
        after = outputs(model, batches)[:, 0]
    factor = torch.ones(16)
    factor[[1, 5]] = 4
    assert torch.equal(after, before * factor)


@pytest.mark.parametrize("site", ["mlp_output", "down_input"])
def test_the_model_comes_back_to_the_bit(model, batches, site):
    before, keys = logits(model, batches[0]), list(model.state_dict())
    masks = Masks(model, site=site)
    assert torch.equal(logits(model, batches[0]), before)
    masks.lesion(CHOSEN).scale({1: (3,)}, 2.0)
    assert not torch.equal(logits(model, batches[0]), before)
    assert list(model.state_dict()) == keys
    masks.clear()
    assert torch.equal(logits(model, batches[0]), before)
    masks.preserve(CHOSEN).remove()
    assert torch.equal(logits(model, batches[0]), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_model_comes_back_after_an_error(model, batches):
    before = logits(model, batches[0])
    with pytest.raises(ZeroDivisionError), lesioned(model, CHOSEN):
        1 / 0  # noqa: B018
    assert torch.equal(logits(model, batches[0]), before)


def test_inputs_of_a_down_projection_are_silenced(model, batches):
    quiet = {1: tuple(range(find_width(model)))}
    with lesioned(model, quiet, site="down_input"):
        heard = outputs(model, batches)[:, 1]
    # Only the bias is left, the same for every token.
    assert torch.equal(heard, heard[:1].expand_as(heard))


def find_width(model):
    return 64 if "GPT2" in repr(model) else 40


def test_masks_add_up():
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, vocab_size=16))
    with Masks(model) as masks:
        masks.scale({0: (1, 2)}, 3.0).lesion({0: (2,)}).preserve({0: (0, 1, 2)})
        assert masks.factors().tolist() == [[1, 3, 0, 0, 0, 0, 0, 0], [0] * 8]


class Built(nn.Module):
    """Built as language models are, as far as masks are concerned."""

    def __init__(self):
        super().__init__()
        mlps = [nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 16)) for _ in range(3)]
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": mlp}) for mlp in mlps)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["mlp"](x)
        return x


@pytest.mark.parametrize("site", ["mlp_output", "down_input"])
def test_a_compiled_model_sees_masks_come_change_and_go(site):
    plain, x, graphs = Built(), torch.randn(2, 16), []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(plain, backend=backend, fullgraph=True)
    before = compiled(x)
    masks = Masks(plain, site=site).lesion(CHOSEN)
    assert torch.equal(compiled(x), plain(x))
    assert not torch.equal(compiled(x), before)
    known = len(graphs)
    masks.clear().scale(CHOSEN, 2.0)
    assert torch.equal(compiled(x), plain(x))
    assert len(graphs) == known
    masks.remove()
    assert torch.equal(compiled(x), before)


def test_gradients_of_silenced_channels_are_zero(make_model, batches):
    model = make_model("llama")
    with lesioned(model, CHOSEN):
        model(**batches[0], labels=batches[0]["input_ids"]).loss.backward()
    gradient = model.model.layers[0].mlp.down_proj.weight.grad
    assert torch.equal((gradient == 0).all(1), is_chosen()[0])


def test_masks_hold_in_half_precision(make_model, batches):
    model = make_model("llama").bfloat16()
    with lesioned(model, CHOSEN):
        heard = outputs(model, batches)
        assert heard.dtype == torch.bfloat16
    assert torch.equal((heard == 0).all(0), is_chosen())


def test_masks_hold_in_a_prepared_model(make_model, batches):
    import narrowcast as nc

    model = make_model("llama")
    run = nc.prepare(model, torch.optim.AdamW(model.parameters()), policy="bf16")
    with lesioned(model, CHOSEN):
        heard = outputs(model, batches)
        run.set_policy("fp16")
        again = outputs(model, batches)
    assert torch.equal((heard == 0).all(0), is_chosen())
    assert torch.equal((again == 0).all(0), is_chosen())


def test_a_copy_has_masks_of_its_own(make_model, batches):
    model = make_model("llama")
    with lesioned(model, CHOSEN):
        twin = copy.deepcopy(model)
    assert torch.equal((outputs(twin, batches) == 0).all(0), is_chosen())


@pytest.mark.parametrize(
    ("channels", "why"),
    [
        ({3: (0,)}, "layer 3 is outside this model's 3 layers of 16 mlp_output channels"),
        ({0: (16,)}, "channel 16 of layer 0 is outside this model"),
    ],
)
@pytest.mark.parametrize("do", ["lesion", "preserve"])
def test_channels_of_another_model_are_refused_and_change_nothing(make_model, channels, why, do):
    with Masks(make_model("llama")) as masks:
        with pytest.raises(ConfigError, match=why):
            getattr(masks, do)(channels)
        assert (masks.factors() == 1).all()


def test_random_masks_have_the_same_size_in_every_layer():
    chance = torch.Generator().manual_seed(0)
    one, other = (random_like(CHOSEN, 16, generator=chance) for _ in range(2))
    assert {layer: len(set(c)) for layer, c in one.items()} == {0: 2, 2: 2}
    assert one != other


def without_rows(model, channels):
    """The same model with zeros in these rows of its down projections, as GPT-2 columns."""
    for layer, chosen in channels.items():
        down = find_blocks(model).blocks[layer].down
        rows = down.plain.weight.data.T if down.turned else down.plain.weight.data
        rows[list(chosen)] = 0
        if down.plain.bias is not None:
            down.plain.bias.data[list(chosen)] = 0
    return model


@pytest.mark.parametrize("name", ["bloom", "mpt", "gpt2", "llama"])
def test_a_lesion_is_a_down_projection_without_these_rows(make_model, batches, name):
    """Also where MLPs add the residual stream themselves: that is left as it is."""
    model = make_model(name).eval()
    for block in find_blocks(model).blocks:  # GPT-2 and Bloom begin without a bias
        if block.down.plain.bias is not None:
            torch.nn.init.normal_(block.down.plain.bias)
    whole = {layer: tuple(range(16)) for layer in range(3)}
    for channels in ({0: (1, 5), 2: (0,)}, whole):
        expected = logits(without_rows(copy.deepcopy(model), channels), batches[0])
        with lesioned(model, channels):
            found = logits(model, batches[0])
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["bloom", "mpt", "gpt2", "llama"])
def test_signals_do_not_contain_the_residual_stream(make_model, batches, name):
    whole = {layer: tuple(range(16)) for layer in range(3)}
    model = without_rows(make_model(name), whole)
    assert not any(chunk.any() for chunk in ModelSignals(model, batches))
