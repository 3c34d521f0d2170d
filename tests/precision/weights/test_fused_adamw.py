"""The fused optimizer through `prepare`: torch's state, torch's trajectory, torch's skips."""

import copy
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import narrowcast as nc
from narrowcast.errors import CheckpointError, ConfigError, UnsupportedError
from narrowcast.kernels.launch import interpreted
from narrowcast.precision.weights.fused_adamw import FusedAdamW

DEVICE = "cpu" if interpreted() else "cuda"
X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).to(DEVICE)
MASTERS = ("fp32", "split", "kahan", "stochastic", "none")
POLICIES = [
    f"fp32{storage}{moments}"
    for storage in ("", *(f", params=bf16, master={master}" for master in MASTERS))
    for moments in ("", ", moments=bf16", ", moments=int8")
]


def net():
    torch.manual_seed(0)
    layers = nn.Linear(32, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 4)
    return nn.Sequential(*layers).to(DEVICE)


def groups(model, **settings):
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, **settings}, {"params": vectors, "weight_decay": 0.0}]


def fresh(policy="fp32", *, optimizer=torch.optim.AdamW, fused_optimizer=True, **settings):
    model = net()
    built = optimizer(groups(model, weight_decay=0.1), lr=1e-2)
    schedule = LambdaLR(built, lambda step: 0.95**step)
    settings = {"clip_norm": 0.5, "lost_updates_every": 1, **settings}
    return nc.prepare(
        model, built, policy=policy, scheduler=schedule, fused_optimizer=fused_optimizer, **settings
    )


def train(run, first, last, *, bad=()):
    told = []
    for step in range(first, last):
        with run.autocast():
            loss = F.mse_loss(run.model(X * (1 + step)), Y)
        outcome = run.step(loss * (math.nan if step in bad else 1.0))
        told.append((outcome.applied, outcome.grad_norm, outcome.lr, outcome.lost_updates))
    return told


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize(
    "master", ["", ", params=bf16, master=split", ", params=bf16, master=fp32"]
)
def test_the_trajectory_on_torchs_gradients_is_torchs(optimizer, master):
    """Both have the gradients of torch's run.

    Gradients of their own would not do: a weight in bf16 that its fp32 master, another in the last
    bit, rounds to a neighbour moves every gradient by 2⁻⁸ of what it adds to them.
    """
    policy = f"fp32{master}"
    mine, theirs = (
        fresh(policy, optimizer=optimizer, fused_optimizer=which) for which in (True, False)
    )
    largest = 0.0
    for step in range(10):
        with theirs.autocast():
            loss = F.mse_loss(theirs.model(X * (1 + step)), Y)
        gradients = torch.autograd.grad(loss, list(theirs.model.parameters()))
        largest = max(largest, *(float(g.abs().max()) for g in gradients))
        for run in (mine, theirs):
            pairs = zip(run.model.parameters(), gradients, strict=True)
            given = sum((p.float() * g.float()).sum() for p, g in pairs)
            run.step(given * (math.nan if step == 4 else 1.0))
    # Nine updates in which each of the two rounds a weight twice, and what it subtracts of it at
    # most 64 times: the norm, the moments of nine steps, a root, two quotients. That is at most
    # lr · √9, as nine squares have a mean of no less than a ninth of the largest.
    last_bit = 2.0**-24
    for name, value in theirs.fp32_state_dict().items():
        error = 9 * last_bit * (2 * 2 * value.abs().max() + 2 * 64 * 1e-2 * 3)
        assert (mine.fp32_state_dict()[name] - value).abs().max() < error
    # Adam adds a tenth of the weight to its gradient.
    largest += 0.1 * max(float(value.abs().max()) for value in theirs.fp32_state_dict().values())
    states = theirs.optimizer.state_dict()["state"]
    for number, a in mine.optimizer.state_dict()["state"].items():
        b = states[number]
        assert float(a["step"]) == float(b["step"]) == 9
        assert (a["exp_avg"] - b["exp_avg"]).abs().max() < 2 * 64 * last_bit * largest


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_is_not_finite_moves_nothing(policy, same_state):
    run = fresh(policy)
    train(run, 0, 2)
    saved = copy.deepcopy(run.state_dict())
    [(applied, *_)] = train(run, 2, 3, bad=(2,))
    assert not applied
    for part in ("weights", "master", "optimizer"):
        assert same_state(run.state_dict()[part], saved[part])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_goes_on_bit_for_bit_in_fresh_objects(policy, same_state):
    straight = fresh(policy, ema_decay=0.9)
    train(straight, 0, 4, bad=(1,))
    saved = copy.deepcopy(straight.state_dict())
    rest = train(straight, 4, 8, bad=(6,))
    resumed = fresh(policy, ema_decay=0.9)
    train(resumed, 2, 4)
    resumed.load_state_dict(saved)
    assert str(train(resumed, 4, 8, bad=(6,))) == str(rest)
    assert same_state(resumed.state_dict(), straight.state_dict())


