"""Sharded training on several ranks: equal to one process, and one decision of all ranks."""

import math
import random
import runpy
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc
from narrowcast.errors import ConfigError, UnsupportedError

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "rank_faults.py"
rank_faults = SimpleNamespace(**runpy.run_path(str(BENCHMARK)))
RANKS, STEPS, LR = 4, 4, 1e-2
ROWS = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
LAYOUTS = ["fsdp", "hsdp", "two meshes", "partly sharded"]
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=LR),
    "fused": lambda params: torch.optim.AdamW(params, lr=LR),
    "torch fused": lambda params: torch.optim.AdamW(params, lr=LR, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9),
}
POLICIES = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8": "fp8-delayed",
    "fp8-row": "fp8-row",
    "int8 moments": "bf16, params=bf16, master=split, moments=int8",
    **{
        name: f"bf16, params=bf16, master={name.removesuffix(' master')}"
        for name in ("split", "kahan", "fp32 master", "stochastic", "none")
    },
}
_seed = threading.Lock()  # threads share torch's global generator


def network(width=33):
    # 33 rows: no number of ranks here divides them. fp8 needs multiples of 16.
    with _seed:
        torch.manual_seed(0)
        hidden = nn.Linear(16, width), nn.LayerNorm(width), nn.GELU()
        return nn.Sequential(*hidden, nn.Linear(width, 5))


def network_for(policy):
    return network(48 if policy.startswith("fp8") else 33)


def shard(model, layout):
    one, other = init_device_mesh("cpu", (RANKS,)), None
    if layout in ("hsdp", "two meshes"):
        other = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("replicate", "shard"))
    match layout:
        case "fsdp":
            meshes = [one] * 3
        case "hsdp":
            meshes = [other] * 3
        case "two meshes":
            meshes = [other, one, one]
        case _:
            meshes = [one, None, one]
    for layer, mesh in zip((model[0], model[1], model[3]), meshes, strict=True):
        if mesh is not None:
            fully_shard(layer, mesh=mesh)
    return model


def train(model, rows, *, policy="fp32", optimizer="AdamW", spoil=None, call=None, **settings):
    run = nc.prepare(
        model,
        OPTIMIZERS[optimizer](model.parameters()),
        policy=POLICIES.get(policy, policy),
        clip_norm=0.5,
        fused_optimizer=True if optimizer == "fused" else None,
        **settings,
    )
    outcomes = []
    for step in range(STEPS):
        with run.autocast():
            loss = (call or model)(rows).square().mean()
        if spoil is not None:
            loss = spoil(step, loss)
        outcomes.append(run.step(loss))
    return run, outcomes


