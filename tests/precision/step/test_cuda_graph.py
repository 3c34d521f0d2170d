"""Steps captured as CUDA graphs; the trainer's side of it is in tests/training/test_stepping.py."""

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.precision.step.cuda_graph import WARM_UP, GraphedStep, unsupported_reason


def prepared(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return nc.prepare(model, optimizer, policy="bf16, params=bf16, master=split")


def batch(step, device):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 32, generator=generator)
    return {"x": x.to(device), "target": [x[:, :16].to(device)]}


def passes_of(run):
    def passes(batches):
        losses = []
        for each in batches:
            with run.compute():
                loss = nn.functional.mse_loss(run.model(each["x"]).float(), each["target"][0])
            run.backward(loss / len(batches))
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return passes


def test_a_cpu_has_no_graphs():
    assert unsupported_reason(prepared("cpu").engine) == "CUDA graphs are not for cpu"


@pytest.mark.gpu
def test_batches_that_are_dicts_of_lists_are_replayed_as_they_would_be_launched():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    launched, replayed = prepared("cuda"), prepared("cuda")
    step = GraphedStep(replayed.engine)
    passes = passes_of(replayed)

    def launch(batches, between):
        loss = passes(batches)
        return replayed.step(), loss

    for number in range(WARM_UP + 5):
        batches = [batch(2 * number, "cuda"), batch(2 * number + 1, "cuda")]
        expected = passes_of(launched)(batches)
        launched.step()
        outcome, loss = step(batches, None, passes=passes, launch=launch)
        assert step.captured is (number >= WARM_UP)
        assert torch.equal(loss, expected)
        assert outcome.applied
    for mine, theirs in zip(launched.model.parameters(), replayed.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
