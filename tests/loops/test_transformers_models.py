"""Models of transformers, as small as they get: trained a few steps, and asked to generate."""

from contextlib import nullcontext

import pytest
import torch

import narrowcast as nc

transformers = pytest.importorskip("transformers")
STEPS = 4
IDS = torch.randint(3, 40, (2, 7), generator=torch.Generator().manual_seed(0))
SOUND = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1))
PICTURES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
TOKENS = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def t5():
    config = transformers.T5Config(
        **TOKENS, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_decoder_layers=1, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {"input_ids": IDS, "labels": IDS}


def whisper():
    config = transformers.WhisperConfig(
        **TOKENS, num_mel_bins=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, d_model=16,
        max_source_positions=16, max_target_positions=20, decoder_start_token_id=3,
        begin_suppress_tokens=None, suppress_tokens=None,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    return model, {"input_features": SOUND, "labels": IDS}


def vit():
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        image_size=8, patch_size=4, num_labels=4,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config)
    return model, {"pixel_values": PICTURES, "labels": torch.tensor([0, 3])}


def mamba():
    config = transformers.MambaConfig(**TOKENS, hidden_size=16, state_size=4, num_hidden_layers=1)
    return transformers.MambaForCausalLM(config), {"input_ids": IDS, "labels": IDS}


def llama():
    config = transformers.LlamaConfig(
        **TOKENS, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), {"input_ids": IDS, "labels": IDS}


def lora():
    peft = pytest.importorskip("peft")
    model, batch = llama()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config), batch


MODELS = [t5, whisper, vit, mamba, llama, lora]


def parts(build):
    torch.manual_seed(0)
    model, batch = build()
    trained = [p for p in model.parameters() if p.requires_grad]
    return model.train(), batch, torch.optim.AdamW(trained, lr=1e-2)


def plain_loop(trained, build, region=None):
    model, batch, optimizer = parts(build)
    losses = []
    for _ in range(STEPS):
        with region or nullcontext():
            loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return trained(losses, [model], [optimizer])


def loop(trained, build, **settings):
    model, batch, optimizer = parts(build)
    run = nc.prepare(model, optimizer, **settings)
    losses = []
    for _ in range(STEPS):
        with run.autocast():
            loss = model(**batch).loss
        run.step(loss)
        losses.append(loss.item())
    run.release()
    return trained(losses, [model], [optimizer])


@pytest.mark.parametrize("build", MODELS)
def test_a_model_in_fp32_is_the_plain_one(trained, same, build):
    same(loop(trained, build, policy="fp32"), plain_loop(trained, build))


@pytest.mark.parametrize("build", MODELS)
def test_a_model_trains_in_a_narrow_policy(trained, near, narrow_or_params, build):
    # Ten products one after another, or so: projections, attention, an MLP, twice; and a head.
    mine = loop(trained, build, **narrow_or_params)
    near(mine, plain_loop(trained, build), products=10, **narrow_or_params)


@pytest.mark.parametrize("build", MODELS)
def test_a_model_in_bf16_is_near_torchs_own_mixed_precision(trained, near, build, autocast):
    mine = loop(trained, build, policy="bf16")
    theirs = plain_loop(trained, build, autocast("bf16"))
    near(mine, theirs, products=10, policy="bf16")


def generated(model, batch):
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    model.eval()
    with torch.no_grad():
        return model.generate(**inputs, max_new_tokens=4, do_sample=False)


GENERATORS = [t5, whisper, mamba, llama, lora]


@pytest.mark.parametrize("build", GENERATORS)
def test_a_model_generates_between_two_steps(build, narrow_or_params):
    model, batch, optimizer = parts(build)
    run = nc.prepare(model, optimizer, **narrow_or_params)
    for _ in range(2):
        with run.autocast():
            loss = model.train()(**batch).loss
        assert run.step(loss).applied
        tokens = generated(model, batch)
        assert tokens.dtype == torch.long
        with run.autocast():
            assert torch.equal(generated(model, batch), tokens)


@pytest.mark.parametrize("build", GENERATORS)
def test_a_model_in_fp32_generates_what_the_plain_one_does(build):
    plain, batch, _ = parts(build)
    model, _, optimizer = parts(build)
    nc.prepare(model, optimizer, policy="fp32")
    assert torch.equal(generated(model, batch), generated(plain, batch))


@pytest.mark.parametrize("build", [t5, whisper])
def test_an_encoder_called_alone_computes_in_the_models_policy(build, narrow_or_params):
    model, batch, optimizer = parts(build)
    run = nc.prepare(model.eval(), optimizer, **narrow_or_params)
    inputs = batch["input_ids"] if build is t5 else batch["input_features"]
    with torch.no_grad():
        encoder = model.get_encoder()
        alone = encoder(inputs).last_hidden_state
        with run.autocast():
            inside = encoder(inputs).last_hidden_state
    assert torch.equal(alone, inside)


def test_lora_trains_its_adapters_only_and_leaves_the_base_as_it_was(narrow_or_params):
    model, batch, optimizer = parts(lora)
    base = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    run = nc.prepare(model, optimizer, **narrow_or_params)
    with run.autocast():
        loss = model(**batch).loss
    assert run.step(loss).applied
    now = dict(model.named_parameters())
    assert base
    assert all(v.dtype == now[n].dtype and torch.equal(v, now[n]) for n, v in base.items())


def test_a_base_in_bf16_under_lora_stays_in_bf16(trained):
    model, batch, _ = parts(lora)
    for p in model.parameters():
        if not p.requires_grad:
            p.data = p.data.bfloat16()
    adapters = [p for p in model.parameters() if p.requires_grad]
    run = nc.prepare(model, torch.optim.AdamW(adapters, lr=1e-2), policy="bf16")
    losses = []
    for _ in range(STEPS):
        with run.autocast():
            loss = model(**batch).loss
        assert run.step(loss).applied
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    kept = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert kept == {torch.bfloat16}
