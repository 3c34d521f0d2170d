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
            with run.autocast():
                loss = nn.functional.mse_loss(run.model(each["x"]).float(), each["target"][0])
            run.backward(loss / len(batches))
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return passes


def test_a_cpu_has_no_graphs():
    assert unsupported_reason(prepared("cpu").engine) == "CUDA graphs do not run on cpu"


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


def with_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 16))
    model.cuda()
    return nc.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), policy="fp16")


@pytest.mark.gpu
def test_a_replayed_step_takes_back_of_buffers_what_a_launched_one_does():
    """And leaves what is loaded between two replays, which no host code looks at then."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    launched, replayed = with_batch_norm(), with_batch_norm()
    step, passes = GraphedStep(replayed.engine), passes_of(replayed)

    def launch(batches, between):
        loss = passes(batches)
        return replayed.step(), loss

    bad, loaded = WARM_UP + 3, WARM_UP + 6
    for number in range(WARM_UP + 9):
        batches = [batch(2 * number, "cuda"), batch(2 * number + 1, "cuda")]
        if number in (bad, loaded):
            batches[1]["x"].fill_(float("inf"))
        for run in (launched, replayed):
            if number == loaded:
                run.model[1].running_mean.fill_(3.0)
                run.model[1].num_batches_tracked.fill_(100)
        before = {k: v.clone() for k, v in replayed.model[1].named_buffers()}
        passes_of(launched)(batches)
        expected = launched.step()
        outcome, _ = step(batches, None, passes=passes, launch=launch)
        assert step.captured is (number >= WARM_UP)
        assert outcome.applied is expected.applied is (number not in (bad, loaded))
        for name, value in replayed.model[1].named_buffers():
            assert torch.equal(value, launched.model[1].get_buffer(name)), (number, name)
            assert torch.equal(value, before[name]) is (number in (bad, loaded)), (number, name)


@pytest.mark.gpu
def test_graphs_of_a_few_forms_are_kept_and_each_computes_its_own():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    launched, replayed = prepared("cuda"), prepared("cuda")
    captures = []

    def passes_with_power(run, batches):
        (each,) = batches
        captures.append(each["power"])
        with run.autocast():
            error = run.model(each["x"]).float() - each["target"][0]
            loss = error.abs().pow(each["power"]).mean()
        run.backward(loss)
        return loss.detach()

    def launch(batches, between):
        loss = passes_with_power(replayed, batches)
        return replayed.step(), loss

    step = GraphedStep(replayed.engine)
    for number in range(WARM_UP + 9):
        batches = [batch(number, "cuda") | {"power": 2 + number % 2}]
        expected = passes_with_power(launched, batches)
        launched.step()
        captures.clear()
        _, loss = step(
            batches, None, passes=lambda given: passes_with_power(replayed, given), launch=launch
        )
        assert torch.equal(loss, expected)
        assert bool(captures) is (number < WARM_UP + 2)