def test_a_run_saved_under_torchs_optimizer_goes_on_in_the_fused_one_and_back():
    first = fresh(fused_optimizer=False)
    train(first, 0, 3)
    second = fresh(fused_optimizer=True)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(second, 3, 5)
    third = fresh(fused_optimizer=False)
    third.load_state_dict(copy.deepcopy(second.state_dict()))
    train(third, 5, 6)
    train(first, 3, 6)
    for name, value in first.fp32_state_dict().items():
        assert (third.fp32_state_dict()[name] - value).abs().max() < 3 * 1e-2 * 2.0**-14


@pytest.mark.parametrize("policy", POLICIES)
def test_a_released_optimizer_goes_on_in_torch(policy):
    run = fresh(policy)
    train(run, 0, 3)
    full = {name: value.clone() for name, value in run.fp32_state_dict().items()}
    model, optimizer = run.release(), run.optimizer
    for name, weight in model.named_parameters():
        assert torch.equal(weight, full[name])
        state = optimizer.state[weight]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert state["exp_avg"].dtype == torch.float32
        assert state["exp_avg"].shape == weight.shape
    F.mse_loss(model(X), Y).backward()
    optimizer.step()
    assert all(float(state["step"]) == 4 for state in optimizer.state.values())


@pytest.mark.parametrize("policy", [p for p in POLICIES if "moments" in p and "none" not in p])
def test_the_moments_are_kept_in_what_was_asked_for(policy):
    run = fresh(policy)
    train(run, 0, 1)
    wanted = torch.bfloat16 if "moments=bf16" in policy else torch.int8
    assert {state["exp_avg"].dtype for state in run.optimizer.state.values()} == {wanted}


def test_a_weight_without_a_gradient_is_left_alone_and_its_count_does_not_move():
    run = fresh()
    run.model[0].weight.requires_grad_(False)
    before = run.model[0].weight.clone()
    train(run, 0, 2)
    run.model[0].weight.requires_grad_(True)
    assert torch.equal(run.model[0].weight, before)
    assert run.model[0].weight not in run.optimizer.state
    train(run, 2, 3)
    assert float(run.optimizer.state[run.model[0].weight]["step"]) == 1
    assert float(run.optimizer.state[run.model[3].weight]["step"]) == 3
    run.model[3].weight.requires_grad_(False)
    train(run, 3, 4)
    assert float(run.optimizer.state[run.model[0].weight]["step"]) == 2
    assert float(run.optimizer.state[run.model[3].weight]["step"]) == 3


def test_parts_with_scales_of_their_own_are_unscaled_each_by_its_own():
    scale = nc.LossScale(init_scale=1024.0)
    policy = "fp16, params=fp16, master=fp32, grads=fp32"
    runs = [
        fresh(policy, fused_optimizer=which, loss_scale=scale, scale_groups=["0"])
        for which in (True, False)
    ]
    for run in runs:
        run.engine.scales.parts["0"].value.fill_(8.0)
        run.model[3].weight.requires_grad_(False)  # fewer factors than weights
        train(run, 0, 3)
    mine, theirs = (run.fp32_state_dict() for run in runs)
    for name, value in theirs.items():
        # The first working weights agree; later ones may round to neighbouring fp16 values.
        assert (mine[name] - value).abs().max() < 3 * 1e-2 * 2.0**-8


