"""Every feature twice: in a loop of our own and in an accelerate loop, bit for bit equal."""

import copy
import functools
import itertools
import pickle
import socket
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import AutocastKwargs, GradScalerKwargs, set_seed
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import narrowcast as nc
from narrowcast.errors import CheckpointError, ConfigError, UnsupportedError
from narrowcast.integrations.accelerate import Accelerator

POLICIES = ["fp32", "fp16", "bf16, params=bf16, master=split", "fp8-delayed"]
NARROW = "bf16, params=bf16, master=split"


def make_network(seed=0, inputs=16, outputs=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))


def make_parts(model=None, lr=1e-2, steps=12):
    model = make_network() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return model, optimizer, CosineAnnealingLR(optimizer, T_max=steps)


def make_batches(count=12, size=8, bad=()):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count * size, 16, generator=generator)
    y = torch.randint(0, 4, (count * size,), generator=generator)
    for index in bad:
        x[index * size] = float("inf")
    return x, y


def make_loader(batches, size=8, shuffle=False):
    return DataLoader(TensorDataset(*batches), batch_size=size, shuffle=shuffle)


def own_loop(policy, batches, *, accumulate=1, size=8, edit=None, **settings):
    """Train with `nc.prepare`; the loss is outside autocast, as in accelerate."""
    model, optimizer, scheduler = make_parts()
    run = nc.prepare(model, optimizer, policy=policy, scheduler=scheduler, **settings)
    pairs = list(zip(*(each.split(size) for each in batches), strict=True))
    applied = []
    for index, (x, y) in enumerate(pairs, start=1):
        with run.autocast():
            output = model(x)
        run.backward(F.cross_entropy(output.float(), y) / accumulate)
        if index % accumulate == 0 or index == len(pairs):
            if edit is not None:
                run.unscale()
                edit(model)
            applied.append(run.step().applied)
    return run, scheduler, applied


def train(accelerator, parts, loader, *, clip=None, after=None):
    """Run an ordinary accelerate loop over prepared objects; return which steps were skipped."""
    model, optimizer, scheduler = parts
    skipped = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if clip is not None:
                clip(model)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                skipped.append(accelerator.optimizer_step_was_skipped)
        if after is not None:
            after()
    return skipped


def assert_same(state, expected):
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("policy", POLICIES)
def test_loop_with_accumulation_clipping_and_a_bad_batch_equals_own_loop(policy):
    batches = make_batches(bad=[5])
    run, scheduler, applied = own_loop(policy, batches, accumulate=2, clip_norm=0.5)
    accelerator = Accelerator(policy, gradient_accumulation_steps=2, cpu=True)
    model, optimizer, theirs = make_parts()
    # Any order works.
    theirs, model, loader, optimizer = accelerator.prepare(
        theirs, model, make_loader(batches), optimizer
    )
    skipped = train(
        accelerator,
        (model, optimizer, theirs),
        loader,
        clip=lambda m: accelerator.clip_grad_norm_(m.parameters(), 0.5),
    )
    assert applied == [not each for each in skipped] == [True, True, False, True, True, True]
    assert theirs.get_last_lr() == scheduler.get_last_lr()
    assert_same(accelerator.get_state_dict(model), run.fp32_state_dict())
    assert accelerator.precision_logs()["skipped_steps"] == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_resume_in_a_new_accelerator_is_bit_exact(policy, tmp_path):
    batches = make_batches(bad=[2])

    def prepared():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        set_seed(3)
        accelerator = Accelerator(policy, cpu=True, ema_decay=0.9)
        parts = accelerator.prepare(*make_parts(), make_loader(batches, shuffle=True))
        return accelerator, parts[:3], parts[3]

    accelerator, parts, loader = prepared()
    train(accelerator, parts, loader)
    accelerator.save_state(tmp_path)
    train(accelerator, parts, loader)
    expected = accelerator.get_state_dict(parts[0])
    average, rate = accelerator.run.ema_state_dict(), parts[2].get_last_lr()

    accelerator, parts, loader = prepared()
    with torch.no_grad():
        for p in parts[0].parameters():
            p.mul_(2)  # load_state must replace everything
    accelerator.load_state(tmp_path)
    loader.set_epoch(1)
    train(accelerator, parts, loader)
    assert_same(accelerator.get_state_dict(parts[0]), expected)
    assert_same(accelerator.run.ema_state_dict(), average)
    assert parts[2].get_last_lr() == rate


