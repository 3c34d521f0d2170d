import pytest
import torch

from narrowcast.workloads.genomics.models.config import GenomicConfig
from narrowcast.workloads.genomics.models.heads import SequenceHead, TokenHead
from narrowcast.workloads.genomics.models.model import GenomicModel, Network

CONFIG = GenomicConfig(vocab_size=12, width=16, layers=1, max_length=32)


@pytest.fixture
def tokens():
    return torch.randint(1, 12, (3, 20), generator=torch.Generator().manual_seed(0))


def test_of_a_pair_the_head_sees_the_change_and_what_came_of_it(tokens):
    torch.manual_seed(0)
    network = Network(GenomicModel(CONFIG), SequenceHead(32, 2)).eval()
    other = tokens.clone()
    other[:, 7] = 3
    before, after = network.backbone(tokens), network.backbone(other)
    expected = network.head(torch.cat([after - before, after], -1))
    torch.testing.assert_close(network(tokens, None, other), expected)


@pytest.mark.parametrize("pair", [False, True])
def test_what_fills_a_row_up_changes_no_answer(tokens, pair):
    torch.manual_seed(0)
    network = Network(GenomicModel(CONFIG), SequenceHead(32 if pair else 16, 2)).eval()
    other = tokens.flip(0) if pair else None
    mask = torch.ones_like(tokens, dtype=torch.bool)
    wide = [None if x is None else torch.nn.functional.pad(x, (0, 12)) for x in (tokens, other)]
    longer = network(wide[0], torch.nn.functional.pad(mask, (0, 12)), wide[1])
    torch.testing.assert_close(longer, network(tokens, mask, other), rtol=1e-4, atol=1e-5)


def test_stages_together_hold_every_parameter_once():
    network = Network(GenomicModel(CONFIG), TokenHead(16, 3))
    held = [p for stage in network.stages() for p in stage.parameters()]
    assert len(held) == len(set(held))
    assert set(held) == set(network.parameters())