def test_a_weight_may_be_tied_or_lie_in_another_order_in_memory():
    def tied():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 8))
        model.to(DEVICE, memory_format=torch.channels_last)
        model[3].weight = model[2].weight
        return model

    full = []
    for which in (True, False):
        model = tied()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = nc.prepare(model, optimizer, policy="fp32, params=bf16", fused_optimizer=which)
        x = torch.ones(2, 4, 3, 3, device=DEVICE)
        for _ in range(3):
            with run.autocast():
                loss = model(x).square().mean()
            run.step(loss)
        full.append(run.fp32_state_dict())
    for name, value in full[1].items():
        assert (full[0][name] - value).abs().max() < 3 * 1e-2 * 2.0**-14


@pytest.mark.interpreted
@pytest.mark.parametrize("policy", ["fp32", *(f"fp32, params=bf16, master={m}" for m in MASTERS)])
def test_weights_that_are_parts_of_one_piece_of_memory_train_as_others_do(policy):
    """As those of recurrent layers are for cuDNN, some of them at no multiple of 16 bytes."""
    apart, together = fresh(policy), fresh(policy)
    for run in (apart, together):
        kept = run.engine.weights
        kept.fused = FusedAdamW(
            run.optimizer, kept.all, kept.masters, policy=run.plan.policy, kernel=True
        )
    weights, others = (list(run.model.parameters()) for run in (together, apart))
    for dtype in {p.dtype for p in weights}:
        some = [p for p in weights if p.dtype == dtype]
        piece = torch.empty(sum(p.numel() + 1 for p in some), dtype=dtype, device=DEVICE)
        parts = piece.split([p.numel() + 1 for p in some])
        for p, part in zip(some, parts, strict=True):
            p.data = part[1:].view_as(p).copy_(p.detach())
    before = [p.data_ptr() for p in weights]
    for _ in range(3):
        with apart.autocast():
            loss = F.mse_loss(apart.model(X), Y)
        apart.backward(loss)
        for p, other in zip(weights, others, strict=True):  # a GPU multiplies others in other ways
            p.grad = other.grad.clone()
        assert together.step().applied
        assert apart.step().applied
    assert [p.data_ptr() for p in weights] == before
    assert all(map(torch.equal, weights, others))
    full = apart.fp32_state_dict()
    assert all(torch.equal(value, full[name]) for name, value in together.fp32_state_dict().items())


def test_an_optimizer_may_bring_the_moments_it_has():
    for moments in ("fp32", "bf16", "int8"):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        F.mse_loss(model(X), Y).backward()
        optimizer.step()
        before = optimizer.state[model[0].weight]["exp_avg_sq"].clone()
        policy = f"fp32, params=bf16, moments={moments}"
        run = nc.prepare(model, optimizer, policy=policy, fused_optimizer=True)
        run.release()
        after = optimizer.state[model[0].weight]["exp_avg_sq"]
        # The spacing of a code of 8 bits to the fourth power is widest, 4/255, for the largest.
        spacing = {"fp32": 0.0, "bf16": 2.0**-8, "int8": 4 / 255}[moments]
        assert (after - before).abs().max() <= spacing * before.max()
        assert float(optimizer.state[model[0].weight]["step"]) == 1


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_a_state_replaced_behind_its_back_is_taken_up(moments, same_state):
    run, other = (fresh(f"fp32, params=bf16, moments={moments}") for _ in range(2))
    train(run, 0, 4)
    train(other, 0, 2)
    other.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
    train(other, 2, 4)
    assert same_state(run.fp32_state_dict(), other.fp32_state_dict())


@pytest.mark.parametrize("moments", ["", ", moments=bf16"])
def test_moments_of_8_bits_are_read_as_such_by_a_run_that_keeps_wider_ones(moments):
    run, wide = fresh("fp32, params=bf16, moments=int8"), fresh(f"fp32, params=bf16{moments}")
    train(run, 0, 2)
    wide.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    train(wide, 2, 3, bad=(2,))  # takes the state up, and moves nothing
    run.release()
    wide.release()
    weights = run.model[0].weight, wide.model[0].weight
    mine, theirs = run.optimizer.state[weights[0]], wide.optimizer.state[weights[1]]
    for name in ("exp_avg", "exp_avg_sq"):
        assert name + "_scale" not in theirs
        torch.testing.assert_close(theirs[name], mine[name], rtol=2.0**-8, atol=0.0)


