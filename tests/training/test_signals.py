import signal
import subprocess
import sys
import textwrap
from itertools import permutations

import pytest

from narrowcast.training.signals import STOPPING, stop_on_signals


@pytest.mark.parametrize("number", STOPPING)
def test_a_first_signal_is_noted_and_handlers_are_put_back(number):
    before = [signal.getsignal(n) for n in STOPPING]
    with stop_on_signals() as stop:
        assert stop.received is None
        signal.raise_signal(number)
        assert stop.received is number
    assert [signal.getsignal(n) for n in STOPPING] == before


def sent(*numbers):
    """Return how a process ends that gets these signals, and how many of them it outlives."""
    program = f"""
    import signal
    from narrowcast.training.signals import stop_on_signals
    with stop_on_signals() as stop:
        for number in {[int(number) for number in numbers]}:
            signal.raise_signal(number)
            print(stop.received.name, flush=True)
    """
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    return child.returncode, child.stdout.split()


@pytest.mark.parametrize("number", STOPPING)
def test_the_same_signal_again_ends_the_process_at_once(number):
    assert sent(number, number) == (-number, [number.name])


@pytest.mark.parametrize("order", list(permutations(STOPPING)))
def test_another_signal_is_the_same_request_once_more(order):
    assert sent(*order) == (0, [order[0].name] * len(order))
    assert sent(*order, order[1]) == (-order[1], [order[0].name] * len(order))


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_the_process_was_started_to_ignore_stays_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)  # as nohup does with SIGHUP
    try:
        with stop_on_signals() as stop:
            signal.raise_signal(number)
            assert stop.received is None
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
