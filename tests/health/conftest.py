import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.hardware import Hardware
from narrowcast.precision.plan.plan import make_plan

# Every CPU can emulate every format; a probe would try in a child process what this one can do.
EMULATING = Hardware(device="cpu", name="any CPU", memory_bytes=2**30)


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads on a model this small wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """A small residual network with what passes leave behind: running means, random numbers."""

    def __init__(self, width=32):
        super().__init__()
        self.first = nn.Linear(16, width)
        self.batch_norm = nn.BatchNorm1d(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 16)
        self.between = lambda x: x  # what a test makes of the stream between the two blocks

    def forward(self, x):
        x = self.batch_norm(self.first(x))
        x = self.blocks[1](self.between(self.blocks[0](x)))
        return self.head(x)


@pytest.fixture
def net():
    """Make a network ready: `run, loss_of = net("fp16")`."""

    def make(policy="fp32", *, lr=1e-2, **settings):
        torch.manual_seed(0)
        model = Net()
        plan = make_plan(model, policy, hardware=EMULATING)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        run = nc.prepare(model, optimizer, policy=plan, clip_norm=1.0, **settings)
        return run, lambda batch: F.cross_entropy(model(batch[0]).float(), batch[1])

    return make


def batch_of(seed=0, size=8):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(size, 16, generator=generator),
        torch.randint(0, 16, (size,), generator=generator),
    )


@pytest.fixture
def batch():
    """Draw a batch: `batch(3)`."""
    return batch_of


@pytest.fixture
def step():
    """Take one step on some micro-batches: `outcome = step(run, loss_of, batches)`."""

    def take(run, loss_of, batches):
        for each in batches:
            with run.autocast():
                loss = loss_of(each)
            run.backward(loss / len(batches))
        return run.step()

    return take