def whole(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def in_ddp(model):
    """Return a function that calls the model through DDP, which wraps it after prepare()."""
    parallel = []

    def forward(rows):
        if not parallel:
            parallel.append(DistributedDataParallel(model))
        return parallel[0](rows)

    return forward


def on_shards(layout, spoil_on=None, policy="fp32", **settings):
    """Train on every rank; return per rank what it decided and the full weights it has."""

    def one_rank(rank):
        model, rows = network_for(policy), ROWS.chunk(RANKS)[rank]
        call = in_ddp(model) if layout == "ddp" else shard(model, layout)
        spoil = None if spoil_on is None else lambda step, loss: spoil_on(rank, step, loss)
        run, outcomes = train(model, rows, policy=policy, spoil=spoil, call=call, **settings)
        assert ("e4m3" in str(run.plan)) == policy.startswith("fp8")
        decided = [(o.applied, o.grad_norm, o.next_scale, o.bad_rank) for o in outcomes]
        return decided, {name: whole(v) for name, v in run.fp32_state_dict().items()}

    return on_ranks(RANKS, one_rank)


def check_equal_on_ranks(results):
    decided, weights = results[0]
    for others, values in results[1:]:
        assert str(others) == str(decided)  # NaN norms are equal too
        assert all(torch.equal(values[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("policy", "layout", "optimizer"),
    [
        (policy, layout, list(OPTIMIZERS)[(i + j) % len(OPTIMIZERS)])
        for i, policy in enumerate(POLICIES)
        for j, layout in enumerate(("ddp", "fsdp", "hsdp", LAYOUTS[2 + i % 2]))
    ],
)
def test_training_on_ranks_follows_one_process(layout, optimizer, policy):
    if policy == "int8 moments":
        optimizer = "fused"
    start = network_for(policy).state_dict()
    run, alone = train(network_for(policy), ROWS, policy=policy, optimizer=optimizer)
    results = on_shards(layout, policy=policy, optimizer=optimizer)
    check_equal_on_ranks(results)
    decided, weights = results[0]
    # Gradients are rounded per rank, to 8 bits in bf16 and 11 in fp16. The coarser roundings of
    # fp8 cancel in sums. Stochastic rounding draws other numbers for shards.
    digits = {"fp32": 20, "fp16": 10, "stochastic": 4}.get(policy, 7)
    assert [o.grad_norm for o in alone] == pytest.approx(
        [norm for _, norm, _, _ in decided], rel=4 * 2 ** -max(digits, 7)
    )
    expected = run.fp32_state_dict()
    updates = torch.cat([(expected[name] - start[name]).flatten() for name in start])
    errors = torch.cat([(expected[name] - weights[name]).flatten() for name in start])
    assert errors.norm() <= 8 * 2**-digits * updates.norm()


@pytest.mark.parametrize(
    ("ranks", "layout", "policy", "optimizer"),
    [
        (2, "DDP", "fp16", "AdamW"),
        (2, "FSDP2", POLICIES["split"], "fused"),
        (4, "HSDP", "fp32", "SGD"),
        (4, "two meshes", "fp16", "AdamW"),
        (2, "partly sharded", "bf16", "fused"),
    ],
)
def test_twenty_random_faults_are_skipped_by_all_ranks(ranks, layout, policy, optimizer):
    draw = random.Random(layout)
    faults = [rank_faults.drawn(draw, ranks, layout) for _ in range(20)]
    cell = (ranks, layout, policy, optimizer, faults)
    counts = rank_faults.judge(
        on_ranks(ranks, lambda rank: rank_faults.run_cell(rank, *cell)), faults
    )
    assert {name: count for name, count in counts.items() if count} == {"faults": 20}


@pytest.mark.parametrize(
    ("layout", "policy"),
    [("fsdp", "fp16"), ("hsdp", "fp32"), ("two meshes", "split"), ("partly sharded", "fp16")],
)
def test_bad_gradient_on_one_rank_is_skipped_by_all(layout, policy):
    def spoil(rank, step, loss):
        if (rank, step) == (2, 1):
            return loss * math.inf
        if (rank, step) == (1, 2):
            loss.register_hook(lambda grad: grad * math.nan)  # the loss itself stays finite
        return loss

    results = on_shards(layout, spoil, policy=policy)
    check_equal_on_ranks(results)
    decided, weights = results[0]
    assert [applied for applied, *_ in decided] == [True, False, False, True]
    assert [rank for *_, rank in decided] == [None, 2, None, None]
    assert all(value.isfinite().all() for value in weights.values())
    scales = [scale for _, _, scale, _ in decided]
    assert scales == ([2**16, 2**15, 2**14, 2**14] if policy == "fp16" else [1.0] * STEPS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inf_in_one_shard_of_one_rank_is_skipped_by_all(layout):
    # As an expert's gradient, which no other rank sees.
    def one_rank(rank):
        model = shard(network(), layout)
        run = nc.prepare(model, OPTIMIZERS["AdamW"](model.parameters()), policy="fp16")
        with run.autocast():
            loss = model(ROWS).square().mean()
        run.backward(loss)
        run.unscale()
        weight = model[3].weight
        grad = weight.grad.to_local()
        if rank == 2:  # rank 3 has none of the five rows
            grad.fill_(math.inf)
        outcome = run.step()
        return outcome.applied, outcome.next_scale, outcome.bad_parameters, whole(weight)

    results = on_ranks(RANKS, one_rank)
    for applied, scale, bad, weight in results:
        assert (applied, bad) == (False, ("3.weight",))
        assert scale == results[0][1]
        assert torch.equal(weight, network()[3].weight)


def test_gradient_norm_counts_every_weight_once():
    def one_rank(rank):
        model = shard(network(), "partly sharded")
        run = nc.prepare(model, OPTIMIZERS["AdamW"](model.parameters()), policy="fp32")
        return run.step(model(ROWS.chunk(RANKS)[rank]).square().mean()).grad_norm

    model = network()
    model(ROWS).square().mean().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert on_ranks(RANKS, one_rank) == [pytest.approx(norm, rel=1e-6)] * RANKS


def test_replicated_weights_stay_equal_under_stochastic_rounding():
    results = on_shards("partly sharded", policy="bf16, params=bf16, master=stochastic")
    check_equal_on_ranks(results)


def test_fault_of_one_rank_holds_the_average():
    def one_rank(rank):
        model = shard(network(), "fsdp")
        run, _ = train(model, ROWS, ema_decay=0.5)
        before = {name: whole(v) for name, v in run.ema_state_dict().items()}
        loss = model(ROWS).square().mean() * (math.nan if rank == 1 else 1.0)
        assert not run.step(loss).applied
        return all(torch.equal(whole(v), before[n]) for n, v in run.ema_state_dict().items())

    assert on_ranks(RANKS, one_rank) == [True] * RANKS


def llama():
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_attention_heads=4, **shape)
    with _seed:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("policy", "rel"),
    [("fp32", 2**-20), ("bf16, params=bf16, master=split; lm_head: fp32", 2**-6)],
)
def test_fully_shard_trains_a_language_model_as_one_process(policy, rel):
    ids = torch.randint(0, 64, (RANKS, 12), generator=torch.Generator().manual_seed(0))
    memory = nc.Memory(activation_checkpointing="blocks")

    def one_rank(rank, rows, mesh_shape=None):
        model = llama()
        if mesh_shape is not None:
            mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
            nc.fully_shard(model, mesh, policy=policy)
            assert all(isinstance(layer, FSDPModule) for layer in model.model.layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = nc.prepare(model, optimizer, policy=policy, memory=memory)
        norms = []
        for _ in range(2):
            with run.autocast():
                loss = model(input_ids=rows, labels=rows).loss
            norms.append(run.step(loss).grad_norm)
        dtypes = {name: p.dtype for name, p in model.named_parameters()}
        return norms, dtypes

    norms, dtypes = one_rank(0, ids)
    shards = on_ranks(RANKS, lambda rank: one_rank(rank, ids[rank : rank + 1], (2, 2)))
    for mine, formats in shards:
        assert mine == pytest.approx(norms, rel=rel)
        assert formats == dtypes


def test_fully_shard_raises_with_what_to_write():
    def one_rank(rank):
        model = network()
        with pytest.raises(ConfigError, match=r"policy.*mp_policy"):
            nc.fully_shard(model, mp_policy=None)
        unnamed = init_device_mesh("cpu", (1, 2))
        with pytest.raises(ConfigError, match="mesh_dim_names"):
            nc.fully_shard(model, unnamed)
        nc.fully_shard(model)
        with pytest.raises(ConfigError, match=r"0\.weight is sharded already"):
            nc.fully_shard(model)
        with pytest.raises(UnsupportedError, match=r"grads=fp32.*reduce=fp32"):
            train(model, ROWS, policy="bf16, params=bf16, grads=fp32")
        for kind in (torch.optim.Adafactor, torch.optim.Rprop):
            with pytest.raises(UnsupportedError, match=rf"{kind.__name__} cannot step sharded"):
                nc.prepare(model, kind(model.parameters(), lr=LR))
        run, _ = train(network(), ROWS)
        with pytest.raises(ConfigError, match=r"prepared already.*prepare\(\) last"):
            nc.fully_shard(run.model)
        return True

    assert on_ranks(2, one_rank) == [True, True]
    with pytest.raises(ConfigError, match="torchrun"):
        nc.fully_shard(network())


@pytest.mark.parametrize("policy", ["fp32", "fp16", "split", "int8 moments", "fp8", "fp8-row"])
def test_ddp_skips_a_bad_step_on_all_ranks(policy):
    def spoil(rank, step, loss):
        return loss * math.inf if (rank, step) == (1, 2) else loss

    results = on_shards("ddp", spoil, policy=policy)
    check_equal_on_ranks(results)
    assert [applied for applied, *_ in results[0][0]] == [True, True, False, True]


def test_reduce_format_of_the_policy_reduces_gradients():
    def one_rank(rank, policy):
        model = network()
        nc.fully_shard(model, policy=policy)
        run = nc.prepare(model, OPTIMIZERS["SGD"](model.parameters()), policy=policy)
        run.backward(model(ROWS.chunk(2)[rank]).square().mean())
        return model[3].weight.grad.full_tensor()

    fp32, bf16 = (
        on_ranks(2, lambda rank, text=text: one_rank(rank, text))[0]
        for text in ("fp32", "fp32, reduce=bf16")
    )
    assert not torch.equal(fp32, bf16)
    assert torch.equal(bf16, bf16.bfloat16().float())


@pytest.mark.parametrize("policy", ["fp32", POLICIES["split"]])
@pytest.mark.parametrize("block", ["use_ema", "use_eval_weights"])
def test_forward_pass_inside_a_weight_swap_has_the_swapped_weights(block, policy):
    kept = {"ema_decay": 0.9} if block == "use_ema" else {"lookahead": nc.Lookahead()}

    def one_rank(rank, world):
        model, rows = network(), ROWS.chunk(world)[rank]
        if world > 1:
            nc.fully_shard(model, policy=policy)
        found = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = nc.prepare(model, optimizer, policy=policy, **kept)
        for _ in range(3):
            run.step(model(rows).square().mean())
            with torch.no_grad(), getattr(run, block)():
                found.append(model(ROWS))
                inside = model.state_dict()
            with torch.no_grad():
                found.append(model(ROWS))
        return found, {name: whole(value) for name, value in inside.items()}

    (alone, state), shards = one_rank(0, 1), on_ranks(2, lambda rank: one_rank(rank, 2))
    rel = 2**-18 if policy == "fp32" else 2**-6
    for outputs, inside in shards:
        for mine, output in zip(outputs, alone, strict=True):
            torch.testing.assert_close(mine, output, rtol=rel, atol=rel)
        for name, value in inside.items():
            torch.testing.assert_close(value, state[name], rtol=rel, atol=rel)
    assert not torch.equal(alone[-1], alone[-2])


class Adapted(nn.Module):
    """A frozen base with a trained adapter, a scalar gain, and two experts of a row's sign."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.adapter = nn.Linear(16, 16)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.experts = nn.ModuleDict({name: nn.Linear(16, 5) for name in ("minus", "plus")})

    def forward(self, x):
        name = "plus" if x[0, 0] > 0 else "minus"
        return self.experts[name](self.base(x) + self.gain * self.adapter(x))


def adapted(world, rank, *, ignored=(), blocks=("base",), unused=False):
    """Train on rows of which each rank's go to another expert; return norms and weights."""
    with _seed:
        torch.manual_seed(0)
        model = Adapted()
    if world > 1:
        whole_ones = {p for name in ignored for p in model.get_submodule(name).parameters()}
        nc.fully_shard(model, blocks=blocks, ignored_params=whole_ones)
        if unused:
            model.set_reduce_scatter_unused_params(True)
    trained = [p for p in model.parameters() if p.requires_grad]
    run = nc.prepare(model, torch.optim.AdamW(trained, lr=LR), policy="fp32", clip_norm=0.5)
    parts = [torch.cat([sign * ROWS[:4, :1].abs(), ROWS[:4, 1:]], 1) for sign in (1, -1)]
    norms = []
    for _ in range(3):
        mine = parts if world == 1 else parts[rank : rank + 1]
        loss = sum(model(rows).square().mean() for rows in mine) / len(mine)
        norms.append(run.step(loss).grad_norm)
    return norms, {name: whole(value) for name, value in run.fp32_state_dict().items()}


@pytest.mark.parametrize(
    "layout", [{"ignored": ("adapter", "experts")}, {"ignored": ("experts",)}, {"unused": True}]
)
def test_weights_that_some_ranks_do_not_use_follow_one_process(layout):
    norms, weights = adapted(1, 0)
    for mine, values in on_ranks(2, lambda rank: adapted(2, rank, **layout)):
        assert mine == pytest.approx(norms, rel=1e-6)
        for name, value in values.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-6)


def test_gradients_that_fsdp_mixed_with_those_of_another_expert_raise():
    message = r"experts.minus.weight.*some ranks only.*set_reduce_scatter_unused_params\(True\)"
    with pytest.raises(UnsupportedError, match=message):
        on_ranks(2, lambda rank: adapted(2, rank))


def test_sharded_weights_gathered_by_an_evaluation_are_told_apart():
    split = POLICIES["split"]

    def one_rank(rank):
        model = network()
        nc.fully_shard(model, policy=split)
        before = torch.optim.AdamW(model.parameters(), lr=LR)
        model(ROWS)
        late = torch.optim.AdamW(model.parameters(), lr=LR)
        with pytest.raises(ConfigError, match=r"AdamW was built after a forward pass"):
            nc.prepare(model, late)
        with pytest.raises(UnsupportedError, match=r"prepare\(\).*before the first forward"):
            nc.prepare(model, before, policy=split)
        run = nc.prepare(model, before, policy="fp32")
        with torch.no_grad():
            model(ROWS)
        assert run.set_policy("bf16")
        with pytest.raises(UnsupportedError, match=r"set_policy\(\).*same params="):
            run.set_policy(split)
        return run.step(model(ROWS).square().mean()).applied

    assert on_ranks(2, one_rank) == [True, True]


@pytest.mark.parametrize("layout", ["fsdp", "hsdp"])
@pytest.mark.parametrize("cause", ["batch", "gradient"])
def test_diagnosis_names_the_rank_and_changes_nothing(layout, cause):
    def one_rank(rank):
        model, batches = shard(network(), layout), [ROWS[:4].clone(), ROWS[4:].clone()]
        run = nc.prepare(model, OPTIMIZERS["AdamW"](model.parameters()), policy="fp16")
        if rank == 2 and cause == "batch":
            batches[1][3, 7] = math.nan

        def loss_fn(rows):
            large = rank == 2 and cause == "gradient" and rows is batches[1]
            return model(rows).square().mean() * (1e9 if large else 1)

        for rows in batches:
            with run.autocast():
                loss = loss_fn(rows) / 2
            run.backward(loss)
        outcome = run.step()
        before = [whole(p) for p in model.parameters()]
        diagnosis = nc.explain(run, batches, loss_fn, loss_scale=outcome.loss_scale)
        same = all(map(torch.equal, before, [whole(p) for p in model.parameters()]))
        return outcome.applied, same, diagnosis

    results = on_ranks(RANKS, one_rank)
    assert len(set(map(str, results))) == 1
    applied, same, diagnosis = results[0]
    assert (applied, same, diagnosis.rank, diagnosis.micro_batch) == (False, True, 2, 2)
    where = "the batch itself holds a NaN at batch[3, 7]" if cause == "batch" else "3 grad_output"
    assert str(diagnosis).startswith(where)
    assert "on rank 2" in str(diagnosis)


@pytest.mark.parametrize("policy", ["split", "kahan", "fp32 master"])
def test_sharded_state_loaded_after_prepare_keeps_every_digit_that_can_be_kept(policy):
    def one_rank(rank):
        model = shard(network(), "partly sharded")
        run, _ = train(model, ROWS, policy=policy)
        saved = {name: value.clone() for name, value in run.fp32_state_dict().items()}
        run.step(model(ROWS).square().mean())
        model.load_state_dict(saved)
        wanted = {name: whole(value) for name, value in saved.items()}
        return wanted, {name: whole(value) for name, value in run.fp32_state_dict().items()}

    digits = 2.0**-16 if policy == "kahan" else 0.0
    for wanted, loaded in on_ranks(RANKS, one_rank):
        for name, value in wanted.items():
            assert ((loaded[name] - value).abs() <= digits * value.abs()).all(), name


@pytest.mark.parametrize("policy", ["fp32", POLICIES["split"]])
def test_schedule_free_weights_written_after_an_evaluation_are_the_ones_trained(policy):
    schedulefree = pytest.importorskip("schedulefree")

    def one_rank(rank, world):
        model, rows = network(), ROWS.chunk(world)[rank]
        if world > 1:
            nc.fully_shard(model, policy=policy)
        optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=LR)
        optimizer.train()
        run, norms = nc.prepare(model, optimizer, policy=policy), []
        for _ in range(3):
            norms.append(run.step(model(rows).square().mean()).grad_norm)
            optimizer.eval()
            with torch.no_grad():
                norms.append(model(ROWS).norm().item())
            optimizer.train()
        return norms

    alone = one_rank(0, 1)
    rel = 2**-18 if policy == "fp32" else 2**-5
    for norms in on_ranks(2, lambda rank: one_rank(rank, 2)):
        assert norms == pytest.approx(alone, rel=rel)


def test_ranks_are_released_for_other_tests():
    assert not dist.is_initialized()
