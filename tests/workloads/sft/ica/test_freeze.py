import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Phi3Config, Phi3ForCausalLM

import narrowcast as nc
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.workloads.sft.ica import Freeze
from narrowcast.workloads.sft.ica.blocks import find_blocks

CHOSEN = {0: (1, 5), 2: (0, 15)}


def effective_rows(model):
    """The rows of the down projections, as a merged model has them, and their biases."""
    whole = copy.deepcopy(model)
    if isinstance(whole, PeftModel):
        whole = whole.merge_and_unload()
    rows = []
    for block in find_blocks(whole).blocks:
        weight = block.down.plain.weight.detach()
        bias = block.down.plain.bias
        rows.append((weight.T if block.down.turned else weight, bias))
    return rows


def assert_only_the_chosen_stayed(before, after):
    for layer, ((weight, bias), (moved, moved_bias)) in enumerate(zip(before, after, strict=True)):
        stayed = (weight == moved).all(1)
        if bias is not None and not torch.equal(bias, moved_bias):
            stayed &= bias == moved_bias
        chosen = torch.zeros(16, dtype=torch.bool)
        chosen[list(CHOSEN.get(layer, ()))] = True
        assert torch.equal(stayed, chosen)


def train(model, batches, step, steps):
    for i in range(steps):
        batch = batches[i % 2]
        step(model(**batch, labels=batch["input_ids"]).loss)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_rows_cannot_move_in_fifty_steps(model, batches, optimizer, tmp_path):
    trained = [p for p in model.parameters() if p.requires_grad]
    if optimizer == "adamw":
        made = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    else:
        made = torch.optim.SGD(trained, lr=1e-2, momentum=0.9, weight_decay=0.1)

    def step(loss):
        loss.backward()
        made.step()
        made.zero_grad()
        if freeze is not None:
            freeze.restore()

    freeze = None
    if not isinstance(model, PeftModel):
        train(model, batches, step, 3)  # momentum is warm; an adapter has to begin at zero
    before = effective_rows(model)
    freeze = Freeze(model, CHOSEN)
    train(model, batches, step, 50)
    assert freeze.drift() == 0.0
    after = effective_rows(model)
    assert_only_the_chosen_stayed(before, after)
    saved = copy.deepcopy(model)
    plain = saved.merge_and_unload() if isinstance(saved, PeftModel) else saved
    plain.save_pretrained(tmp_path)
    again = type(plain).from_pretrained(tmp_path)
    assert_only_the_chosen_stayed(before, effective_rows(again))


POLICIES = [
    "bf16",
    "fp16",
    *(f"compute=bf16, params=bf16, master={m}" for m in ("fp32", "split", "kahan", "stochastic")),
]


SPLIT = "compute=bf16, params=bf16, master=split"


@pytest.mark.parametrize("policy", ["bf16", SPLIT])
def test_rows_cannot_move_in_the_answer_of_a_lookahead_point(make_model, batches, policy):
    model = make_model("llama")
    hook, before = Freeze(model, CHOSEN).hook(), effective_rows(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    run = nc.prepare(model, optimizer, policy=policy, lookahead=nc.Lookahead())
    hook.before_first_step(run)
    for i in range(5):
        with run.autocast():
            loss = model(**batches[i % 2], labels=batches[i % 2]["input_ids"]).loss
        outcome = run.step(loss)
        with torch.no_grad():
            hook.after_step(run, outcome.applied_on_device)
    answer = run.eval_state_dict()
    released = run.release()
    released.load_state_dict(answer)
    assert_only_the_chosen_stayed(before, effective_rows(released))


@pytest.mark.parametrize(
    ("kind", "policy"),
    [*(("llama", policy) for policy in POLICIES), ("gpt2", SPLIT), ("llama-lora", SPLIT)],
)
def test_rows_cannot_move_in_a_prepared_run_with_every_digit(make_model, batches, policy, kind):
    model = make_model(kind)
    freeze = Freeze(model, CHOSEN)
    hook = freeze.hook()
    before = effective_rows(model)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.1
    )
    run = nc.prepare(model, optimizer, policy=policy, ema_decay=0.9)
    hook.before_first_step(run)

    def step(loss):
        outcome = run.step(loss)
        with torch.no_grad():
            hook.after_step(run, outcome.applied_on_device)

    for i in range(10):
        with run.autocast():
            loss = model(**batches[i % 2], labels=batches[i % 2]["input_ids"]).loss
        step(loss)
    averaged = copy.deepcopy(make_model(kind))
    averaged.load_state_dict(run.ema_state_dict())
    released = run.release()
    after = effective_rows(released)
    for layer, channels in CHOSEN.items():
        rows = list(channels)
        exact = before[layer][0][rows]
        # One number of bf16 holds 8 bits, two hold 16; an fp32 weight has 24.
        lost = 2**-8 if "stochastic" in policy else 2**-15 if "kahan" in policy else 0
        torch.testing.assert_close(after[layer][0][rows], exact, rtol=lost, atol=0)
        torch.testing.assert_close(
            effective_rows(averaged)[layer][0][rows], exact, rtol=lost, atol=0
        )
    assert not torch.equal(after[1][0], before[1][0])


