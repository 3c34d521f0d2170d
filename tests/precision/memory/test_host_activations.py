"""What blocks keep, waiting on the host: the same gradients, whatever was kept and written to.

A CPU has nothing to offload, and a plan for one is refused; a plan that says so all the same is
carried out, with both places in the one memory there is, so that all but the copies is tested here.
"""

import contextlib
import dataclasses
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.errors import UnsupportedError
from narrowcast.precision.memory import host_activations
from narrowcast.precision.plan.memory import MemoryPlan, block_names
from narrowcast.workloads.lm.model import build_gpt
from narrowcast.workloads.lm.settings import LmModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, LENGTH, VOCAB = 16, 8, 32


@pytest.fixture(autouse=True)
def all_is_worth_it(monkeypatch):
    monkeypatch.setattr(host_activations, "SMALLEST", 64)


class Block(nn.Module):
    """Keeps views of one storage, and a mask of the caller's."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.drop, self.down = nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *, mask):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.drop(self.down(F.silu(mixed)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril().log())

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask=self.mask)
        return self.head(x)


def gpt():
    settings = LmModel(layers=3, width=WIDTH, heads=2)
    return build_gpt(settings, vocab=VOCAB, length=LENGTH, seed=0, device=torch.device("cpu"))


def prepared(build=Net, policy="fp32", *, offload=True, checkpoint="none"):
    torch.manual_seed(0)
    model = build().to(DEVICE)
    asked = nc.Memory(
        activation_checkpointing=checkpoint, offload=["activations"] if offload else []
    )
    plan = nc.plan(model, policy, hardware=nc.detect_hardware(DEVICE))
    plan = dataclasses.replace(plan, memory=MemoryPlan(requested=asked, blocks=block_names(model)))
    return nc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), policy=plan)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCAB, (4, LENGTH), generator=generator).to(DEVICE)


def loss_of(run, step):
    with run.autocast():
        logits = run.model(batch(step))
        return F.cross_entropy(logits.flatten(0, 1), batch(step).flatten())


def trained(run, steps=3):
    for step in range(steps):
        torch.manual_seed(step)
        for micro in range(2):
            run.backward(loss_of(run, 2 * step + micro) / 2)
        grads = [p.grad.clone() for p in run.model.parameters()]
        assert run.step().applied
    return [*grads, *run.fp32_state_dict().values()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.pairwise
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU adds embeddings up in another order each time")
@pytest.mark.parametrize("checkpoint", ["none", "blocks", "selective"])
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "fp8-delayed"])
@pytest.mark.parametrize("build", [Net, gpt])
def test_gradients_and_weights_are_those_of_what_stays_bit_for_bit(build, policy, checkpoint):
    kept = trained(prepared(build, policy, offload=False))
    assert same(trained(prepared(build, policy, checkpoint=checkpoint)), kept)


def storages_kept(run):
    """Bytes on the device that autograd keeps of the blocks, after a forward pass."""
    loss = loss_of(run, 0)
    shelf = run.model.layers[0].nc_shelf
    held, one = [], shelf._last()
    while one is not None:
        held.append(0 if one._there is None else sum(t.nbytes for t in one._there))
        one = one._before() if one._before is not None else None
    run.backward(loss)
    return held[::-1]


def test_after_the_forward_pass_only_the_last_block_is_still_there():
    held = storages_kept(prepared())
    assert held[:-1] == [0, 0, 0]
    assert held[-1] > 0


def test_weights_and_what_the_caller_holds_stay_where_they_are():
    run = prepared()
    loss = loss_of(run, 0)
    kept = run.model.layers[0].nc_shelf._last()
    there = {t.untyped_storage().data_ptr() for t in kept._there}
    others = [*run.model.parameters(), run.model.mask]
    assert there.isdisjoint({t.untyped_storage().data_ptr() for t in others})
    # One storage for queries, keys and values, though each is kept by itself.
    assert len(there) == len(kept._there)
    run.backward(loss)


def test_a_graph_that_is_kept_can_be_gone_through_twice():
    results = []
    for offload in (True, False):
        run = prepared(offload=offload)
        torch.manual_seed(0)
        loss = loss_of(run, 0)
        run.backward(loss, retain_graph=True)
        run.backward(loss)
        results.append([p.grad.clone() for p in run.model.parameters()])
    assert same(*results) or DEVICE == "cuda"


class Overwriting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.inner(x).exp()  # whose gradient needs its result
        z = y * 1.0
        with torch.no_grad():
            y.fill_(7.0)
        return z


def overwriting(offload):
    run = prepared(lambda: nn.Sequential(Overwriting(), Overwriting()), offload=offload)
    return run, run.model(torch.ones(4, WIDTH, device=DEVICE)).sum()


@pytest.mark.skipif(DEVICE == "cuda", reason="needs copies that are made at once: a CPU")
def test_what_is_written_over_after_it_was_kept_is_still_what_was_kept():
    """torch refuses such a gradient, since it has nothing else to compute it from."""
    run, loss = overwriting(offload=True)
    run.backward(loss)
    found = run.model[0].inner.weight.grad.clone()
    plain, loss = overwriting(offload=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain.backward(loss)
    weights = [layer.inner for layer in plain.model]
    x = torch.ones(4, WIDTH, device=DEVICE)
    weights[1](weights[0](x).exp()).exp().sum().backward()
    assert torch.allclose(weights[0].weight.grad, found)


class Logging(nn.Module):
    """Looks at what it writes over afterwards, and nobody goes back through the look."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.inner(x)
        self.size = y.norm()
        return nn.functional.relu(y, inplace=True)


