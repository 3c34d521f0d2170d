"""What blocks keep, waiting on the host: the same gradients, whatever was kept and written to.

A CPU has nothing to offload, and a plan for one is refused; a plan that says so all the same is
carried out, with both places in the one memory there is, so that all but the copies is tested here.
"""

import contextlib
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
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
    asked = nc.Memory(checkpoint=checkpoint, offload=["activations"] if offload else [])
    plan = nc.plan(model, policy, hardware=nc.probe(DEVICE))
    plan = dataclasses.replace(plan, memory=MemoryPlan(asked=asked, blocks=block_names(model)))
    return nc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), policy=plan)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCAB, (4, LENGTH), generator=generator).to(DEVICE)


def loss_of(run, step):
    with run.compute():
        logits = run.model(batch(step))
        return F.cross_entropy(logits.flatten(0, 1), batch(step).flatten())


def trained(run, steps=3):
    for step in range(steps):
        torch.manual_seed(step)
        for micro in range(2):
            run.backward(loss_of(run, 2 * step + micro) / 2)
        grads = [p.grad.clone() for p in run.model.parameters()]
        assert run.step().applied
    return [*grads, *run.full_weights().values()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


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


def test_what_is_written_over_after_it_was_kept_is_still_what_was_kept():
    """torch refuses such a gradient, since it has nothing else to compute it from."""
    grads = []
    for offload in (True, False):
        run = prepared(lambda: nn.Sequential(Overwriting(), Overwriting()), offload=offload)
        loss = run.model(torch.ones(4, WIDTH, device=DEVICE)).sum()
        if offload:
            run.backward(loss)
            grads.append(run.model[0].inner.weight.grad.clone())
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                run.backward(loss)
    weights = [layer.inner for layer in run.model]
    x = torch.ones(4, WIDTH, device=DEVICE)
    weights[1](weights[0](x).exp()).exp().sum().backward()
    assert torch.allclose(weights[0].weight.grad, grads[0])


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
                with run.compute():
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
