import torch

from narrowcast.bench.worker import subject_of
from narrowcast.bench.zoo.models import built
from narrowcast.bench.zoo.subject import ROUND_STEPS, ROUNDS, WARM_UP_STEPS
from narrowcast.bench.zoo.ways import BF16_SPLIT, Trial, step_of

CPU = torch.device("cpu")


def test_a_worker_tells_the_loss_of_the_thirtieth_step():
    trial = Trial(model="lstm", way=BF16_SPLIT, mode="eager")
    job = {"bench": "models", "trial": vars(trial), "device": "cpu", "quick": True}
    subject = subject_of(job)
    assert subject.ready() == {}
    assert subject.measure({"stage": "set up"}, tell=print) == {}
    found = subject.measure({"stage": "time"}, tell=print)
    step, _ = step_of(built("lstm", CPU, quick=True), trial, CPU)
    losses = [float(step()) for _ in range(30)]
    assert len(losses) == 1 + WARM_UP_STEPS + ROUNDS * ROUND_STEPS
    assert found["loss"] == losses[-1]
    assert found["ms"] == min(found["rounds_ms"])
    assert "params=bf16" in found["policy"]
