"""Models that another library has wrapped: DDP, Lightning Fabric, accelerate."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc
from narrowcast.errors import ConfigError, UnsupportedError

PARAMS_BF16 = "bf16, params=bf16, master=split"
STEPS = 6
GENERATOR = torch.Generator().manual_seed(29)
INPUTS = torch.randn(STEPS, 16, 12, generator=GENERATOR)
TARGETS = torch.randint(0, 5, (STEPS, 16), generator=GENERATOR)


def classifier():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def plain_loop(trained):
    model, optimizer = classifier()
    losses = []
    for x, y in zip(INPUTS, TARGETS, strict=True):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return trained(losses, [model], [optimizer])


def loop(run, called):
    losses = []
    for x, y in zip(INPUTS, TARGETS, strict=True):
        with run.autocast():
            loss = F.cross_entropy(called(x).float(), y)
        run.step(loss)
        losses.append(loss.item())
    run.release()
    return losses


@pytest.fixture
def one_process(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def distributed(trained, *, prepared, **settings):
    model, optimizer = classifier()
    if prepared == "first":
        run = nc.prepare(model, optimizer, **settings)
        called = DistributedDataParallel(model)
    else:
        called = DistributedDataParallel(model)
        run = nc.prepare(called, optimizer, **settings)
    return trained(loop(run, called), [model], [optimizer])


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("prepared", ["first", "afterwards"])
def test_ddp_in_fp32_is_the_plain_loop(trained, same, prepared):
    same(distributed(trained, prepared=prepared, policy="fp32"), plain_loop(trained))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("prepared", ["first", "afterwards"])
def test_ddp_trains_in_a_narrow_policy(trained, near, narrow, prepared):
    mine = distributed(trained, prepared=prepared, **narrow)
    near(mine, plain_loop(trained), products=3, **narrow)


@pytest.mark.usefixtures("one_process")
def test_ddp_around_a_model_with_weights_of_16_bits_trains(trained, near):
    mine = distributed(trained, prepared="first", policy=PARAMS_BF16)
    near(mine, plain_loop(trained), products=3, policy=PARAMS_BF16)


@pytest.mark.usefixtures("one_process")
def test_graphed_steps_raise_while_ddp_wraps_the_model():
    model, optimizer = classifier()
    run = nc.prepare(model, optimizer, policy="fp32")
    called = [DistributedDataParallel(nn.Sequential(model))]
    fast = run.graphed(lambda x: called[0](x).square().mean())
    x = torch.ones(2, next(model.parameters()).shape[1])
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(UnsupportedError, match=r"DistributedDataParallel.*run\.step"):
        fast(x)
    assert all(map(torch.equal, before, model.parameters()))
    called[0] = model
    assert fast(x).applied


@pytest.mark.usefixtures("one_process")
def test_weights_that_ddp_has_sorted_into_buckets_are_not_given_another_dtype():
    model, optimizer = classifier()
    called = DistributedDataParallel(model)
    with pytest.raises((ConfigError, UnsupportedError), match="DistributedDataParallel"):
        nc.prepare(called, optimizer, policy=PARAMS_BF16)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def with_fabric(trained, *, prepared, **settings):
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model, optimizer = classifier()
    if prepared == "first":
        run = nc.prepare(model, optimizer, **settings)
        called, _ = fabric.setup(model, optimizer)
    else:
        called, wrapped = fabric.setup(model, optimizer)
        run = nc.prepare(called, wrapped.optimizer, **settings)
    return trained(loop(run, called), [model], [optimizer])


@pytest.mark.parametrize("prepared", ["first", "afterwards"])
def test_fabric_in_fp32_is_the_plain_loop(trained, same, prepared):
    same(with_fabric(trained, prepared=prepared, policy="fp32"), plain_loop(trained))


@pytest.mark.parametrize("prepared", ["first", "afterwards"])
def test_fabric_trains_in_a_narrow_policy(trained, near, narrow_or_params, prepared):
    mine = with_fabric(trained, prepared=prepared, **narrow_or_params)
    near(mine, plain_loop(trained), products=3, **narrow_or_params)


def test_full_weights_of_a_fabric_module_are_full_under_the_names_it_saves():
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model, optimizer = classifier()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    called, wrapped = fabric.setup(model, optimizer)
    run = nc.prepare(called, wrapped.optimizer, policy=PARAMS_BF16)
    full = run.fp32_state_dict()
    assert full.keys() == before.keys()
    assert [name for name, value in before.items() if not torch.equal(full[name], value)] == []


def with_accelerate(trained, **settings):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="no")
    model, optimizer = classifier()
    called, wrapped = accelerator.prepare(model, optimizer)
    run = nc.prepare(called, wrapped.optimizer, **settings)
    return trained(loop(run, called), [model], [optimizer])


def test_accelerate_in_fp32_is_the_plain_loop(trained, same):
    same(with_accelerate(trained, policy="fp32"), plain_loop(trained))


def test_accelerate_trains_in_a_narrow_policy(trained, near, narrow_or_params):
    mine = with_accelerate(trained, **narrow_or_params)
    near(mine, plain_loop(trained), products=3, **narrow_or_params)
