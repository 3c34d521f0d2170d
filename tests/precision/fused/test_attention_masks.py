"""Masks of transformers' models that are not made: against the models as transformers has them."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.optim import SGD

import narrowcast as nc
from narrowcast.precision.plan.fusing import makes_masks, why_masked

transformers = pytest.importorskip("transformers")

CAUSAL = ("Llama", "Qwen2", "Gemma3Text", "GPT2")
"""Masks by hand, from a table of kinds, of a table with windows, and with positions learnt."""
TINY = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def fused(model):
    return nc.prepare(model, SGD(model.parameters(), lr=0.1), policy="fp32", fuse=["mask"])


def masked_layers(model, **inputs):
    """Return, for each attention of a compiled model, whether it is given a mask."""
    found = []

    def backend(graph, _):
        for node in graph.graph.nodes:
            if getattr(node.target, "__name__", "") == "scaled_dot_product_attention":
                given = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
                found.append(given is not None)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(**inputs)
    return found


@pytest.mark.parametrize("family", CAUSAL)
def test_a_compiled_language_model_attends_without_a_mask(family, language_model, sentences):
    model = language_model(family, use_cache=False)
    alone = masked_layers(model, input_ids=sentences[0])
    assert alone  # what transformers itself does differs between versions
    with_piece = fused(model)
    assert masked_layers(model, input_ids=sentences[0]) == [False] * len(alone)
    with_piece.release()
    assert masked_layers(model, input_ids=sentences[0]) == alone


def test_a_compiled_model_of_pictures_and_one_that_looks_both_ways_attend_without_a_mask():
    pictures = transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=32, num_labels=3, **TINY)
    )
    both_ways = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=97, **TINY))
    seen = {
        pictures: {"pixel_values": torch.randn(2, 3, 32, 32)},
        both_ways: {"input_ids": torch.randint(3, 97, (2, 9))},
    }
    for model, inputs in seen.items():
        fused(model.train())
        assert masked_layers(model, **inputs) == [False, False]


@pytest.mark.parametrize("family", CAUSAL)
def test_losses_and_gradients_are_those_of_the_model_alone(family, language_model, sentences):
    model = language_model(family, use_cache=False)
    plain = copy.deepcopy(model)
    fused(model)
    tokens, labels = sentences
    for each in (plain, model):
        each(input_ids=tokens, labels=labels).loss.backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def others(tokens):
    """Return what callers say of who sees whom: each must mean what it means."""
    apart = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(2, -1)
    padded = torch.ones_like(tokens)
    padded[1, :3] = 0
    lower = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril().triu(-2)
    return {
        "several sequences in a row": {"position_ids": apart},
        "padding": {"attention_mask": padded},
        "a mask of four dimensions": {"attention_mask": lower},
    }


@pytest.mark.parametrize("what", others(torch.zeros(2, 9)))
@pytest.mark.parametrize("compiled", [False, True])
def test_masks_and_positions_that_are_given_are_obeyed(what, compiled, language_model, sentences):
    model = language_model("Llama", use_cache=False)
    tokens = sentences[0]
    given = others(tokens)[what]
    expected = model(input_ids=tokens, **given).logits
    assert not torch.allclose(expected, model(input_ids=tokens).logits)
    fused(model)
    torch._dynamo.reset()
    passed = torch.compile(model, backend="eager") if compiled else model
    # A mask may be made in one case and not in the other: fp32 sums in another order.
    torch.testing.assert_close(passed(input_ids=tokens, **given).logits, expected)


def test_a_window_that_is_shorter_than_the_text_keeps_its_mask(language_model, sentences):
    tokens = sentences[0]
    model = language_model("Mistral", use_cache=False, sliding_window=4)
    expected = model(input_ids=tokens).logits
    fused(model)
    assert masked_layers(model, input_ids=tokens) == [True, True]
    torch.testing.assert_close(model(input_ids=tokens).logits, expected)


def test_positional_arguments_are_known_by_their_places(language_model, sentences):
    model = language_model("Llama", use_cache=False)
    padded = torch.ones_like(sentences[0])
    padded[1, :3] = 0
    expected = model(sentences[0], padded).logits
    fused(model)
    torch.testing.assert_close(model(sentences[0], padded).logits, expected)


def test_models_without_the_piece_get_the_answers_of_transformers(language_model, sentences):
    with_piece, without = language_model("Llama", use_cache=False), language_model("Qwen2")
    without.config.use_cache = False
    before = masked_layers(without, input_ids=sentences[0])
    fused(with_piece)
    found = {}

    class Asking(nn.Module):
        def forward(self, hidden):
            def ask():
                found["mask"] = transformers.masking_utils.find_packed_sequence_indices(
                    torch.tensor([[0, 1, 0, 1]])
                )

            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            return hidden

    with_piece.model.norm.register_forward_hook(lambda module, args, output: Asking()(output))
    with_piece(input_ids=sentences[0])
    assert found["mask"].tolist() == [[0, 0, 1, 1]]  # another thread, while the model is passed
    assert masked_layers(without, input_ids=sentences[0]) == before


def test_a_model_that_is_evaluated_is_left_to_transformers(language_model, sentences):
    model = language_model("Llama", use_cache=False).eval()
    before = masked_layers(model, input_ids=sentences[0])
    fused(model)
    assert masked_layers(model, input_ids=sentences[0]) == before


def test_a_model_with_positions_or_a_forward_of_its_own_is_left_alone(language_model):
    model = language_model("Llama").model

    class Shifted(type(model)):
        __module__ = type(model).__module__

        def forward(self, input_ids=None, position_ids=None, **kwargs):
            positions = torch.arange(input_ids.shape[1])[None] * 2
            return super().forward(input_ids=input_ids, position_ids=positions, **kwargs)

    Shifted.forward.__module__ = type(model).__module__
    model.__class__ = Shifted
    assert makes_masks(model)
    assert why_masked(model) == "Shifted uses its own positions"
    Shifted.forward.__module__ = "somebodys.own"
    assert why_masked(model) == "Shifted overrides forward"


def test_a_model_that_makes_a_mask_of_ones_is_left_alone_and_compiled_as_ever():
    model = transformers.RoFormerForMaskedLM(
        transformers.RoFormerConfig(vocab_size=97, embedding_size=32, **TINY)
    ).train()
    assert why_masked(model.roformer) == ("RoFormerModel builds its own mask if none is passed")
    # One that is known around it, which its masks would be asked of too.
    both = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
            num_attention_heads=4, use_cache=False,
        )
    ).train()  # fmt: skip
    both.model.inner = model
    tokens = torch.randint(3, 97, (2, 9))
    seen = []
    both.model.norm.register_forward_hook(
        lambda module, args, output: seen.append(model(input_ids=tokens).logits)
    )
    expected = model(input_ids=tokens).logits
    fused(both)
    both(input_ids=tokens)
    torch.testing.assert_close(seen[-1], expected)
    assert masked_layers(model, input_ids=tokens) is not None  # in one graph


def test_a_plan_leaves_the_model_and_transformers_as_they_are(language_model):
    before = transformers.masking_utils.find_packed_sequence_indices
    model = language_model("Llama")
    kinds = [type(module) for module in model.modules()]
    plan = nc.plan(model, "fp32", hardware=nc.detect_hardware("cpu"), fuse=["mask"])
    assert [type(module) for module in model.modules()] == kinds
    assert transformers.masking_utils.find_packed_sequence_indices is before
    assert any(each.piece == "mask" and each.fused for each in plan.fused)


def test_threads_that_plan_at_once_leave_the_functions_of_transformers(language_model):
    library = transformers.masking_utils
    names = ("find_packed_sequence_indices", "_preprocess_mask_arguments")
    before = [getattr(library, name) for name in names]
    models, results = [language_model("Llama") for _ in range(4)], []

    def trace(model):
        results.extend(why_masked(model.model) for _ in range(10))

    threads = [threading.Thread(target=trace, args=(model,)) for model in models]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert results == [""] * 40
    assert [getattr(library, name) for name in names] == before