def test_what_is_written_over_and_not_needed_is_not_refused():
    grads = []
    for offload in (True, False):
        run = prepared(lambda: nn.Sequential(Logging(), Logging()), offload=offload)
        run.backward(run.model(torch.ones(4, WIDTH, device=DEVICE)).sum())
        grads.append([p.grad.clone() for p in run.model.parameters()])
    assert same(*grads) or DEVICE == "cuda"


def test_what_is_written_over_while_it_is_copied_is_refused_as_torch_does(cuda):
    run, loss = overwriting(offload=True)
    with pytest.raises(UnsupportedError, match="modified by an inplace operation while"):
        run.backward(loss)


def test_losses_of_two_passes_may_go_back_in_any_order():
    results = []
    for offload in (True, False):
        run = prepared(offload=offload)
        torch.manual_seed(0)
        first, second = loss_of(run, 0), loss_of(run, 1)
        run.backward(first)
        run.backward(second)
        results.append([p.grad.clone() for p in run.model.parameters()])
    assert same(*results) or DEVICE == "cuda"


def test_a_pass_without_gradients_and_release_leave_nothing():
    run = prepared(checkpoint="blocks")
    with torch.no_grad():
        loss_of(run, 0)
    assert run.model.layers[0].nc_shelf._last is None
    model = run.release()
    assert type(model.layers[0]) is Block
    assert "nc_shelf" not in vars(model.layers[0])


class Late:
    """A device that copies as late as it may: when a copy is waited for, and no sooner.

    Memory of its own that a copy is still to write to, or to read from for a host that is waiting,
    must not be let go of before, unless it is kept from others. `lost` counts what was.
    """

    def __init__(self, monkeypatch):
        self.lost, self.kept, self.waited = 0, 0, 0
        monkeypatch.setattr(host_activations, "Lane", lambda _: LateLane(self))
        monkeypatch.setattr(host_activations, "wait_for", self._wait_for)
        monkeypatch.setattr(host_activations, "on_host", pinned)

    def _wait_for(self, mark, _):
        if mark is not None:
            self.waited += 1
            mark()


def pinned(like):
    """Memory of which torch sees to it that it outlives its copies."""
    made = torch.empty_like(like)
    made.is_of_the_host = True
    return made


class LateLane:
    def __init__(self, device):
        self._device, self._queue, self._kept = device, [], set()

    def copy(self, pairs, *, after=()):
        for into, source in pairs:
            into.fill_(255)  # no number, in any float
            copy = {"into": weakref.ref(into), "source": weakref.ref(source), "after": [*after]}
            self._queue.append(copy)
            if not getattr(into, "is_of_the_host", False):
                weakref.finalize(into, self._let_go_of, copy, id(into))
        last = self._queue[-1]
        return lambda: self._until(last)

    def uses(self, tensor):
        self._kept.add(id(tensor))
        self._device.kept += 1

    def _let_go_of(self, copy, address):
        unfinished = any(copy is each for each in self._queue)
        self._device.lost += unfinished and address not in self._kept
        self._kept.discard(address)

    def _until(self, last):
        while any(last is each for each in self._queue):
            copy = self._queue.pop(0)
            for mark in copy["after"]:
                if mark is not None:
                    mark()
            into, source = copy["into"](), copy["source"]()
            if into is not None:
                self._device.lost += source is None
                into.copy_(into if source is None else source)


