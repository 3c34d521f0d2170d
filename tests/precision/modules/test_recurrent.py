"""Recurrent layers on a GPU, where every warning is an error: also cuDNN's of scattered weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.precision.modules.rewrite import compact_recurrent

STEPS, LAYERS, LENGTH = 4, 2, 6
SPLIT = "params=bf16, master=split"
POLICIES = ["bf16", f"bf16, {SPLIT}", f"fp8-delayed, {SPLIT}", "bf16-pure"]


class Recurrent(nn.Module):
    def __init__(self, kind, *, both):
        super().__init__()
        self.layer = kind(12, 20, LAYERS, batch_first=True, bidirectional=both)
        self.head = nn.Linear(20 * (1 + both), 4)

    def forward(self, x):
        return self.head(self.layer(x)[0])


def fresh(device, *, kind=nn.LSTM, both=False, **settings):
    torch.manual_seed(0)
    model = Recurrent(kind, both=both).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return nc.prepare(model, optimizer, **settings)


def train(run, device, steps=STEPS):
    torch.manual_seed(1)
    x, y = torch.randn(8, LENGTH, 12, device=device), torch.randn(8, LENGTH, 4, device=device)
    losses = []
    for _ in range(steps):
        with run.autocast():
            loss = F.mse_loss(run.model(x).float(), y)
        assert run.step(loss).applied
        losses.append(float(loss.detach()))
    return losses


# The tracer looks at what a graph goes on with.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("policy", POLICIES[:2])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU], ids=lambda c: c.__name__)
def test_a_compiler_leaves_all_of_a_recurrent_layer_alone(cuda, kind, policy):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, compiled = (fresh(cuda, kind=kind, policy=policy) for _ in range(2))
    compiled.model.compile(backend="aot_eager")
    torch.testing.assert_close(train(compiled, cuda), train(plain, cuda), rtol=2.0**-8, atol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # the head's


def is_one_piece(layer):
    return len({p.untyped_storage().data_ptr() for p in layer.parameters()}) == 1


@pytest.mark.parametrize("both", [False, True], ids=["one way", "both ways"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda c: c.__name__)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_recurrent_layer_trains_in_one_piece_of_memory(cuda, policy, kind, both):
    exactly = train(fresh(cuda, kind=kind, both=both, policy="fp32"), cuda)
    run = fresh(cuda, kind=kind, both=both, policy=policy)
    found = train(run, cuda)
    # Each layer rounds its state at each step of a sequence, and so does the head.
    rounded = (LAYERS * LENGTH + 1) * 2.0**-8
    torch.testing.assert_close(found, exactly, rtol=rounded, atol=0)
    assert is_one_piece(run.model.layer)
    assert found[-1] < found[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_with_weights_in_one_piece_is_saved_and_goes_on(cuda, policy, same_state):
    run, other = (fresh(cuda, policy=policy) for _ in range(2))
    train(run, cuda)
    other.load_state_dict(copy.deepcopy(run.state_dict()))
    assert same_state(other.state_dict(), run.state_dict())
    assert is_one_piece(other.model.layer)
    torch.testing.assert_close(train(other, cuda), train(run, cuda), rtol=2.0**-8, atol=0)


@pytest.mark.parametrize("policy", POLICIES)
def test_averages_and_released_weights_are_in_one_piece_too(cuda, policy):
    run = fresh(cuda, policy=policy, ema_decay=0.5)
    train(run, cuda)
    x = torch.randn(3, LENGTH, 12, device=cuda)
    with run.use_ema(), run.autocast():
        run.model(x)
    assert is_one_piece(run.model.layer)
    train(run, cuda)
    full = run.fp32_state_dict()
    run.release()
    assert is_one_piece(run.model.layer)
    plain = Recurrent(nn.LSTM, both=False).to(cuda)
    plain.load_state_dict(full)
    torch.testing.assert_close(run.model(x), plain(x))


@pytest.mark.parametrize("frozen", ["layer", "layer.bias"])
def test_no_weight_moves_for_averages_to_stand_in(cuda, frozen):
    torch.manual_seed(0)
    model = Recurrent(nn.LSTM, both=False).to(cuda)
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    trained = [p for p in model.parameters() if p.requires_grad]
    run = nc.prepare(model, torch.optim.AdamW(trained), policy=f"bf16, {SPLIT}", ema_decay=0.5)
    train(run, cuda)
    before = [p.data_ptr() for p in model.parameters()]
    with run.use_ema(), run.autocast():
        model(torch.randn(3, LENGTH, 12, device=cuda))
    assert [p.data_ptr() for p in model.parameters()] == before


@pytest.mark.parametrize("settings", [{"bias": False}, {"proj_size": 8}, {"num_layers": 3}])
def test_every_make_of_layer_computes_the_same_in_one_piece(cuda, settings):
    torch.manual_seed(0)
    layer = nn.LSTM(12, 20, **settings, device=cuda, dtype=torch.bfloat16)
    kept = {name: p.detach().clone() for name, p in layer.named_parameters()}
    compact_recurrent(layer)
    assert is_one_piece(layer)
    assert all(torch.equal(p, kept[name]) for name, p in layer.named_parameters())
    x = torch.randn(LENGTH, 3, 12, device=cuda, dtype=torch.bfloat16)
    exactly = copy.deepcopy(layer).float()
    compact_recurrent(exactly)
    rounded = (layer.num_layers * LENGTH) * 2.0**-8
    torch.testing.assert_close(layer(x)[0].float(), exactly(x.float())[0], rtol=0, atol=rounded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_on_a_cpu_stays_where_it_is(dtype):
    layer = nn.LSTM(12, 20, dtype=dtype)
    before = [p.data_ptr() for p in layer.parameters()]
    compact_recurrent(layer)
    assert [p.data_ptr() for p in layer.parameters()] == before
