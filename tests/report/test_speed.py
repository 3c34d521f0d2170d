from narrowcast.report.tables import quantile, speed_table
from narrowcast.runs import CheckpointRecord


def test_the_table_adds_up(run_data_of, step):
    records = [step(n, seconds=0.1 * n, applied=n != 4) for n in range(1, 5)]
    saved = CheckpointRecord(step=4, seconds_blocked=0.5, seconds_total=2.0, bytes=1)
    found = {
        name: (figure, note)
        for name, figure, note in speed_table(run_data_of([*records, saved], steps=4))
    }
    assert found["Time in steps"] == ("1.0 s", "4 steps")
    assert found["Per step"] == ("200 ms", "median")
    assert found["Slowest step"] == ("400 ms", "step 4")
    assert found["In skipped steps"] == ("400 ms", "40 %")
    assert found["Waiting for checkpoints"] == ("500 ms", "1 checkpoint")
    assert found["Tokens per second"][0] == "16.4 k"


def test_a_run_without_a_step_or_without_a_clock_has_no_table(run_data_of, step):
    assert speed_table(run_data_of([], steps=1)) == []
    assert speed_table(run_data_of([step(1, seconds=0.0)], steps=1)) == []


def test_a_quantile_is_one_of_the_values_and_as_many_lie_below_as_it_says():
    values = list(range(1, 101))
    assert quantile(values, 0.95) == 95
    assert quantile(values, 0.5) == 50
    assert quantile([3.0], 0.95) == 3.0
