"""The loss of transformers' language models without logits, against transformers' own."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD

import narrowcast as nc
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.precision.swap import Probe, is_swapped, swap

transformers = pytest.importorskip("transformers")

FOLLOWED = [
    "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma3Text", "Phi", "Phi3", "SmolLM3", "Olmo",
    "Olmo2", "GPT2",
]  # fmt: skip
TERMS = 128
"""More than are summed anywhere in these models: a sum is off by as many roundings at most."""
ROUNDINGS = TERMS * 2.0**-24


def fused(model, **kwargs):
    settings = {"policy": "fp32", "fuse": ["loss"]} | kwargs
    return nc.prepare(
        model, SGD([p for p in model.parameters() if p.requires_grad], 0.1), **settings
    )


def gradients(model, loss):
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    return {name: grad for (name, _), grad in zip(named, found, strict=True)}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        if grad is None:
            assert found[name] is None
        else:
            assert (found[name] - grad).abs().max() <= ROUNDINGS * grad.abs().max(), name


CALLS = {
    "labels": {},
    "number of items as a tensor": {"num_items_in_batch": torch.tensor(7)},
    "number of items": {"num_items_in_batch": 7},
    "a tuple": {"return_dict": False},
    "another index to ignore": {"ignore_index": 5, "labels": torch.arange(18).reshape(2, 9) % 7},
    "labels shifted already": {"shift_labels": torch.arange(18).reshape(2, 9)},
    "hidden states": {"output_hidden_states": True},
}


@pytest.mark.parametrize("family", FOLLOWED)
def test_loss_and_gradients_are_those_of_transformers(language_model, sentences, family):
    plain, model = language_model(family), language_model(family)
    tokens, labels = sentences
    run = fused(model)
    for name, more in CALLS.items():
        expected, found = (each(tokens, **{"labels": labels} | more) for each in (plain, model))
        assert abs(found[0] - expected[0]) <= ROUNDINGS * expected[0], name
        assert_same(gradients(model, found[0]), gradients(plain, expected[0]))
        if isinstance(found, tuple):
            assert found[1] is None
            assert len(found) == len(expected)
        else:
            assert found.keys() == expected.keys() - {"logits"}
            assert found.logits is None
    run.release()
    assert not is_swapped(model)
    assert type(model) is type(plain)


def test_without_labels_and_in_evaluation_logits_are_there(language_model, sentences):
    plain, model = language_model("Llama"), language_model("Llama")
    tokens, labels = sentences
    fused(model)
    assert torch.equal(model(tokens).logits, plain(tokens).logits)
    found, expected = model.eval()(tokens, labels=labels), plain.eval()(tokens, labels=labels)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)


def test_labels_may_be_given_by_place(language_model, sentences):
    plain, model = language_model("Llama"), language_model("Llama")
    tokens, labels = sentences
    given = (tokens, None, None, None, None, labels)
    fused(model)
    found, expected = model(*given), plain(*given)
    assert found.logits is None
    assert abs(found.loss - expected.loss) <= ROUNDINGS * expected.loss


def test_of_some_positions_the_loss_is_theirs(language_model, sentences):
    plain, model = language_model("Llama"), language_model("Llama")
    tokens, labels = sentences
    fused(model)
    kept = {"logits_to_keep": 4, "shift_labels": labels[:, -4:].contiguous()}
    found, expected = (each(tokens, labels=labels, **kept).loss for each in (model, plain))
    assert abs(found - expected) <= ROUNDINGS * expected


@pytest.mark.parametrize(
    ("family", "settings"),
    [("Gemma2", {}), ("Gemma3Text", {"final_logit_softcapping": 30.0}), ("Granite", {})],
)
def test_logits_that_are_capped_or_scaled_are_left_alone(
    language_model, sentences, family, settings
):
    plain, model = language_model(family, **settings), language_model(family, **settings)
    with pytest.raises(UnsupportedError, match="uses its logits for more than the loss"):
        fused(model)
    assert not is_swapped(model)
    tokens, labels = sentences
    fused(model, fuse="auto")
    found, expected = model(tokens, labels=labels), plain(tokens, labels=labels)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)


class OwnForward(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        result = super().forward(*args, **kwargs)
        if result.loss is not None:
            result.loss = result.loss + result.logits.square().mean()
        return result


def test_a_forward_of_its_own_is_left_alone_and_told(language_model):
    model = OwnForward(language_model("Llama").config)
    with pytest.raises(UnsupportedError, match=r"OwnForward overrides forward\. Leave loss"):
        fused(model)


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], ["q_proj", "lm_head"]])
def test_adapters_learn_what_they_would(language_model, sentences, targets):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    models = []
    for _ in range(2):
        base = language_model("Llama")
        torch.manual_seed(0)
        models.append(peft.get_peft_model(base, config).train())
    plain, model = models
    tokens, labels = sentences
    if "lm_head" in targets:
        with pytest.raises(
            UnsupportedError, match=r"lm_head is not a plain linear layer but a peft\..*\.Linear\."
        ):
            fused(model)
        return
    run = fused(model)
    found, expected = model(tokens, labels=labels), plain(tokens, labels=labels)
    assert found.logits is None
    assert_same(gradients(model, found.loss), gradients(plain, expected.loss))
    run.release()
    assert not is_swapped(model)


def test_a_head_that_is_watched_makes_its_logits(language_model, sentences):
    model = language_model("Llama")
    fused(model)
    tokens, labels = sentences
    seen = []
    handle = model.lm_head.register_forward_hook(lambda *given: seen.append(given[2].shape))
    found = model(tokens, labels=labels)
    assert seen == [found.logits.shape]
    handle.remove()
    assert model(tokens, labels=labels).logits is None


def test_a_loss_that_somebody_set_is_theirs(language_model, sentences):
    model = language_model("Llama")
    run = fused(model)
    tokens, labels = sentences
    model.loss_function = lambda logits, labels, vocab_size: logits.sum()
    found = model(tokens, labels=labels)
    assert torch.equal(found.loss, found.logits.sum())
    run.release()
    assert torch.equal(model(tokens, labels=labels).loss, found.loss)


def test_checkpointed_activations_give_the_same_gradients(language_model, sentences):
    plain, model = language_model("Llama"), language_model("Llama")
    tokens, labels = sentences
    model.gradient_checkpointing_enable()
    fused(model)
    found, expected = (each(tokens, labels=labels, use_cache=False) for each in (model, plain))
    found.loss.backward()
    expected.loss.backward()
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    grads = [(name, p.grad, q.grad) for (name, p), q in pairs]
    assert_same({n: g for n, g, _ in grads}, {n: g for n, _, g in grads})


def test_a_compiler_breaks_nowhere(language_model, sentences):
    model = language_model("Llama", num_hidden_layers=1)
    tokens, labels = sentences
    run = fused(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with run.autocast():
        found, expected = (
            each(tokens, labels=labels, use_cache=False) for each in (compiled, model)
        )
    assert found.logits is None
    assert_same(gradients(model, found.loss), gradients(model, expected.loss))


def test_what_is_trained_generates_and_is_saved(language_model, sentences, tmp_path):
    model = language_model("Llama", tie_word_embeddings=True)
    tokens, labels = sentences
    run = fused(model)
    for _ in range(3):
        with run.autocast():
            loss = model(tokens, labels=labels).loss
        run.backward(loss)
        run.step()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.eval()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    given = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(tokens, **given), again.generate(tokens, **given))


def test_the_plan_tells_what_is_fused_and_why_not(language_model):
    model = language_model("Llama")
    hardware = nc.detect_hardware("cpu")
    plan = nc.plan(model, "fp32", hardware=hardware, fuse=["loss"])
    assert "fused    loss: . (the model itself): computed from hidden states" in str(plan)
    assert plan.to_json()["fused"] == [
        {
            "piece": "loss", "fused": True, "modules": [""],
            "reason": "computed from hidden states; no logits in training",
        }
    ]  # fmt: skip
    auto = nc.plan(model, "bf16", hardware=hardware)
    assert not any(each.fused for each in auto.fused)
    assert "unfused  loss, mask, rms_norm, rotary, swiglu: " in str(auto)
    assert nc.plan(model, "bf16", hardware=hardware, fuse="none").fused == ()
    assert nc.plan(nn.Linear(2, 2), "bf16", hardware=hardware).fused == ()


def test_what_is_no_piece_is_refused_with_those_there_are():
    with pytest.raises(
        ConfigError, match=r"fuse must be auto, none, or some of .*\(did you mean loss\?\)"
    ):
        nc.plan(nn.Linear(2, 2), "fp32", hardware=nc.detect_hardware("cpu"), fuse=["los"])


def test_a_named_piece_of_an_unknown_model_is_refused():
    with pytest.raises(UnsupportedError, match=r"this model has no matching module\. Leave"):
        nc.plan(nn.Linear(2, 2), "fp32", hardware=nc.detect_hardware("cpu"), fuse=["loss"])


def test_emulated_products_are_left_alone(language_model):
    with pytest.raises(UnsupportedError, match="products are emulated"):
        fused(language_model("Llama"), policy="bf16", emulate=True)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["bf16", "bf16, params=bf16, master=split", "fp16"])
@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_on_a_gpu_the_loss_is_that_of_the_same_policy(language_model, sentences, family, policy):
    tokens, labels = (each.cuda() for each in sentences)
    results = []
    for fuse in ("none", ["loss"]):
        model = language_model(family).cuda()
        run = fused(model, policy=policy, fuse=fuse, loss_scale=1.0 if policy == "fp16" else None)
        with run.autocast():
            loss = model(tokens, labels=labels).loss
        run.backward(loss)
        results.append((loss.detach(), [p.grad.float() for p in model.parameters()]))
    (plain, plain_grads), (found, found_grads) = results
    # Logits in 16 bits are rounded alike; their gradients once more, before both products.
    step = 2.0**-7 if "bf16" in policy else 2.0**-10
    assert abs(found - plain) <= step * plain
    for a, b in zip(found_grads, plain_grads, strict=True):
        assert (a - b).abs().max() <= 2 * step * b.abs().max()


def test_a_copy_is_plain_and_a_change_of_policy_keeps_what_is_fused(language_model, sentences):
    model = language_model("Llama")
    tokens, labels = sentences
    run = fused(model)
    assert repr(run).endswith("\n  fused       loss")
    copied = copy.deepcopy(model)
    assert type(copied) is transformers.LlamaForCausalLM
    assert copied(tokens, labels=labels).logits is not None
    run.set_policy("fp32")
    assert model(tokens, labels=labels).logits is None
    run.set_policy(nc.plan(model, "fp32", hardware=run.plan.hardware, fuse="none"))
    assert model(tokens, labels=labels).logits is not None


def test_a_reading_of_health_sees_the_input_of_the_head(language_model, sentences):
    model = language_model("Llama")
    run = fused(model)
    tokens, labels = sentences
    seen = []

    class Looks(Probe):
        def forward(self, x):
            seen.append("called")
            return super().forward(x)

        def nc_sees(self, x):
            seen.append(x.detach().clone())

    with run.autocast():
        plain = model.model(tokens).last_hidden_state
        swap(model.lm_head, Looks)
        model(tokens, labels=labels)
    (hidden,) = seen  # once, and without a call
    assert torch.equal(hidden, plain.reshape(-1, 32))


@pytest.mark.parametrize("compiled", [False, True])
def test_logits_that_are_capped_only_after_prepare_are_capped(language_model, sentences, compiled):
    tokens, labels = sentences
    plain, model = language_model("Gemma3Text"), language_model("Gemma3Text")
    run = fused(model)
    called = torch.compile(model, backend="eager") if compiled else model
    for cap in (None, 0.1, None):
        plain.config.final_logit_softcapping = model.config.final_logit_softcapping = cap
        with run.autocast():
            found = called(tokens, labels=labels)
        assert ("logits" in found) == (cap is not None)
        expected = plain(tokens, labels=labels).loss.item()
        assert found.loss.item() == pytest.approx(expected, rel=1e-6)


def test_logits_that_are_capped_on_the_way_to_them_are_refused(language_model, sentences):
    tokens, labels = sentences
    model = language_model("Gemma3Text")
    run = fused(model)

    def cap(*_):
        model.config.final_logit_softcapping = 2.0

    model.model.register_forward_pre_hook(cap)
    with run.autocast(), pytest.raises(ConfigError, match="Gemma3ForCausalLM changes its l"):
        model(tokens, labels=labels)


def test_another_loss_that_is_asked_for_by_name_is_the_one_taken(language_model, sentences):
    tokens, labels = sentences
    plain, model = language_model("Llama"), language_model("Llama")
    run = fused(model)
    plain.loss_type = model.loss_type = "ForMaskedLM"
    with run.autocast():
        found = model(tokens, labels=labels).loss
    assert found.item() == pytest.approx(plain(tokens, labels=labels).loss.item(), rel=1e-6)
