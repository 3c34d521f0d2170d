"""Blocks that are computed again: the same numbers, fewer of them kept, nothing done twice."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import narrowcast as nc
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.health.statistics.probes import Probes
from narrowcast.workloads.lm.model import build_gpt
from narrowcast.workloads.lm.settings import LmModel

WIDTH, LENGTH, VOCAB, STEPS = 16, 8, 32, 5
AGAIN = ("blocks", "selective")
POLICIES = ("fp32", "bf16", "fp16", "bf16-pure", "fp8-delayed")


class Counting(nn.Module):
    """Multiplies by how often it was called: computed again it must find what it found."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * (1 + self.calls / 10)


class Block(nn.Module):
    def __init__(self, normed):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if normed else nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.counting = Counting() if normed else nn.Identity()

    def forward(self, x, *, shift=0.0):
        return x + self.counting(self.down(self.drop(F.gelu(self.up(self.norm(x)))))) + shift


class Net(nn.Module):
    def __init__(self, *, normed=False, by_hand=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block(normed) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.by_hand = by_hand

    def forward(self, tokens):
        x = self.embed(tokens.flatten())
        for i, layer in enumerate(self.layers):
            if self.by_hand:
                x = checkpoint(layer, x, shift=i, use_reentrant=False)
            else:
                x = layer(x, shift=i)
        return self.head(x)


def loss_of(model, tokens):
    answer = model(tokens)
    logits = answer if isinstance(answer, Tensor) else answer.logits
    return F.cross_entropy(logits.flatten(0, -2), tokens.flatten())


def batch(step):
    return torch.randint(VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(step))


def gpt():
    settings = LmModel(layers=3, width=WIDTH, heads=2)
    return build_gpt(settings, vocab=VOCAB, length=LENGTH, seed=0, device=torch.device("cpu"))


def llama(*, use_cache=False):
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        attention_dropout=0.1,
        use_cache=use_cache,
    )
    return LlamaForCausalLM(config).train()


MODELS = {"net": Net, "norms": lambda: Net(normed=True), "gpt": gpt, "llama": llama}


def prepared(build=Net, *, policy="fp32", **memory):
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return nc.prepare(model, optimizer, policy=policy, memory=nc.Memory(**memory))


def trained(run, steps=STEPS, first=0):
    """Take steps of two micro-batches; return the gradients of the last, and all states."""
    found = []
    for step in range(first, first + steps):
        torch.manual_seed(step)
        for micro in range(2):
            with run.autocast():
                loss = loss_of(run.model, batch(2 * step + micro)) / 2
            run.backward(loss)
        found = [p.grad.clone() for p in run.model.parameters() if p.grad is not None]
        assert run.step().applied
    return found, copy.deepcopy(run.state_dict()), torch.get_rng_state()


def tensors(value, where=""):
    if isinstance(value, Tensor):
        yield where, value
        return
    items = enumerate(value) if isinstance(value, list | tuple) else getattr(value, "items", list)()
    for key, item in items:
        yield from tensors(item, f"{where}/{key}")


def same(one, other):
    pairs = list(zip(tensors(one), tensors(other), strict=True))
    assert len(pairs) > 10
    return [name for (name, a), (_, b) in pairs if not torch.equal(a, b)]


