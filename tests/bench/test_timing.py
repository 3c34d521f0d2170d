import time

import pytest
import torch

from narrowcast.bench import step as bench_step
from narrowcast.bench.contenders import PEERS
from narrowcast.bench.peers import Trial
from narrowcast.bench.step import SETTLING_STEPS, WARM_UP_STEPS
from narrowcast.bench.timing import step_seconds
from narrowcast.bench.worker import load_subject


def test_each_step_has_a_time_and_none_is_shorter_than_what_it_did():
    seconds = step_seconds(lambda: time.sleep(0.01), 3, device=torch.device("cpu"))
    assert len(seconds) == 3
    assert min(seconds) >= 0.01


def test_warm_up_and_settling_steps_are_not_timed(tiny, monkeypatch):
    calls = []
    trial = Trial(step=lambda: calls.append(1), about={"parameters": 7}, loss=lambda: 1.5)
    monkeypatch.setattr(bench_step, "BUILDERS", {"torch": lambda bench, **options: trial})
    job = {"bench": "step", "recipe": tiny, "overrides": []}
    subject = load_subject({**job, "contender": PEERS["torch-fp32"].to_json()})
    assert subject.ready()["parameters"] == 7
    assert len(calls) == 1 + WARM_UP_STEPS
    turn = subject.measure({"steps": 5})
    assert len(turn["seconds"]) == 5
    assert len(calls) == 1 + WARM_UP_STEPS + SETTLING_STEPS + 5
    assert (turn["work"], turn["loss"]) == ({"tokens": 32.0}, 1.5)


@pytest.mark.gpu
def test_events_see_the_work_of_the_device():
    device = torch.device("cuda")
    a = torch.randn(4096, 4096, device=device)
    torch.mm(a, a)  # the first product loads the library
    short, long = (
        sum(step_seconds(lambda n=n: [a @ a for _ in range(n)], 5, device=device)) for n in (1, 8)
    )
    assert 0 < short < long
