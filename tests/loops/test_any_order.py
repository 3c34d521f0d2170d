"""A loop's events in any order: as in plain torch to the last bit, or refused and unchanged."""

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test


def test_events_in_any_order_work_in_narrow_policies_or_are_refused(machine):
    chosen = settings(max_examples=40, stateful_step_count=25, derandomize=True, database=None)
    run_state_machine_as_test(machine.NarrowMachine, settings=chosen)


def test_events_in_any_order_are_those_of_a_careful_plain_loop(machine):
    # The same hundred each time; benchmarks/loops.py draws others.
    chosen = settings(
        max_examples=100,
        stateful_step_count=25,
        deadline=None,
        derandomize=True,
        database=None,
    )
    run_state_machine_as_test(machine.LoopMachine, settings=chosen)
    tried = {name: (ran, refused) for name, ran, refused in machine.counts()}
    # Refusals are told apart from what is done: neither may be all there is.
    assert tried["step"][1] < tried["step"][0]
    assert tried["step(loss)"][1] < tried["step(loss)"][0]
    assert sum(ran for ran, _ in tried.values()) > 1000
