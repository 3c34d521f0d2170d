import numpy as np
import pytest
import torch

from narrowcast.workloads.genomics import build
from narrowcast.workloads.genomics.data.examples import Examples, Ragged
from narrowcast.workloads.genomics.models.config import GenomicConfig
from narrowcast.workloads.genomics.models.heads import SequenceHead
from narrowcast.workloads.genomics.models.model import GenomicModel, Network
from narrowcast.workloads.genomics.targets import OneClass

CPU = torch.device("cpu")
TARGET = OneClass(classes=("few", "many"))


@pytest.fixture
def examples():
    """Rows whose class is whether most letters are the first."""
    rng = np.random.default_rng(0)
    rows = [rng.choice([8, 9], 16, p=p) for p in [(0.9, 0.1), (0.1, 0.9)] * 100]
    return Examples(
        tokens=Ragged.joined(rows, np.uint16),
        targets=np.array([int((row == 8).sum() > 8) for row in rows]),
    )


def network():
    torch.manual_seed(0)
    config = GenomicConfig(vocab_size=12, width=16, layers=1, max_length=16, backbone="cnn",
                           dropout=0.1)  # fmt: skip
    return Network(GenomicModel(config), SequenceHead(16, 2))


def test_the_source_domain_is_learnt_and_the_same_seed_gives_the_same(examples, monkeypatch):
    monkeypatch.setattr(build, "SOURCE_STEPS", 40)
    learnt = [network() for _ in range(3)]
    state = torch.get_rng_state()
    for seed, each in zip((1, 1, 2), learnt, strict=True):
        build.learn_source(each, TARGET, examples, seed=seed, device=CPU)
    assert torch.equal(torch.get_rng_state(), state)
    one, two, other = (dict(each.named_parameters()) for each in learnt)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    assert all(p.grad is None for p in learnt[0].parameters())
    batch = examples.__getitems__(list(range(len(examples))))
    with torch.no_grad():
        found = learnt[0].eval()(batch["tokens"], batch["mask"])
    assert (found.argmax(-1) == batch["targets"]).float().mean().item() > 0.9
