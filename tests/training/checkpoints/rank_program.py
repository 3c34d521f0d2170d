"""What a rank does in the tests of sharded checkpoints, and the processes that are the ranks."""

import multiprocessing
import multiprocessing.connection
import runpy
import traceback

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import narrowcast as nc
from narrowcast.errors import CheckpointError
from narrowcast.precision.step.saved_state import collect_state
from narrowcast.training.checkpoints.run_checkpoint import load_checkpoint, save_checkpoint
from narrowcast.training.checkpoints.tree import flatten_named, joined_name
from narrowcast.training.parallel import RunRanks
from narrowcast.training.step.shares import connected

_FORKED = "forked rank"
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"fused_optimizer": True}),
    "plain adamw": (torch.optim.AdamW, {"fused_optimizer": False}),
    "sgd": (lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9), {}),
}


class Pool:
    """Four processes, of which a job takes as many as it has ranks."""

    def __init__(self, folder):
        context = multiprocessing.get_context("forkserver")
        self._folder, self._count, self._ranks = folder, 0, []
        for _ in range(4):
            ours, theirs = context.Pipe()
            # By path, because a new process does not find the package of the tests.
            program = (__file__, {"pipe": theirs}, _FORKED)
            process = context.Process(target=runpy.run_path, args=program, daemon=True)
            with server_settings():
                process.start()
            self._ranks.append((process, ours))

    def run(self, ranks, job, *args, backend="gloo", **kwargs):
        """Return what a job returns on each rank."""
        self._count += 1
        where = str(self._folder / f"rendezvous-{self._count}")
        for rank, (_, pipe) in enumerate(self._ranks[:ranks]):
            pipe.send((job, where, backend, rank, ranks, args, kwargs))
        # A rank that fails alone leaves the others waiting for it.
        replies = multiprocessing.connection.wait([pipe for _, pipe in self._ranks[:ranks]], 60)
        assert replies, f"no rank has finished {job}"
        results = [
            pipe.recv() if pipe.poll(60 if pipe is replies[0] else 15) else ("hangs", None)
            for _, pipe in self._ranks[:ranks]
        ]
        failed = sorted((text for text, _ in results if text), key=len, reverse=True)
        assert not failed, failed[0]
        return [result for _, result in results]

    def close(self):
        for process, pipe in self._ranks:
            pipe.send(None)
            process.join()


def _serve(pipe):
    torch.set_num_threads(1)
    while (order := pipe.recv()) is not None:
        job, where, backend, rank, ranks, args, kwargs = order
        try:
            dist.init_process_group(
                backend, init_method=f"file://{where}", rank=rank, world_size=ranks
            )
            result = globals()[job](*args, **kwargs)
            dist.barrier()
            pipe.send(("", result))
        except Exception:  # noqa: BLE001  # shown by the test
            pipe.send((traceback.format_exc()[-1500:], None))
        finally:
            dist.destroy_process_group()


def network(seed=0, width=33):
    torch.manual_seed(seed)
    # 33 and 9 rows are uneven on 2 and 4 ranks, and one of 4 has nothing of 9.
    return nn.Sequential(nn.Linear(16, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 9))


def prepared(sharding="fsdp", policy="fp32", optimizer="adamw", seed=0, width=33, **settings):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, count = network(seed, width), dist.get_world_size() if dist.is_initialized() else 1
    if sharding in ("hsdp", "groups"):
        mesh = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("replicas", "shards"))
        mesh = mesh["shards"] if sharding == "groups" else mesh
    elif sharding != "none":
        mesh = init_device_mesh("cpu", (count,))
    if sharding != "none":
        for layer in (model[0], model[1], model[3]):
            fully_shard(layer, mesh=mesh)
    if sharding in ("fsdp", "hsdp", "groups"):
        fully_shard(model, mesh=mesh)
    make, more = OPTIMIZERS[optimizer]
    return nc.prepare(model, make(model.parameters(), lr=1e-2), policy=policy, **more, **settings)


def train(run, steps, first=0):
    for step in range(first, first + steps):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        with run.autocast():
            loss = run.model(x).square().mean()
        assert run.step(loss).applied


def whole_state(run):
    """Return every tensor of a run that does not belong to one rank."""
    tensors = {}

    def note(tensor, path):
        name = joined_name(path, tensors)
        if hasattr(tensor, "full_tensor"):
            # gloo gathers no 16-bit integers; no value here needs more than the digits of fp64
            tensor = tensor.detach().to(torch.float64).full_tensor().to(tensor.dtype)
        tensors[name] = tensor.detach().clone().contiguous()
        return name

    flatten_named(collect_state(run.engine), note)
    return {n: t for n, t in tensors.items() if not n.endswith("_scale")}


def save(folder, steps=2, **how):
    run = prepared(**how)
    train(run, steps)
    save_checkpoint(run, folder, extra={"position": 7})
    state = whole_state(run)
    if dist.get_rank() == 0:
        save_file(state, f"{folder}.expected")