def test_saved_weights_are_fp32_and_load_into_a_plain_model(tmp_path):
    from safetensors.torch import load_file

    accelerator = Accelerator(NARROW, cpu=True)
    model, optimizer, scheduler = accelerator.prepare(*make_parts())
    train(accelerator, (model, optimizer, scheduler), make_loader(make_batches()))
    expected = accelerator.run.fp32_state_dict()
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(model, tmp_path / "model")
    assert any((value != value.bfloat16().float()).any() for value in expected.values())
    assert_same(accelerator.unwrap_model(model).state_dict(), expected)
    for path in ("state", "model"):
        saved = load_file(tmp_path / path / "model.safetensors")
        plain = make_network(seed=5)
        plain.load_state_dict(saved)
        assert_same(dict(plain.state_dict()), expected)


@pytest.mark.parametrize("policy", ["fp16", NARROW])
def test_clipping_by_value_and_of_some_weights_equals_own_loop(policy):
    batches = make_batches(bad=[4])

    def edit(model):
        torch.nn.utils.clip_grad_norm_(model[0].parameters(), 0.05)
        torch.nn.utils.clip_grad_value_(model[2].parameters(), 0.01)

    run, _, applied = own_loop(policy, batches, accumulate=2, edit=edit)
    accelerator = Accelerator(policy, gradient_accumulation_steps=2, cpu=True)
    model, *rest, loader = accelerator.prepare(*make_parts(), make_loader(batches))

    def clip(model):
        accelerator.clip_grad_norm_(model[0].parameters(), 0.05)
        accelerator.clip_grad_value_(model[2].parameters(), 0.01)

    skipped = train(accelerator, (model, *rest), loader, clip=clip)
    assert applied == [not each for each in skipped]
    assert_same(accelerator.get_state_dict(model), run.fp32_state_dict())


def test_clip_grad_norm_returns_the_norm_without_the_loss_scale():
    x, y = make_batches(count=1)
    plain = make_network()
    F.cross_entropy(plain(x), y).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    accelerator = Accelerator("fp16", cpu=True, loss_scale=1024.0)
    model, _optimizer, _ = accelerator.prepare(*make_parts())
    accelerator.backward(F.cross_entropy(model(x), y))
    norms = [
        accelerator.clip_grad_norm_(model.parameters(), 1.0),
        accelerator.clip_grad_norm_(model.parameters(), float("inf")),
        accelerator.clip_grad_norm_(list(model.parameters()), 1e9, norm_type=2.0),
    ]
    for norm in norms:
        torch.testing.assert_close(norm, expected, rtol=2**-9, atol=0)


def test_norms_of_unfinished_accumulations_are_unscaled_and_clip_nothing():
    x, y = make_batches(count=1)
    plain = make_network()
    (F.cross_entropy(plain(x), y) / 2).backward()
    accelerator = Accelerator("fp16", gradient_accumulation_steps=2, cpu=True)
    model, _optimizer, _ = accelerator.prepare(*make_parts())
    with accelerator.accumulate(model):
        accelerator.backward(F.cross_entropy(model(x), y))
        for part, twin in ((model, plain), (model[0], plain[0])):
            for kind in (2.0, float("inf")):
                got = accelerator.clip_grad_norm_(part.parameters(), 1e-3, norm_type=kind)
                grads = [p.grad for p in twin.parameters()]
                want = torch.nn.utils.get_total_norm(grads, kind)
                torch.testing.assert_close(got, want, rtol=2**-8, atol=0)


def test_scheduler_moves_for_applied_steps_only():
    accelerator = Accelerator("bf16", cpu=True)
    model, optimizer, _ = make_parts()
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    batches = make_batches(count=5, bad=[0, 2])
    skipped = train(accelerator, (model, optimizer, scheduler), make_loader(batches))
    assert skipped == [True, False, True, False, False]
    assert scheduler.scheduler.last_epoch == 3


def test_scheduler_that_takes_a_metric_moves_with_it():
    accelerator = Accelerator("bf16", cpu=True)
    model, optimizer, _ = make_parts()
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for metric in (1.0, 2.0):
        x, y = make_batches(count=1)
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        scheduler.step(metric)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_model_and_optimizer_may_come_in_separate_calls():
    batches = make_batches()
    run, _, _ = own_loop("fp16", batches)
    for first in ("model", "optimizer"):
        accelerator = Accelerator("fp16", cpu=True)
        model, optimizer, scheduler = make_parts()
        if first == "model":
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(optimizer)
        else:
            optimizer = accelerator.prepare(optimizer)
            model = accelerator.prepare(model)
        scheduler, loader = accelerator.prepare(scheduler, make_loader(batches))
        train(accelerator, (model, optimizer, scheduler), loader)
        assert_same(accelerator.get_state_dict(model), run.fp32_state_dict())