@pytest.mark.sampled(times=2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_gradients_weights_buffers_histories_and_randomness_are_bit_for_bit_those_of_a_kept_block(
    build, policy
):
    steps = 2 if policy == "fp8-delayed" else STEPS
    kept = trained(prepared(build, policy=policy), steps)
    for again in AGAIN:
        assert (
            same(
                trained(prepared(build, policy=policy, activation_checkpointing=again), steps), kept
            )
            == []
        )


@pytest.mark.parametrize("again", AGAIN)
def test_it_is_torchs_own_checkpointing_bit_for_bit(again):
    run = prepared(activation_checkpointing=again)
    torch.manual_seed(0)
    plain = Net(by_hand=True)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(STEPS):
        torch.manual_seed(step)
        loss_of(plain, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.manual_seed(step)
        with run.autocast():
            loss = loss_of(run.model, batch(step))
        run.step(loss)
    assert same(run.fp32_state_dict(), plain.state_dict()) == []


def test_torch_itself_moves_a_running_mean_twice():
    """What the blocks of a prepared model do not do; or there would be nothing to see to."""
    means = []
    for by_hand in (False, True):
        torch.manual_seed(0)
        model = Net(normed=True, by_hand=by_hand)
        loss_of(model, batch(0)).backward()
        means.append(model.layers[0].norm.running_mean)
    assert not torch.equal(*means)


@pytest.mark.parametrize("again", AGAIN)
def test_a_cache_that_a_second_pass_would_add_to_is_left_out_of_training(again):
    """transformers keep keys without being asked, and leave it where they compute again too."""
    run = prepared(lambda: llama(use_cache=True), activation_checkpointing=again)
    assert same(trained(run, 2), trained(prepared(llama), 2)) == []


def held_after_forward(run):
    """Bytes that a forward pass has allocated and the graph of its loss still holds."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen, run.autocast():
        loss = loss_of(run.model, batch(0))
    run.backward(loss)
    return sum(event.self_cpu_memory_usage for event in seen.events())


@pytest.mark.parametrize("build", [Net, gpt, llama])
def test_fewer_bytes_are_kept_for_the_backward_pass(build):
    held = {}
    for again in ("none", *AGAIN):
        run = prepared(build, activation_checkpointing=again)
        held_after_forward(run)  # what is made once
        held[again] = held_after_forward(run)
    assert held["blocks"] < held["selective"] < held["none"]
    assert held["blocks"] < held["none"] / 2


def test_a_pass_without_gradients_keeps_and_computes_nothing_again():
    run = prepared(lambda: llama(use_cache=True), activation_checkpointing="blocks")
    run.model.eval()
    with torch.no_grad(), run.autocast():
        whole = run.model(input_ids=batch(0)).logits
        first = run.model(input_ids=batch(0)[:, :-1])
        last = run.model(input_ids=batch(0)[:, -1:], past_key_values=first.past_key_values)
    assert torch.allclose(last.logits[:, 0], whole[:, -1], atol=1e-5)


def test_release_leaves_plain_blocks():
    run = prepared(activation_checkpointing="selective")
    model = run.release()
    assert type(model.layers[0]) is Block
    assert not any(name.startswith("nc_") for m in model.modules() for name in vars(m))


def test_another_policy_goes_on_with_the_same_saving():
    results = []
    for again in ("none", *AGAIN):
        run = prepared(activation_checkpointing=again)
        trained(run, 2)
        run.set_policy("fp8-delayed")
        assert run.plan.memory.requested.activation_checkpointing == again
        results.append(trained(run, 2, first=2))
    assert same(results[1], results[0]) == same(results[2], results[0]) == []
    plan = nc.plan(run.model, "bf16", hardware=run.plan.hardware)
    with pytest.raises(ConfigError, match="must have the memory settings of this run"):
        run.set_policy(plan)


@pytest.mark.parametrize("again", AGAIN)
def test_a_run_resumes_bit_for_bit_whether_blocks_are_kept_or_not(again):
    whole = trained(prepared(policy="fp8-delayed"), 4)
    first = prepared(policy="fp8-delayed", activation_checkpointing=again)
    trained(first, 2)
    second = prepared(policy="fp8-delayed")
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert same(trained(second, 2, first=2), whole) == []


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_same_place_is_named_where_a_number_is_not_finite(where):
    verdicts = []
    for again in ("none", *AGAIN):
        run = prepared(policy="bf16", activation_checkpointing=again)
        block = run.model.layers[1]
        if where == "forward":
            with torch.no_grad():
                block.down.weight.fill_(3e38)
        else:
            block.drop.register_full_backward_pre_hook(lambda _, g: [each * math.nan for each in g])
        verdicts.append(nc.explain(run, [batch(0)], lambda each, m=run.model: loss_of(m, each)))
    assert verdicts[0] is not None
    assert len({(v.module, v.role, v.kind, v.phase) for v in verdicts}) == 1


def test_a_bad_batch_leaves_no_trace_in_the_buffers_of_a_block_that_was_computed_again():
    run = prepared(lambda: Net(normed=True), activation_checkpointing="blocks")
    trained(run, 1)
    before = copy.deepcopy(dict(run.model.named_buffers()))
    handle = run.model.layers[0].register_forward_pre_hook(lambda _, args: args[0] * math.nan)
    with run.autocast():
        loss = loss_of(run.model, batch(1))
    assert not run.step(loss).applied
    handle.remove()
    assert all(torch.equal(b, before[name]) for name, b in run.model.named_buffers())


@pytest.mark.parametrize("again", AGAIN)
def test_health_readings_are_those_of_kept_blocks(again):
    samples = []
    for how in ("none", again):
        run = prepared(policy="bf16", activation_checkpointing=how)
        probes = Probes(run.model, run.plan)
        probes.switch.on = True
        torch.manual_seed(0)
        with run.autocast():
            loss = loss_of(run.model, batch(0))
        run.backward(loss)
        samples.append([site.sample.clone() for site in probes.sites])
    assert len(samples[0]) > 10
    assert all(map(torch.equal, *samples))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_blocks_that_are_compiled_are_computed_again_as_they_are_compiled():
    torch._dynamo.reset()
    results, graphs = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for again in ("none", "blocks"):
        run = prepared(gpt, activation_checkpointing=again)
        for block in run.model.blocks:
            block.compile(backend=backend)
        graphs.clear()
        results.append(trained(run, 2))
        assert graphs
    assert same(*results) == []
    # Autocast regions that were entered are left: in one that is open, torch never drops the copies
    # of weights that it has cast, and later loops would train on old ones.
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()
    torch._dynamo.reset()


def gpu_run(build, again):
    torch.manual_seed(0)
    model = build().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return nc.prepare(
        model, optimizer, policy="bf16", memory=nc.Memory(activation_checkpointing=again)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("build", [Net, lambda: Net(normed=True), llama])
def test_on_a_gpu_gradients_are_those_of_kept_blocks_and_the_peak_is_lower(build):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    results, peaks = {}, {}
    for again in ("none", *AGAIN):
        run = gpu_run(build, again)
        for step in range(3):
            torch.manual_seed(step)
            tokens = batch(step).repeat(512, 1).cuda()
            torch.cuda.reset_peak_memory_stats()
            with run.autocast():
                loss = loss_of(run.model, tokens)
            run.backward(loss)
            peaks[again] = torch.cuda.max_memory_allocated()
            if step == 0:
                results[again] = [p.grad.clone() for p in run.model.parameters()]
            run.step()
    for again in AGAIN:
        # Embeddings are added up by atomics: in another order each time, which steps would magnify.
        for one, kept in zip(results[again], results["none"], strict=True):
            assert torch.allclose(one, kept, rtol=1e-2, atol=1e-4)
    assert peaks["blocks"] < peaks["none"]
    assert peaks["blocks"] <= peaks["selective"] <= peaks["none"]


@pytest.mark.gpu
def test_a_captured_step_computes_again_unless_blocks_draw_random_numbers():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from narrowcast.precision.step.cuda_graph import WARM_UP, GraphedStep

    for dropout in (0.0, 0.2):
        run = gpu_run(Net, "blocks")
        for layer in run.model.layers:
            layer.drop.p = dropout
        step = GraphedStep(run.engine)

        def passes(batches, run=run):
            with run.autocast():
                loss = loss_of(run.model, batches[0])
            run.backward(loss)
            return loss.detach()

        def launch(batches, between, run=run, passes=passes):
            loss = passes(batches)
            return run.step(), loss

        tokens = batch(0).cuda()
        for _ in range(WARM_UP):
            step([tokens], None, passes=passes, launch=launch)
        if dropout:
            with pytest.raises(UnsupportedError, match="a CUDA graph cannot reproduce them"):
                step([tokens], None, passes=passes, launch=launch)
        else:
            losses = [step([tokens], None, passes=passes, launch=launch)[1].item() for _ in "ab"]
            assert step.captured
            assert losses[1] < losses[0]
