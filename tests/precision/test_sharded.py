"""Models that torch has sharded: what `prepare` takes, and what it raises for at once."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.errors import UnsupportedError

distributed = pytest.importorskip("torch.distributed")
MASTERS = ["split", "kahan", "fp32", "stochastic", "none"]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    from torch.distributed.device_mesh import init_device_mesh

    where = tmp_path_factory.mktemp("rendezvous") / "file"
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(backend, init_method=f"file://{where}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))


def sharded(mesh, *, by_layer=True):
    from torch.distributed.fsdp import fully_shard

    model = network()
    for layer in (model[0], model[1], model[3]) if by_layer else ():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def prepared(model, policy, optimizer=torch.optim.AdamW, **settings):
    return nc.prepare(model, optimizer(model.parameters(), lr=1e-2), policy=policy, **settings)


def train(run, steps=2):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        with run.autocast():
            loss = run.model(x).square().mean()
        assert run.step(loss).applied


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize(
    "policy", ["fp32", "bf16", *(f"bf16, params=bf16, master={each}" for each in MASTERS)]
)
def test_weights_on_a_mesh_of_one_train_as_plain_ones(mesh, policy, fused):
    runs = [prepared(m, policy, fused_optimizer=fused) for m in (sharded(mesh), network())]
    for run in runs:
        train(run)
    ours, plain = (run.fp32_state_dict() for run in runs)
    assert all(torch.equal(ours[name].full_tensor(), plain[name]) for name in plain)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "bf16, params=bf16, master=split"])
def test_sharded_weights_on_a_gpu_train_as_plain_ones(mesh, policy):
    plain, whole = network().cuda(), network().cuda()
    nc.fully_shard(whole, policy=policy)
    runs = [prepared(model, policy, clip_norm=1.0) for model in (whole, plain)]
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).cuda()
    for run in runs:
        for _ in range(3):
            with run.autocast():
                loss = run.model(x).square().mean()
            assert run.step(loss).applied
    ours, expected = (run.fp32_state_dict() for run in runs)
    for name, weight in expected.items():
        torch.testing.assert_close(ours[name].full_tensor(), weight, rtol=1e-5, atol=1e-6)


def test_sharded_parameter_of_ones_own_trains(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    class Projection(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(distribute_tensor(torch.randn(8, 16), mesh, [Shard(0)]))

        def forward(self, x):
            x = distribute_tensor(x, mesh, [Replicate()])
            return (x @ self.weight.T).full_tensor()

    run = prepared(Projection(), "fp32")
    before = run.model.weight.full_tensor().clone()
    train(run)
    assert not torch.equal(run.model.weight.full_tensor(), before)


def test_weights_that_fsdp_gathers_together_need_one_dtype(mesh):
    model = sharded(mesh, by_layer=False)
    with pytest.raises(UnsupportedError, match=r"one dtype.*\.bias in .*nc\.fully_shard"):
        prepared(model, "bf16, params=bf16", fused_optimizer=True)
    train(prepared(model, "bf16", fused_optimizer=True))


def test_sharded_weights_keep_their_dtype_until_the_end(mesh):
    run = prepared(sharded(mesh), "bf16, params=bf16", fused_optimizer=True)
    train(run)
    with pytest.raises(UnsupportedError, match=r"set_policy\(\).*same params="):
        run.set_policy("bf16")
    with pytest.raises(UnsupportedError, match=r"release\(\).*fp32_state_dict"):
        run.release()
    train(run)
    wide = prepared(sharded(mesh), "bf16", fused_optimizer=True)
    train(wide)
    wide.set_policy("fp32")
    train(wide)
    assert torch.isfinite(wide.release()(torch.ones(1, 16))).all()


@pytest.mark.filterwarnings("ignore:FSDP is switching")
def test_fsdp1_raises_in_prepare(mesh):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(
        network(),
        process_group=mesh.get_group(),
        device_id=torch.device("cpu"),
    )
    with pytest.raises(UnsupportedError, match=r"FSDP1.*fully_shard"):
        prepared(model, "fp32", fused_optimizer=True)


class SeenCollectives(TorchDispatchMode):
    """Remembers the dtypes that collectives get."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.dtypes += [each.dtype for each in args[0]]
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize(
    ("reduce", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)], ids=str
)
def test_ddp_adds_up_16_bit_gradients_in_the_reduce_format(reduce, dtype):
    model = nn.Linear(16, 8)
    run = prepared(model, f"bf16, params=bf16, reduce={reduce}")
    parallel = nn.parallel.DistributedDataParallel(model)
    nc.set_reduce_format(parallel, run.plan)
    with run.autocast():
        loss = parallel(torch.ones(2, 16)).square().mean()
    with SeenCollectives() as seen:
        run.backward(loss)
    assert seen.dtypes == [dtype]
    alone = prepared(nn.Linear(16, 8), "bf16, params=bf16")
    alone.model.load_state_dict(model.state_dict())
    with alone.autocast():
        alone.backward(alone.model(torch.ones(2, 16)).square().mean())
    assert torch.equal(model.weight.grad, alone.model.weight.grad)