def test_scheduler_may_be_built_from_the_prepared_optimizer():
    accelerator = Accelerator("fp16", cpu=True)
    model, optimizer, _ = make_parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = accelerator.prepare(CosineAnnealingLR(optimizer, T_max=9))
    batches = make_batches(count=3, bad=[0])
    train(accelerator, (model, optimizer, scheduler), make_loader(batches))
    assert scheduler.scheduler.last_epoch == 2
    assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]


def test_state_may_be_loaded_while_gradients_accumulate(tmp_path):
    accelerator = Accelerator("fp16", gradient_accumulation_steps=2, cpu=True)
    model, optimizer, scheduler = accelerator.prepare(*make_parts())
    before = accelerator.get_state_dict(model)
    accelerator.save_state(tmp_path)
    x, y = make_batches(count=3)
    loader = make_loader((x, y))
    train(accelerator, (model, optimizer, scheduler), loader)  # ends inside an accumulation
    accelerator.load_state(tmp_path)
    assert_same(accelerator.get_state_dict(model), before)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("split_batches", [False, True])
def test_accelerates_own_check_of_accumulation_passes(monkeypatch, capsys, split_batches):
    from accelerate.test_utils.scripts import test_sync

    ours = functools.partial(Accelerator, "fp32", cpu=True)
    monkeypatch.setattr(test_sync, "Accelerator", ours)
    test_sync.test_gradient_accumulation_with_opt_and_scheduler(split_batches)


def gan_losses(generator, discriminator, noise, real):
    fake = generator(noise)
    judged = [discriminator(each) for each in (real, fake.detach())]
    ones = torch.ones_like(judged[0])
    loss = F.binary_cross_entropy_with_logits
    return fake, loss(judged[0].float(), ones) + loss(judged[1].float(), 0 * ones), ones


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_gan_with_two_optimizers_equals_two_runs(policy):
    torch.manual_seed(7)
    noise, real = torch.randn(6, 8, 16), torch.randn(6, 8, 4)

    def parts():
        models = make_network(0, 16, 4), make_network(1, 4, 1)
        return models, [torch.optim.Adam(m.parameters(), lr=1e-3) for m in models]

    accelerator = Accelerator(policy, cpu=True)
    (generator, discriminator), (for_g, for_d) = parts()
    generator, discriminator, for_g, for_d = accelerator.prepare(
        generator, discriminator, for_g, for_d
    )
    for z, x in zip(noise, real, strict=True):
        fake, loss, ones = gan_losses(generator, discriminator, z, x)
        for_d.zero_grad()
        accelerator.backward(loss)
        for_d.step()
        for_g.zero_grad()
        accelerator.backward(F.binary_cross_entropy_with_logits(discriminator(fake), ones))
        for_g.step()
    results = [accelerator.get_state_dict(m) for m in (generator, discriminator)]
    assert len(accelerator.runs) == 2

    # Our own loop freezes the discriminator for the generator's loss.
    (generator, discriminator), (for_g, for_d) = parts()
    run_g = nc.prepare(generator, for_g, policy=policy)
    run_d = nc.prepare(discriminator, for_d, policy=policy)
    for z, x in zip(noise, real, strict=True):
        with run_g.autocast():
            fake = generator(z)
        fake = fake.float()
        with run_d.autocast():
            judged = [discriminator(each).float() for each in (x, fake.detach())]
        ones = torch.ones_like(judged[0])
        loss = F.binary_cross_entropy_with_logits
        run_d.step(loss(judged[0], ones) + loss(judged[1], 0 * ones))
        discriminator.requires_grad_(False)
        with run_d.autocast():
            judged = discriminator(fake).float()
        run_g.step(loss(judged, ones))
        discriminator.requires_grad_(True)
    assert_same(results[0], run_g.fp32_state_dict())
    assert_same(results[1], run_d.fp32_state_dict())


def test_loss_through_two_models_uses_the_smaller_scale_for_both():
    accelerator = Accelerator("fp16", cpu=True, loss_scale=64.0)
    models = make_network(0, 16, 4), make_network(1, 4, 4)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.0) for m in models]
    first, second, *optimizers = accelerator.prepare(*models, *optimizers)
    accelerator.runs[0].engine.scales.value.fill_(1024.0)
    x, y = make_batches(count=1)
    for _ in range(2):  # gradients of both passes add up
        accelerator.backward(F.cross_entropy(second(first(x)), y))
    for each in optimizers:
        accelerator.unscale_gradients(each)
    plain = make_network(0, 16, 4), make_network(1, 4, 4)
    (2 * F.cross_entropy(plain[1](plain[0](x)), y)).backward()
    for got, want in zip((first, second), plain, strict=True):
        for p, q in zip(got.parameters(), want.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=2**-7, atol=2**-12)


