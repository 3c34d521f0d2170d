import pytest
import torch

from narrowcast.bench.worker import subject_of
from narrowcast.bench.zoo.models import built
from narrowcast.bench.zoo.subject import ROUND_STEPS, ROUNDS, TOLD_STEP, WARM_UP_STEPS
from narrowcast.bench.zoo.ways import BF16_SPLIT, Trial, step_of
from narrowcast.errors import UnsupportedError

CPU = torch.device("cpu")
TRIAL = Trial(model="lstm", way=BF16_SPLIT, mode="eager")


def set_up(*, together):
    job = {"bench": "models", "trial": vars(TRIAL), "device": "cpu", "quick": True}
    subject = subject_of(job | {"together": together, "started": 0.0})
    assert subject.ready() == {}
    assert subject.measure({"stage": "set up"}, tell=print) == {}
    return subject


@pytest.mark.parametrize("together", [1, 2])
def test_a_worker_tells_the_loss_of_the_thirtieth_step(together):
    found = set_up(together=together).measure({"stage": "time"}, tell=print)
    step, _ = step_of(built("lstm", CPU, quick=True), TRIAL, CPU)
    losses = [float(step()) for _ in range(30)]
    assert len(losses) == TOLD_STEP == 1 + WARM_UP_STEPS + ROUNDS * ROUND_STEPS
    assert found["loss"] == losses[-1]
    assert found["ms"] == min(found["rounds_ms"])
    assert "params=bf16" in found["policy"]
    assert found["together"] == together


def test_only_a_worker_beside_others_tells_what_it_held_while_it_waited():
    alone, beside = (
        set_up(together=together).measure({"stage": "time"}, tell=print) for together in (1, 2)
    )
    assert "waiting_bytes" not in alone
    assert beside["waiting_bytes"] > 0


def test_steps_that_waited_for_memory_of_others_are_no_figure(monkeypatch):
    retries = iter(range(100))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda *_: {"num_alloc_retries": next(retries)})
    assert set_up(together=1).measure({"stage": "time"}, tell=print)["ms"] > 0
    beside = set_up(together=2)
    with pytest.raises(UnsupportedError, match="timed steps waited for it"):
        beside.measure({"stage": "time"}, tell=print)
