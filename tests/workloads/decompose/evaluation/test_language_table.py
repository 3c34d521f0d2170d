"""The table of a masked language model, against torch's own losses and masks by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowcast.workloads.decompose.components.decomposition import Decomposition
from narrowcast.workloads.decompose.components.sites import find_sites
from narrowcast.workloads.decompose.evaluation.language_table import (
    MASKINGS,
    LanguageTable,
    masks_for,
)
from narrowcast.workloads.decompose.losses.terms import Step

VOCABULARY = 11


class Bigrams(nn.Module):
    """Logits of the next token from this one alone, by two layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.mlp = nn.Linear(6, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens):
        return self.head(torch.tanh(self.mlp(self.embed(tokens))))


def make_step(batch, length, *, importance=None, seed=0):
    torch.manual_seed(seed)
    target = Bigrams().double()
    frozen = {name: each.detach().clone() for name, each in target.named_parameters()}
    decomposition = Decomposition(target, find_sites(target, {"mlp": 5, "head": 7})).double()
    torch.manual_seed(seed + 100)
    # What the target finds likeliest, so that it predicts better than nothing does.
    columns = [torch.randint(VOCABULARY, (batch,))]
    for _ in range(length - 1):
        columns.append(decomposition(columns[-1]).output.argmax(-1))
    tokens = torch.stack(columns, dim=1)
    rows = batch * length
    generator = torch.Generator().manual_seed(seed)
    lower = [
        torch.rand(1, 1, c, generator=generator, dtype=torch.float64).expand(1, rows, c).clone()
        for c in (5, 7)
    ]
    if importance is not None:
        lower = [torch.full_like(each, importance) for each in lower]
    step = Step(
        decomposition=decomposition,
        args=(tokens,),
        target=decomposition(tokens).output,
        lower=lower,
        upper=lower,
        progress=torch.tensor(0.0),
        divergence="kl",
    )
    return step, tokens, frozen


def by_hand(step, tokens, frozen, masks):
    """Return cross-entropy and divergence of the network with masked weights, by plain torch."""
    parts = []
    for site, mask in zip(step.decomposition.sites, masks, strict=True):
        pair = list(step.decomposition.components.values())[len(parts)]
        assert site.components == mask.numel()
        parts.append((pair.V[0] * mask) @ pair.U[0])
    x = F.embedding(tokens, frozen["embed.weight"])
    x = torch.tanh(x @ parts[0] + frozen["mlp.bias"])
    logits = x @ parts[1] + frozen["head.bias"]
    ce = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    log_p, log_q = (each.flatten(0, 1).log_softmax(-1) for each in (step.target, logits))
    kl = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    return ce.item(), kl.item()


@pytest.mark.parametrize("masking", ["ci", "unmasked", "rounded", "zero"])
def test_each_row_is_the_network_with_masked_weights(masking):
    step, tokens, frozen = make_step(4, 9)
    table = LanguageTable(rounding=0.5)
    table.add(step, tokens)
    found = table.read()
    g = [each[0, 0] for each in step.lower]
    masks = {
        "ci": g,
        "unmasked": [torch.ones_like(each) for each in g],
        "rounded": [(each > 0.5).double() for each in g],
        "zero": [torch.zeros_like(each) for each in g],
    }
    ce, kl = by_hand(step, tokens, frozen, masks[masking])
    assert found[f"ce_{masking}"] == pytest.approx(ce, rel=1e-6)
    assert found[f"kl_{masking}"] == pytest.approx(kl, rel=1e-6)
    target = F.cross_entropy(step.target[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()
    worst, _ = by_hand(step, tokens, frozen, masks["zero"])
    assert found["ce_target"] == pytest.approx(target, rel=1e-6)
    assert found[f"ce_difference_{masking}"] == pytest.approx(ce - target, rel=1e-4)
    expected = (ce - target) / (worst - target)
    assert found[f"ce_unrecovered_{masking}"] == pytest.approx(expected, rel=1e-4)


def test_nothing_can_be_recovered_where_nothing_is_lost():
    step, tokens, _ = make_step(4, 9)
    table = LanguageTable()
    table.add(step, (tokens + 5) % VOCABULARY)  # tokens that the target finds unlikely
    found = table.read()
    assert found["ce_zero"] < found["ce_target"]
    assert math.isnan(found["ce_unrecovered_ci"])


def test_batches_count_by_their_tokens():
    step, tokens, _ = make_step(6, 9, importance=0.3)
    parts = LanguageTable(maskings=("ci", "zero"))
    for rows in (slice(0, 1), slice(1, 6)):
        part = Step(
            decomposition=step.decomposition,
            args=(tokens[rows],),
            target=step.target[rows],
            lower=[each[:, : tokens[rows].numel()] for each in step.lower],
            upper=step.upper,
            progress=step.progress,
            divergence="kl",
        )
        parts.add(part, tokens[rows])
    whole = LanguageTable(maskings=("ci", "zero"))
    whole.add(step, tokens)
    assert parts.read() == pytest.approx(whole.read(), rel=1e-6, nan_ok=True)


def test_what_is_important_always_takes_part_and_the_rest_by_chance():
    step, _, _ = make_step(2, 5, importance=1.0)
    for masking in MASKINGS:
        masks = masks_for(masking, step)
        assert len(masks) == 2
        # Only a stochastic pass has a part of what components leave.
        assert all((mask.delta is not None) == (masking == "stochastic") for mask in masks)
    certain = LanguageTable(maskings=("ci", "rounded", "unmasked", "zero"))
    step, tokens, _ = make_step(2, 5, importance=1.0)
    certain.add(step, tokens)
    found = certain.read()
    assert found["ce_ci"] == found["ce_rounded"] == pytest.approx(found["ce_unmasked"], rel=1e-9)


def test_random_masks_do_not_know_what_is_important():
    step, tokens, _ = make_step(2, 5, importance=1.0)
    other, _, _ = make_step(2, 5, importance=0.0)
    found = []
    for each in (step, other):
        torch.manual_seed(7)
        table = LanguageTable(maskings=("random",))
        table.add(each, tokens)
        found.append(table.read()["ce_random"])
    assert found[0] == found[1]
