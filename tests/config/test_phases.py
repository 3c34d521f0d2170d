import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.config.phases import PhaseSection, last_step, misplaced
from narrowcast.errors import ConfigError
from narrowcast.workloads import load_recipe


def load(schedule, *words):
    return load_recipe("quickstart", [f"precision.schedule={json.dumps(schedule)}", *words])


def problems_of(schedule, *words):
    with pytest.raises(ConfigError) as refused:
        load(schedule, *words)
    return str(refused.value)


def test_phases_end_at_a_step_a_share_or_a_condition():
    phases = load(
        [
            {"policy": "fp32", "until": 20},
            {"policy": "bf16", "until": "10%"},
            {"policy": "fp16", "until": {"calm": 50}},
            {"policy": "fp8-row", "until": {"loss_below": 2}},
            {"until": 0.9},
            {"policy": "bf16", "overrides": {"head": "fp32"}},
        ]
    ).recipe.precision.schedule
    ends = [last_step(phase.until, steps=300) for phase in phases]
    assert ends == [20, 30, None, None, 270, None]
    assert phases[4].policy is None
    assert phases[5].overrides == {"head": "fp32"}


def test_a_schedule_in_yaml_is_one_on_the_command_line(tmp_path):
    path = tmp_path / "phases.yaml"
    path.write_text(
        "workload: lm\nsteps: 100\nbatch_size: 2\nprecision:\n  schedule:\n"
        "    - {policy: fp32, until: 30%}\n    - policy: bf16\n"
    )
    word = "precision.schedule=[{policy: fp32, until: 30%}, {policy: bf16}]"
    there, here = load_recipe(path).recipe, load_recipe("quickstart", [word]).recipe
    assert there.precision.schedule == here.precision.schedule


def test_a_resolved_schedule_is_read_back():
    resolved = load([{"until": {"calm": 5}}, {"policy": "bf16"}]).resolved()
    value = resolved["precision.schedule"]["value"]
    assert load(value).resolved()["precision.schedule"]["value"] == value


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        ({"polcy": "fp32", "until": 3}, "item 1: polcy is not a setting. Did you mean policy?"),
        ({"xyz": 1, "until": 3}, "The settings are policy, overrides, until"),
        ({"policy": 3, "until": 3}, "item 1: policy must be text"),
        ({"policy": "", "until": 3}, "item 1: policy must have at least 1 character"),
        ({"overrides": {"head": 1}, "until": 3}, "item 1: overrides: head must be text, got 1"),
        ({"policy": "fp32"}, "phase 1 has no end. Write until: a step (100)"),
        ({"until": "110%"}, "item 1: until must be the end of the phase: a step (100), a fraction"),
        ({"until": "0%"}, "phase 1 would end at step 0"),
        ({"until": "half"}, "for the last phase, got 'half'"),
        ({"until": True}, "for the last phase, got true"),
        ({"until": 0}, "for the last phase, got 0"),
        ({"until": 1.5}, "for the last phase, got 1.5"),
        ({"until": {"calm": 0}}, 'for the last phase, got {"calm": 0}'),
        ({"until": {"loss_below": "x"}}, "item 1: until must be the end of the phase"),
        ({"until": {"calm": 3, "loss_below": 1}}, "item 1: until must be the end of the phase"),
        ({"until": {}}, "for the last phase, got {}"),
        ("fp32", "item 1 must be a mapping, got 'fp32'. It has policy, overrides, until"),
    ],
)
def test_what_is_wrong_with_a_phase_is_said_with_what_to_write(phase, said):
    assert said in problems_of([phase, {"policy": "bf16"}])


def test_all_problems_of_all_phases_are_said_at_once():
    said = problems_of([{"polcy": "x", "until": "110%"}, {}], "steps=ten")
    assert said.startswith("3 problems")
    assert "steps=ten" in said


def test_only_the_last_phase_has_no_end():
    said = problems_of([{"until": 3}, {}, {"until": 5}])
    assert "phase 2 has no end" in said
    assert "phase 3 is the last and lasts to the end of the run. Leave its until out" in said


def test_a_schedule_that_is_no_list_is_refused():
    assert "must be a list, got 'fp32'" in problems_of("fp32")


def test_phases_that_would_have_no_step_are_refused():
    said = problems_of([{"until": 300}, {"until": 200}, {}])
    assert "phase 1 would end at step 300 of 300, with no step left for the phase after" in said
    assert "phase 2 would end at step 200, and phase 1 does so at step 300" in said
    assert "phase 1 would end at step 0" in problems_of([{"until": "1%"}, {}], "steps=10")


def test_a_run_cut_short_says_which_phase_is_lost():
    assert "End it earlier" in problems_of([{"until": 100}, {}], "steps=50")
    assert load([{"until": "30%"}, {}], "steps=50").recipe.precision.schedule


@given(percent=st.integers(1, 99), steps=st.integers(1, 10**6))
def test_a_share_ends_within_a_half_step_of_itself(percent, steps):
    end = last_step(f"{percent}%", steps=steps)
    assert abs(100 * end - percent * steps) <= 50
    assert end == last_step(percent / 100, steps=steps)


@given(ends=st.lists(st.integers(1, 50), max_size=6), steps=st.integers(1, 50))
def test_only_phases_in_their_order_within_the_run_pass(ends, steps):
    phases = [*(PhaseSection(until=end) for end in ends), PhaseSection()]
    fine = all(a < b for a, b in zip([0, *ends], [*ends, steps], strict=True))
    assert (list(misplaced(phases, steps=steps)) == []) == fine