def test_one_optimizer_over_two_models_trains_both_and_saves_each():
    accelerator = Accelerator(NARROW, cpu=True)
    models = make_network(0, 16, 8), make_network(1, 8, 4)
    optimizer = torch.optim.AdamW(itertools.chain(*(m.parameters() for m in models)), lr=1e-2)
    first, second, optimizer = accelerator.prepare(*models, optimizer)
    before = [accelerator.get_state_dict(m) for m in (first, second)]
    x, y = make_batches(count=1)
    losses = []
    for _ in range(5):
        loss = F.cross_entropy(second(first(x)), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(itertools.chain(first.parameters(), second.parameters()), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for model, old in zip((first, second), before, strict=True):
        new = accelerator.get_state_dict(model)
        assert new.keys() == make_network(0, 16, 8).state_dict().keys()
        assert not any(torch.equal(new[name], old[name]) for name in new)


def test_two_optimizers_of_one_model_step_one_after_the_other():
    accelerator = Accelerator("fp16", cpu=True)
    model = make_network()
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    x, y = make_batches(count=1)
    before = accelerator.get_state_dict(model)
    accelerator.backward(F.cross_entropy(model(x), y))
    for each in optimizers:
        each.step()
        each.zero_grad()
    after = accelerator.get_state_dict(model)
    assert not any(torch.equal(before[name], after[name]) for name in before)


def test_outputs_are_fp32_and_evaluation_runs_in_the_policy():
    x, _ = make_batches(count=1)
    accelerator = Accelerator("bf16", cpu=True)
    model, _optimizer = accelerator.prepare(*make_parts()[:2])
    frozen = accelerator.prepare(make_network())
    model.eval()
    with torch.no_grad():
        outputs = model(x), frozen(x)
        with torch.autocast("cpu", torch.bfloat16):
            expected = make_network()(x)
    for each in outputs:
        assert each.dtype == torch.float32
        torch.testing.assert_close(each, expected.float(), rtol=2**-6, atol=2**-6)
        assert not torch.equal(each, make_network()(x))


def test_autocast_covers_products_outside_the_model_and_can_be_turned_off():
    accelerator = Accelerator("bf16", cpu=True)
    accelerator.prepare(*make_parts()[:2])
    a, b = torch.randn(2, 8, 8)
    with accelerator.autocast():
        assert not torch.equal((a @ b).float(), torch.matmul(a.double(), b.double()).float())
        inside = a @ b
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert (a @ b).dtype == torch.float32
    assert not torch.equal(inside.float(), a @ b)


def test_copies_and_pickles_of_the_model_are_plain():
    accelerator = Accelerator(NARROW, cpu=True)
    model, _ = accelerator.prepare(*make_parts()[:2])
    x, _ = make_batches(count=1)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert {p.dtype for p in twin.parameters()} == {torch.float32}
        assert_same(dict(twin.state_dict()), accelerator.get_state_dict(model))
        assert torch.equal(twin(x), make_network()(x))


@pytest.mark.parametrize("end", ["free_memory", "end_training"])
def test_end_gives_back_a_plain_fp32_model(end):
    accelerator = Accelerator(NARROW, cpu=True)
    plain, optimizer, _ = make_parts()
    model, prepared = accelerator.prepare(plain, optimizer)
    x, y = make_batches(count=1)
    accelerator.backward(F.cross_entropy(model(x), y))
    prepared.step()
    expected = accelerator.get_state_dict(model)
    getattr(accelerator, end)()
    assert type(plain) is nn.Sequential
    assert_same(dict(plain.state_dict()), expected)
    with torch.no_grad():
        torch.testing.assert_close(model(x), nn.Sequential(*plain)(x), rtol=0, atol=0)
    F.cross_entropy(plain(x), y).backward()
    optimizer.step()


def test_schedule_changes_the_policy_of_a_run():
    batches = make_batches(count=4)
    accelerator = Accelerator("fp32", schedule={2: NARROW}, cpu=True)
    model, optimizer, scheduler = accelerator.prepare(*make_parts())
    train(accelerator, (model, optimizer, scheduler), make_loader(batches))
    model_2, optimizer_2, scheduler_2 = make_parts()
    run = nc.prepare(model_2, optimizer_2, policy="fp32", scheduler=scheduler_2)
    for i, (x, y) in enumerate(make_loader(batches)):
        if i == 2:
            run.set_policy(NARROW)
        with run.autocast():
            output = model_2(x)
        run.step(F.cross_entropy(output.float(), y))
    assert_same(accelerator.get_state_dict(model), run.fp32_state_dict())


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"mixed_precision": "fp16"}, ConfigError, r"mixed_precision.*policy='fp16'"),
        ({"fsdp_plugin": object()}, UnsupportedError, "fsdp_plugin"),
        ({"deepspeed_plugin": object()}, UnsupportedError, "deepspeed_plugin"),
        ({"megatron_lm_plugin": object()}, UnsupportedError, "megatron_lm_plugin"),
        ({"gradient_accumulation_step": 2}, ConfigError, "gradient_accumulation_steps"),
        ({"ema_deca": 0.9}, ConfigError, "ema_decay"),
        ({"scheduler": None}, ConfigError, "accelerator.prepare"),
        ({"kwargs_handlers": [GradScalerKwargs()]}, ConfigError, "loss_scale"),
    ],
)
def test_settings_that_cannot_apply_raise(settings, error, message):
    with pytest.raises(error, match=message):
        Accelerator("fp16", cpu=True, **settings)