def backward_of_two_passes(run):
    first, second = loss_of(run, 0), loss_of(run, 1)
    run.backward(first)
    run.backward(second)


def backward_twice(run):
    loss = loss_of(run, 0)
    run.backward(loss, retain_graph=True)
    run.backward(loss)


def backward_of_a_part_first(run):
    loss = loss_of(run, 0)
    torch.autograd.grad(loss, [*run.model.layers[2].parameters()], retain_graph=True)
    run.backward(loss)


def backward_of_a_pass_before_from_its_middle(run):
    """The last block of a pass is sent for by the next pass, and stepped over by another loss."""
    outputs = []
    hook = run.model.layers[2].register_forward_hook(lambda *seen: outputs.append(seen[-1]))
    first, second = loss_of(run, 0), loss_of(run, 1)
    hook.remove()
    run.backward(second)
    run.backward(outputs[0].square().mean(), retain_graph=True)
    run.backward(first)


on_one_memory = pytest.mark.skipif(DEVICE == "cuda", reason="a device of its own is here")


@on_one_memory
@pytest.mark.parametrize(
    ("passes", "in_vain"),
    [
        (trained, False),
        (backward_of_two_passes, False),
        (backward_twice, False),
        (backward_of_a_part_first, False),
        (backward_of_a_pass_before_from_its_middle, True),
    ],
)
def test_nothing_is_used_or_let_go_of_before_its_copy_is_waited_for(passes, in_vain, monkeypatch):
    kept = prepared(offload=False)
    torch.manual_seed(0)
    passes(kept)
    device = Late(monkeypatch)
    run = prepared()
    torch.manual_seed(0)
    passes(run)
    gc.collect()
    assert device.waited > 0
    # What is let go of can be taken again at once, unless it was sent for in vain.
    assert (device.lost, device.kept > 0) == (0, in_vain)
    values = [[p if p.grad is None else p.grad for p in r.model.parameters()] for r in (run, kept)]
    assert same(*values)


@on_one_memory
def test_memory_of_a_pass_that_broke_off_is_kept_until_its_copies_are_done(monkeypatch):
    device = Late(monkeypatch)
    run = prepared()

    def fail(_):
        raise ArithmeticError("a hook of somebody's own")

    run.model.layers[1].register_full_backward_hook(lambda *_: fail(_))
    loss = loss_of(run, 0)
    with pytest.raises(ArithmeticError):
        run.backward(loss)
    assert device.kept == 0
    del loss
    gc.collect()
    assert device.lost == 0
    assert device.kept > 0


@pytest.mark.gpu
def test_on_a_gpu_the_peak_is_lower_and_the_host_waits_for_nothing(host_never_waits):
    if DEVICE != "cuda":
        pytest.skip("needs a CUDA device")
    peaks, grads = {}, {}
    for offload in ((), ("activations",)):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = nc.prepare(model, optimizer, policy="bf16", memory=nc.Memory(offload=offload))
        x = torch.randn(16, 512, 512, device="cuda")
        for step in range(3):
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            with host_never_waits() if step == 2 else contextlib.nullcontext():
                with run.autocast():
                    loss = run.model(x).float().square().mean()
                run.backward(loss)
            if step < 2:
                run.zero_grad()
        peaks[offload] = torch.cuda.max_memory_allocated()
        grads[offload] = [p.grad.clone() for p in run.model.parameters()]
        del run, model, optimizer, loss
    kept, offloaded = peaks.values()
    assert offloaded < 0.6 * kept
    for one, other in zip(*grads.values(), strict=True):
        # Attention's backward pass adds up by atomics: in another order each time.
        assert torch.allclose(one, other, rtol=1e-2, atol=1e-5)