def test_a_resumed_run_keeps_the_rows_it_began_with(make_model):
    model = make_model("llama")
    one = Freeze(model, CHOSEN)
    state = copy.deepcopy(one.hook().state_dict())
    weight = find_blocks(model).blocks[0].down.plain.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight += 1
    other = Freeze(model, CHOSEN)
    other.hook().load_state_dict(state)
    other.restore()
    assert torch.equal(weight[[1, 5]], kept[[1, 5]])
    strangers = Freeze(model, {0: (1,)})
    with pytest.raises(ConfigError, match="The checkpoint froze different rows"):
        strangers.hook().load_state_dict(state)


def test_an_adapter_that_has_learnt_is_refused(make_model):
    model = make_model("llama-lora")
    down = find_blocks(model).blocks[0].down.module
    with torch.no_grad():
        down.lora_B["default"].weight[1] = 0.5
    with pytest.raises(ConfigError, match=r"'default' already has nonzero weights .* Merge it"):
        Freeze(model, CHOSEN)
    Freeze(model, {0: (2,)})


def test_dora_is_refused(make_model):
    config = LoraConfig(r=4, target_modules=["down_proj"], use_dora=True)
    model = get_peft_model(make_model("llama"), config)
    with pytest.raises(
        UnsupportedError,
        match=r"which can change every row of the weight. Freezing needs plain LoRA",
    ):
        Freeze(model, CHOSEN)


def test_nothing_to_freeze_is_told(make_model):
    config = LoraConfig(r=4, target_modules=["q_proj"])
    model = get_peft_model(make_model("llama"), config)
    with pytest.raises(ConfigError, match="Nothing to freeze: no weight of these channels is"):
        Freeze(model, CHOSEN)


def test_channels_of_another_model_are_refused(make_model):
    with pytest.raises(ConfigError, match="networks were made for another model"):
        Freeze(make_model("llama"), {0: (16,)})


def neurons(model):
    """What leads to each input of the down projections and away from it, after a merge."""
    whole = copy.deepcopy(model)
    if isinstance(whole, PeftModel):
        whole = whole.merge_and_unload()
    found = []
    for block in find_blocks(whole).blocks:
        weights = [block.down.plain.weight if block.down.turned else block.down.plain.weight.T]
        for up in block.ups:
            rows = up.plain.weight.T if up.turned else up.plain.weight
            weights += rows.split(block.down.inputs)
            if up.plain.bias is not None:
                weights += up.plain.bias[:, None].split(block.down.inputs)
        found.append(torch.cat([weight.detach() for weight in weights], 1))
    return found


def phi3_lora():
    config = Phi3Config(
        num_hidden_layers=3,
        hidden_size=16,
        intermediate_size=40,
        num_attention_heads=2,
        vocab_size=64,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    targets = ["down_proj", "gate_up_proj"]
    return get_peft_model(Phi3ForCausalLM(config), LoraConfig(r=4, target_modules=targets))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt2-lora", "llama-lora", "phi3-lora"])
def test_neurons_cannot_move_either(make_model, batches, kind):
    model = phi3_lora() if kind == "phi3-lora" else make_model(kind)
    before = neurons(model)
    freeze = Freeze(model, {0: (1, 39), 2: (0,)}, site="down_input")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)

    def step(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        freeze.restore()

    train(model, batches, step, 20)
    after = neurons(model)
    stayed = [(a == b).all(1).nonzero()[:, 0].tolist() for a, b in zip(before, after, strict=True)]
    assert stayed == [[1, 39], [], [0]]


def test_a_layer_without_channels_is_left_alone(make_model):
    frozen = Freeze(make_model("llama"), {0: (), 1: (2,)})
    assert frozen.names == ("model.layers.1.mlp.down_proj.weight",)