def test_mixed_precision_of_the_launcher_raises(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ConfigError, match=r"policy='fp8-delayed'.*--mixed_precision no"):
        Accelerator("fp32", cpu=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UnsupportedError, match="ACCELERATE_USE_FSDP"):
        Accelerator("fp32", cpu=True)


def test_mistakes_in_a_loop_raise():
    accelerator = Accelerator("fp16", cpu=True)
    lonely = accelerator.prepare(torch.optim.SGD(make_network(9).parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="no prepared model"):
        lonely.step()
    model, optimizer = accelerator.prepare(*make_parts()[:2])
    x, y = make_batches(count=1)
    with pytest.raises(UnsupportedError, match="create_graph"):
        accelerator.backward(F.cross_entropy(model(x), y), create_graph=True)
    with pytest.raises(CheckpointError, match="plain torch optimizer"):
        optimizer.load_state_dict(torch.optim.AdamW(make_network().parameters()).state_dict())


def test_compiled_model_trains_as_the_eager_one():
    results = []
    for settings in ({}, {"dynamo_backend": "aot_eager"}):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator("fp8-delayed", cpu=True, **settings)
        model, optimizer, scheduler = accelerator.prepare(*make_parts())
        train(accelerator, (model, optimizer, scheduler), make_loader(make_batches(count=3)))
        results.append(accelerator.get_state_dict(model))
    assert accelerator.run.plan.execution == "compiled"
    assert next(iter(accelerator.get_state_dict(model, unwrap=False))).startswith("_orig_mod.")
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=0, atol=1e-6)


IN_TWO_PROCESSES = """
import sys
import torch
import torch.nn.functional as F
from accelerate import notebook_launcher
import narrowcast as nc

def train(policy):
    accelerator = nc.Accelerator(policy, cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(accelerator.process_index)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.99)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 16, generator=generator)
    x[33] = float("inf")  # in the batch of one process
    data = torch.utils.data.TensorDataset(x, torch.randint(0, 4, (96,), generator=generator))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    skipped = []
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                skipped.append(accelerator.optimizer_step_was_skipped)
    weights = accelerator.get_state_dict(model, unwrap=False)
    assert all(name.startswith("module.") for name in weights)
    both = accelerator.gather(torch.cat([w.flatten() for w in weights.values()])[None])
    assert torch.equal(*both) and both.isfinite().all()
    assert skipped == [False, True, False], skipped
    assert scheduler.scheduler.last_epoch == 4  # two applied steps in two processes
    accelerator.print("trained")
    accelerator.end_training()

torch.set_num_threads(1)
policy, port = "bf16, params=bf16, master=split", sys.argv[1]
notebook_launcher(train, (policy,), num_processes=2, use_port=port)
"""


def test_two_processes_skip_the_same_step_and_have_the_same_weights():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-W", "ignore", "-c", IN_TWO_PROCESSES, port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout


def test_missing_accelerate_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "narrowcast.integrations.accelerate")
    with pytest.raises(ImportError, match="pip install accelerate"):
        import narrowcast.integrations.accelerate  # noqa: F401
