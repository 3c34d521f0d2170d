import time

import pytest
import torch

from narrowcast.bench.contenders import Contender
from narrowcast.bench.measure.timed import TRIED_STEPS, WARM_UP_STEPS, TimedSubject
from narrowcast.bench.measure.timing import (
    SETTLING_STEPS,
    Case,
    Trial,
    queued_seconds,
    step_seconds,
)

CPU = torch.device("cpu")


def test_each_step_has_a_time_and_none_is_shorter_than_what_it_did():
    seconds = step_seconds(lambda: time.sleep(0.01), 3, device=CPU)
    assert len(seconds) == 3
    assert min(seconds) >= 0.01


@pytest.mark.gpu
def test_a_slow_host_is_told_apart_from_what_the_device_takes():
    """The host needs 20 ms to ask for a kernel that fills 4 MB, which takes microseconds."""
    filled = torch.empty(2**20, device="cuda")

    def step():
        time.sleep(0.02)
        filled.zero_()

    on_device, on_host = queued_seconds(step, 3, device=filled.device)
    assert len(on_device) == len(on_host) == 3
    assert min(on_host) >= 0.02
    assert max(on_device) < 0.005


@pytest.mark.gpu
def test_a_step_that_waits_has_the_waiting_in_both_figures():
    filled = torch.empty(2**20, device="cuda")

    def step():
        filled.zero_()
        torch.cuda.synchronize()
        time.sleep(0.02)
        filled.zero_()

    on_device, on_host = queued_seconds(step, 3, device=filled.device)
    assert min(on_host) >= 0.02
    assert min(on_device) >= 0.02


def test_where_the_host_computes_too_there_is_one_figure():
    case = Case(open=lambda: lambda: None, part_of_step=True)
    subject = TimedSubject(
        lambda: Trial(cases={"a": case}), device=CPU, contender=Contender(name="x", kind="y")
    )
    subject.ready()
    measured = subject.measure({"steps": 4}, print)["cases"]["a"]
    assert len(measured["seconds"]) == 4
    assert measured["host_seconds"] == []


def test_warm_up_and_settling_are_not_timed():
    calls = []
    trial = Trial(cases={"a": Case(open=lambda: lambda: calls.append(1), work={"tokens": 2.0})})
    subject = TimedSubject(lambda: trial, device=CPU, contender=Contender(name="x", kind="y"))
    ready = subject.ready()
    assert len(calls) == 1 + WARM_UP_STEPS
    assert set(ready["first_step_seconds"]) == {"a"}
    measured = subject.measure({"steps": 5}, print)
    assert len(measured["cases"]["a"]["seconds"]) == 5
    assert len(calls) == 1 + WARM_UP_STEPS + SETTLING_STEPS + 5
    assert measured["cases"]["a"]["work"] == {"tokens": 2.0}


def test_steps_are_timed_until_a_turn_has_lasted_as_long_as_asked():
    """After as many that are not: a hundred of a millisecond or fewer, where two were asked for."""
    calls = []

    def step():
        calls.append(1)
        time.sleep(0.001)

    case = Case(open=lambda: step, least_seconds=0.1)
    trial = Trial(cases={"short": case, "empty": Case(open=lambda: lambda: None)})
    subject = TimedSubject(lambda: trial, device=CPU, contender=Contender(name="x", kind="y"))
    subject.ready()
    calls.clear()
    measured = subject.measure({"steps": 2}, print)["cases"]
    timed = len(measured["short"]["seconds"])
    assert 2 < timed <= 100
    assert len(calls) == SETTLING_STEPS + TRIED_STEPS + 2 * timed
    assert len(measured["empty"]["seconds"]) == 2


def test_a_case_is_opened_for_each_turn_and_forgotten_between_them():
    opened = []
    case = Case(open=lambda: opened.append(1) or (lambda: None))
    subject = TimedSubject(
        lambda: Trial(cases={"a": case}), device=CPU, contender=Contender(name="x", kind="y")
    )
    subject.ready()
    subject.measure({"steps": 1}, print)
    subject.measure({"steps": 1}, print)
    assert len(opened) == 3


@pytest.mark.gpu
def test_events_see_the_work_of_the_device():
    device = torch.device("cuda")
    a = torch.randn(4096, 4096, device=device)
    torch.mm(a, a)  # the first product loads the library
    short, long = (
        sum(step_seconds(lambda n=n: [a @ a for _ in range(n)], 5, device=device)) for n in (1, 8)
    )
    assert 0 < short < long