def load(folder, again=None, **how):
    """Load a checkpoint, compare it with what was saved, and save it again."""
    run = prepared(seed=1, **how)
    assert load_checkpoint(run, folder) == {"position": 7}
    state, expected = whole_state(run), load_file(f"{str(folder).removesuffix('.again')}.expected")
    assert state.keys() == expected.keys()
    for name in state:
        assert state[name].dtype == expected[name].dtype
        assert torch.equal(state[name], expected[name]), name
    if again:
        save_checkpoint(run, again, extra={"position": 7})


def load_again(folder, again, **how):
    run = prepared(seed=1, **how)
    load_checkpoint(run, folder)
    save_checkpoint(run, again)


def resume(folder, steps, **how):
    """Return the weights as numbers after more steps, from a checkpoint or from the start."""
    run = prepared(**how)
    if folder:
        load_checkpoint(run, folder)
    train(run, steps, first=run.steps_applied)
    return {name: t.double().sum().item() for name, t in whole_state(run).items() if t.numel()}


def load_error(folder, **how):
    """Return what loading raises, and the weights' sum before and after."""
    run = prepared(seed=1, **how)
    before = whole_state(run)["weights/0.weight"]
    try:
        load_checkpoint(run, folder)
    except CheckpointError as error:
        assert torch.equal(before, whole_state(run)["weights/0.weight"])
        return str(error)
    return "nothing"


def save_in_background(folder, bad):
    """Save twice, and once where nothing can be written; return the error of the last."""
    run = prepared()
    train(run, 1)
    first = save_checkpoint(run, folder, extra={"steps": 1}, background=True)
    train(run, 1, first=1)
    save_checkpoint(run, folder, extra={"steps": 2}, background=True)
    assert first.done
    failing = save_checkpoint(run, bad, background=True)
    try:
        save_checkpoint(run, folder, extra={"steps": 3})
    except CheckpointError as error:
        assert failing.done
        assert load_checkpoint(run, folder) == {"steps": 2}
        return str(error)
    return "nothing"


def save_own(folder):
    rank = dist.get_rank()
    own = {"seed": rank, "random": torch.full((3,), rank), "size": torch.ones(rank + 1)}
    save_checkpoint(prepared(), folder, extra={"own": own, "common": [1, 2.5, None]})


def load_own(folder):
    extra = load_checkpoint(prepared(), folder)
    assert extra["common"] == [1, 2.5, None]
    own = extra["own"]
    assert own["random"].tolist() == [own["seed"]] * 3
    assert own["size"].numel() == own["seed"] + 1
    return own["seed"]


def save_whole(path, bad):
    """Write the model and its EMA, and return the weights they should hold."""
    run = prepared(policy="bf16, params=bf16, master=split", ema_decay=0.5)
    train(run, 2)
    nc.save_model(run, path)
    nc.save_model(run, path.with_name("ema.safetensors"), weights="ema", dtype=torch.bfloat16)
    try:
        nc.save_model(run, bad)
    except CheckpointError as error:
        states = run.fp32_state_dict(), run.ema_state_dict()
        whole = [{n: t.full_tensor().tolist() for n, t in each.items()} for each in states]
        return str(error), *whole
    return ("nothing",)


def save_histories(folder):
    """Save amax histories that differ by rank; return this rank's."""
    run = prepared(policy="fp8-delayed", emulate=True, width=32)
    x = torch.randn(8, 16) * (dist.get_rank() + 1)
    with run.autocast():
        loss = run.model(x).square().mean()
    assert run.step(loss).applied
    save_checkpoint(run, folder)
    return run.state_dict()["amax"]["amax"].tolist()


def load_histories(folder):
    run = prepared(policy="fp8-delayed", emulate=True, width=32)
    load_checkpoint(run, folder)
    return run.state_dict()["amax"]["amax"].tolist()


def frozen_fp8_in_ddp():
    """Return the frozen bytes and the gradient of a model that each rank made on its own."""
    ranks = RunRanks(rank=dist.get_rank(), size=dist.get_world_size())
    model = network(seed=ranks.rank, width=32)
    model[0].requires_grad_(False)
    nc.quantize_frozen(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    run = nc.prepare(model, torch.optim.AdamW(trained), policy="bf16")
    replica = connected(model, ranks, run.plan)
    with run.autocast():
        loss = replica(torch.full((4, 16), 1.0 + ranks.rank)).square().mean()
    run.backward(loss)
    narrow = [t for t in model.state_dict().values() if t.dtype == torch.float8_e4m3fn]
    return [t.float().tolist() for t in narrow], model[3].weight.grad.tolist()


if __name__ == _FORKED:
    _serve(globals()["pipe"])
else:
    from tests.fork_server import server_settings
