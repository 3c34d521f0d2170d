import pytest
import torch

from narrowcast.bench.worker import load_subject
from narrowcast.bench.zoo.models import build_model
from narrowcast.bench.zoo.subject import REPORTED_STEP
from narrowcast.bench.zoo.ways import BF16_SPLIT, ZooTrial, make_step
from narrowcast.errors import UnsupportedError

CPU = torch.device("cpu")
TRIAL = ZooTrial(model="lstm", way=BF16_SPLIT, mode="eager")


def set_up(*, together):
    job = {"bench": "models", "trial": vars(TRIAL), "device": "cpu", "quick": True}
    subject = load_subject(job | {"together": together})
    subject.ready()
    return subject


@pytest.mark.parametrize("together", [1, 2])
def test_a_row_reports_the_loss_of_the_thirtieth_step(together):
    row = set_up(together=together).measure({})
    step, _ = make_step(build_model("lstm", CPU, quick=True), TRIAL, CPU)
    losses = [float(step()) for _ in range(30)]
    assert len(losses) == REPORTED_STEP
    assert row["loss"] == losses[-1]
    assert row["ms"] == min(row["rounds_ms"])
    assert "params=bf16" in row["policy"]
    assert row["together"] == together
    # Only a row beside others reports what it held while it waited.
    assert ("waiting_bytes" in row) == (together > 1)


def test_steps_that_waited_for_memory_of_others_are_no_figure(monkeypatch):
    retries = iter(range(100))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda *_: {"num_alloc_retries": next(retries)})
    assert set_up(together=1).measure({})["ms"] > 0
    beside = set_up(together=2)
    with pytest.raises(UnsupportedError, match="waited for memory held by other rows"):
        beside.measure({})