def test_scales_that_torch_rounded_are_refused():
    run = fresh("fp32, params=bf16, master=none, moments=int8")
    train(run, 0, 2)
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    with pytest.raises(CheckpointError, match="rounded the scales of 8-bit moments"):
        train(run, 2, 3)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_short_moments_train_as_well_as_fp32(moments):
    """Two moons through a small net: the loss is within a tenth of that with fp32 moments."""
    torch.manual_seed(0)
    angle = torch.rand(512) * math.pi
    side = (torch.arange(512) % 2).float()
    x = torch.stack([angle.cos() + side, (1 - 2 * side) * angle.sin() + side / 2], 1)
    x, y = (x + 0.1 * torch.randn(512, 2)).to(DEVICE), side.to(DEVICE)
    losses = []
    for kind in ("fp32", moments):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 32), nn.GELU(), nn.Linear(32, 1)).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        policy = f"fp32, params=bf16, master=split, moments={kind}"
        run = nc.prepare(model, optimizer, policy=policy, fused_optimizer=True)
        for _ in range(150):
            with run.autocast():
                loss = F.binary_cross_entropy_with_logits(model(x)[:, 0], y)
            run.step(loss)
        losses.append(loss.item())
    assert losses[0] < 0.2  # from 0.69, that of a coin
    assert losses[1] < losses[0] * 1.1


REFUSED = {
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True),
    "maximize": lambda m: torch.optim.Adam(m.parameters(), maximize=True),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_fused_optimizer_cannot_do_is_left_to_torch_or_refused_with_the_reason(what):
    run = nc.prepare(*(lambda m: (m, REFUSED[what](m)))(net()), policy="fp32")
    assert f"fused kernel does not support {what}" in run.update_path
    model = net()
    with pytest.raises(UnsupportedError, match=f"fused kernel does not support {what}"):
        nc.prepare(model, REFUSED[what](model), policy="fp32", fused_optimizer=True)
    with pytest.raises(UnsupportedError, match="moments=int8 needs the fused optimizer"):
        nc.prepare(model, REFUSED[what](model), policy="fp32, moments=int8")


def test_moments_that_only_the_fused_optimizer_keeps_are_refused_without_it():
    with pytest.raises(ConfigError, match="moments=bf16 needs the fused optimizer"):
        fresh("fp32, moments=bf16", fused_optimizer=False)


def test_step_hooks_are_never_passed_by():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: None)
    assert "hooks" in nc.prepare(model, optimizer, policy="fp32").update_path
    run = fresh()
    run.optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="Step hooks were added"):
        train(run, 0, 1)


@pytest.mark.parametrize("asked", [None, True, False])
def test_the_path_in_force_is_told(asked):
    told = fresh(fused_optimizer=asked).update_path
    by_torch = asked is False or (asked is None and DEVICE == "cpu")
    assert told.startswith("torch.optim.AdamW:") == by_torch


@pytest.mark.interpreted
def test_the_kernel_and_its_twin_train_alike():
    """On a machine without a GPU the kernel runs in Triton's interpreter."""
    full = []
    for kernel in (True, False):
        run = fresh("fp32, params=bf16, master=split")
        weights = run.engine.weights
        weights.fused = FusedAdamW(
            run.optimizer, weights.all, weights.masters, policy=run.plan.policy, kernel=kernel
        )
        train(run, 0, 3, bad=(1,))
        full.append(run.fp32_state_dict())
    for name, value in full[1].items():
        assert (full[0][name] - value).abs().max() < 3 * 1e-2 * 2.0**-14


