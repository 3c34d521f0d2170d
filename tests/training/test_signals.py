import signal
import subprocess
import sys
import textwrap

import pytest

from narrowcast.training.signals import STOPPING, stop_on_signals


@pytest.mark.parametrize("number", STOPPING)
def test_a_first_signal_is_noted_and_handlers_are_put_back(number):
    before = [signal.getsignal(n) for n in STOPPING]
    with stop_on_signals() as stop:
        assert stop.asked_by is None
        signal.raise_signal(number)
        assert stop.asked_by is number
    assert [signal.getsignal(n) for n in STOPPING] == before


@pytest.mark.parametrize("second", STOPPING)
def test_a_second_signal_ends_the_process_at_once(second):
    program = f"""
    import signal
    from narrowcast.training.signals import stop_on_signals
    with stop_on_signals():
        signal.raise_signal(signal.SIGINT)
        print("first", flush=True)
        signal.raise_signal({int(second)})
        print("second", flush=True)
    """
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == -second
    assert child.stdout == "first\n"


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_the_process_was_started_to_ignore_stays_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)  # as nohup does with SIGHUP
    try:
        with stop_on_signals() as stop:
            signal.raise_signal(number)
            assert stop.asked_by is None
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