class Pieces(nn.Module):
    """Weights of several sizes, one of them empty."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        sizes = ((5, 16), (0,), (7,), (32, 3))
        self.parts = nn.ParameterList(torch.randn(size, device=DEVICE) for size in sizes)


# In some steps the norms' table of addresses is that of the update, in others it has fewer.
TURNS = [(0, 1, 2, 3), (0, 2, 3), (2,), (0, 1, 2, 3), (1, 3), (0, 1, 2, 3)]


@pytest.mark.interpreted
@pytest.mark.parametrize("begin", range(len(TURNS)))
def test_weights_without_a_gradient_stay_and_their_steps_do_not_count(begin):
    model, plain = Pieces(), Pieces()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    run = nc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), policy="fp32")
    kept = run.engine.weights
    kept.fused = FusedAdamW(
        run.optimizer, kept.all, kept.masters, policy=run.plan.policy, kernel=True
    )
    drawn = torch.Generator().manual_seed(1)
    for turn in TURNS[begin:] + TURNS[:begin]:
        for i in turn:
            grad = torch.randn(model.parts[i].shape, generator=drawn).to(DEVICE)
            model.parts[i].grad, plain.parts[i].grad = grad, grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        assert run.step().applied
    for ours, theirs in zip(model.parts, plain.parts, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)
    steps = [run.optimizer.state[p]["step"].item() for p in model.parts]
    assert steps == [sum(i in turn for turn in TURNS) for i in range(4)]


# Run by two processes: the same training sharded and whole, compared where both are at hand.
SHARDED = """
import sys, warnings
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
import narrowcast as nc

warnings.simplefilter("ignore")
rank, where, policies = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=2)
x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))

def trained(policy, shard):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 5))
    if shard:  # FSDP wants one dtype in each of its units
        for layer in (model[0], model[1], model[3]):
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = dict(clip_norm=0.5, fused_optimizer=True, ema_decay=0.75)
    run = nc.prepare(model, optimizer, policy=policy, **settings)
    norms = []
    for step in range(4):
        with run.autocast():
            loss = model(x).square().mean() * (float("nan") if step == 2 else 1.0)
        run.backward(loss)
        with CommDebugMode() as communication:
            outcome = run.step()
        if shard:  # one decides, the other is for lost updates, measured every tenth step
            assert communication.get_total_counts() == (2 if step == 0 else 1), "collectives"
        norms.append(outcome.grad_norm if outcome.applied else "skipped")
    kept = run.fp32_state_dict() | dict(enumerate(run.state_dict()["average"]))
    kept = {n: (w.full_tensor() if shard else w).clone() for n, w in kept.items()}
    with torch.no_grad():  # as loading a distributed checkpoint does, past the wrapper
        for p in model.parameters():
            (p.to_local() if shard else p).fill_(0.5)
    for value in run.fp32_state_dict().values():
        assert ((value.full_tensor() if shard else value) - 0.5).abs().max() <= 2**-9, "loaded"
    if shard:  # torch takes a gradient that is whole on each device; it has the same strides
        first = next(model.parameters())
        first.grad = distribute_tensor(torch.ones(32, 16, dtype=first.dtype), first.device_mesh)
        try:
            run.engine.queue_update([0], metered=False)
        except nc.errors.UnsupportedError as error:
            assert "Shard both in the same way" in str(error), error
        else:
            raise AssertionError("took the rows of another device")
    return norms, kept

for policy in policies:
    (sharded_norms, sharded), (norms, whole) = trained(policy, True), trained(policy, False)
    both = policy, norms, sharded_norms
    assert norms[2] == sharded_norms[2] == "skipped", both
    for step in (0, 1, 3):
        assert abs(norms[step] - sharded_norms[step]) <= 2**-20 * norms[step], both
    for name, value in whole.items():
        assert (sharded[name] - value).abs().max() <= 3 * 1e-2 * 2**-14, (policy, name)
dist.destroy_process_group()
print("agree")
"""


def test_sharded_weights_train_as_whole_ones_do(tmp_path):
    masters = [f"fp32, params=bf16, master={master}" for master in ("split", "fp32", "kahan")]
    where = str(tmp_path / "rendezvous")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SHARDED, str(rank), where, "fp32", *masters],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=120)[0] for process in processes]
    assert all(text.endswith("agree\n") for text in told), told
