import math
from dataclasses import replace

import pytest

from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.report.compare.comparison import compare
from narrowcast.report.compare.groups import estimate_mean
from narrowcast.report.compare.rows import headline, rows
from narrowcast.report.compare.runs import TRAINING
from narrowcast.runs import EvalRecord, Metric, TaskInfo


@pytest.fixture
def make(make_run, step):
    """Write a run whose evaluated loss falls from 3, each step taking so many seconds."""

    def make(folder, *, steps=40, every=10, seconds=0.1, offset=0.0, metric="loss", **changes):
        records = []
        for n in range(1, steps + 1):
            records.append(step(n, loss=3 - n / 40 + offset, seconds=seconds))
            if every and n % every == 0:
                records.append(EvalRecord(step=n, metrics={metric: 3 - n / 40 + offset}))
        return str(make_run(records, steps=steps, folder=folder, **changes))

    return make


def test_runs_that_differ_only_in_the_seed_are_one_group_with_a_t_interval(make):
    offsets = [0.0, 0.01, 0.05]
    folders = [make(f"a{i}", seed=i, offset=x) for i, x in enumerate(offsets)]
    (group,) = compare(folders).groups
    expected = estimate_mean([2 + x for x in offsets])
    assert group.at_step.mean == pytest.approx(expected.mean)
    assert group.at_step.half_width == pytest.approx(expected.half_width)
    assert group.seeds == (0, 1, 2)


def test_a_name_or_a_description_does_not_part_runs(make):
    found = compare([make("a", seed=0, name="x"), make("b", seed=1, name="y", description="z")])
    assert len(found.groups) == 1
    assert found.differing == {}


def test_runs_with_other_schedules_are_named_by_their_phases(make):
    phases = [{"policy": "fp32", "until": "30%"}, {"policy": None, "until": {"calm": 4}}, {}]
    schedules = [{"precision.schedule": phases[:1] + phases[2:]}, {"precision.schedule": phases}]
    folders = [make(f"s{i}", **{"precision.policy": "bf16"}, **s) for i, s in enumerate(schedules)]
    assert [group.label for group in compare(folders).groups] == [
        "fp32 until 30% → bf16",
        "fp32 until 30% → bf16 until calm 4 → bf16",
    ]


def test_groups_are_named_by_what_differs(make):
    folders = [make("a", **{"precision.policy": "bf16"}), make("b", **{"precision.policy": "fp32"})]
    found = compare(folders)
    assert [group.label for group in found.groups] == [
        "precision.policy=bf16",
        "precision.policy=fp32",
    ]
    assert found.differing == {"precision.policy": ("bf16", "fp32")}


def test_at_equal_seconds_the_faster_run_is_ahead_though_at_equal_step_they_are_level(make):
    slow = make("slow", seconds=0.2, clip_norm=2.0)
    fast = make("fast", seconds=0.1, clip_norm=1.0)
    found = compare([slow, fast])
    assert found.terms.step == 40
    assert found.terms.seconds == pytest.approx(4.0)
    first, second = found.groups
    assert first.at_step.mean == second.at_step.mean == pytest.approx(2.0)
    assert first.at_seconds.mean == pytest.approx(2.5)
    assert second.at_seconds.mean == pytest.approx(2.0)
    assert second.items_per_second == pytest.approx(2 * first.items_per_second)


def test_the_time_to_a_loss_is_that_of_the_first_evaluation_as_good(make):
    folders = [make("a", seconds=0.2, clip_norm=2.0), make("b", seconds=0.1, clip_norm=1.0)]
    found = compare(folders, target=2.6)
    assert [group.steps_to.mean for group in found.groups] == [20, 20]
    assert [group.seconds_to.mean for group in found.groups] == pytest.approx([4.0, 2.0])


def test_every_run_reaches_a_target_that_was_not_given(make):
    folders = [make("a", clip_norm=2.0, offset=0.3), make("b", clip_norm=1.0)]
    found = compare(folders)
    assert found.terms.target == pytest.approx(2.3)
    assert [group.reached for group in found.groups] == [1, 1]
    assert [group.steps_to.mean for group in found.groups] == [40, 30]


def test_a_target_that_was_not_reached_is_told(make):
    folders = [make("a", seed=0), make("b", seed=1, offset=0.5)]
    (row,) = rows(compare(folders, target=2.2))
    assert row["seconds_to"] == "4.0 s, 40 steps (1 of 2 runs)"
    assert rows(compare(folders, target=0.1))[0]["seconds_to"] == "not reached"


def test_the_same_seeds_are_compared_pair_by_pair(make):
    folders = []
    for seed, luck in enumerate((0.0, 0.4, -0.3)):
        for norm, gap in ((1.0, 0.0), (2.0, 0.02 + 0.001 * seed)):
            name = f"{norm}-{seed}"
            folders.append(make(name, seed=seed, clip_norm=norm, offset=luck + gap))
    first, second = compare(folders).groups
    assert first.against is None
    assert second.against.mean == pytest.approx(0.021)
    assert second.against.half_width == pytest.approx(
        estimate_mean([0.02, 0.021, 0.022]).half_width
    )
    assert second.against.half_width < first.at_step.half_width / 50
    assert "is statistically significant" in headline(compare(folders))


def test_other_seeds_are_compared_by_welch_s_interval(make):
    folders = [make(f"a{s}", seed=s, offset=s / 10) for s in (0, 1)]
    folders += [make(f"b{s}", seed=s, offset=s / 10, clip_norm=3.0) for s in (2, 3)]
    _, second = compare(folders).groups
    assert second.against.mean == pytest.approx(0.2)
    # Equal spreads of two each: 2 degrees of freedom, so 4.303 standard errors.
    assert second.against.half_width == pytest.approx(4.303 * math.sqrt(2 * 0.05**2), rel=1e-3)
    assert "The difference from clip_norm=3.0 is not statistically significant" in headline(
        compare(folders)
    )


def test_two_runs_of_one_seed_are_no_two_seeds(make):
    found = compare([make("a", seed=0), make("b", seed=0, offset=0.1)])
    (group,) = found.groups
    assert group.at_step.n == 1
    assert group.at_step.half_width is None
    assert group.at_step.mean == pytest.approx(2.05)
    assert any("2 runs share the recipe and seed 0" in note for note in found.notes)


def test_runs_that_were_never_evaluated_are_compared_by_their_training_loss(make):
    found = compare([make("a", every=0), make("b", every=0, seed=1)])
    assert found.terms.metric == TRAINING
    assert found.groups[0].at_step.mean == pytest.approx(2.0, abs=0.05)


def test_a_shorter_run_sets_the_step(make):
    found = compare([make("a", steps=40), make("b", steps=25)])
    assert found.terms.step == 20
    assert [group.at_step.mean for group in found.groups] == pytest.approx([2.5, 2.5])


def test_runs_that_share_no_evaluated_step_are_taken_at_their_last_before_the_shortest_ends(make):
    found = compare([make("a", every=7), make("b", every=11, clip_norm=2.0)])
    assert found.terms.step == 33
    assert any("not evaluated at the same steps" in note for note in found.notes)


def test_runs_of_different_workloads_are_refused_with_what_each_is(make):
    a, b = make("a", workload="lm"), make("b", workload="forecast")
    with pytest.raises(
        ConfigError, match=r"different workloads.*is lm.*is forecast. Name runs of one"
    ):
        compare([a, b])


def test_runs_of_different_data_have_no_best(make):
    found = compare([make("a", **{"data.text": "x"}), make("b", **{"data.text": "y"})])
    assert headline(found) == (
        "The runs use different data, so their evaluated loss cannot be compared."
    )
    assert not any(row["best"] for row in rows(found))


def test_difference_is_not_attributed_to_the_format_where_the_schedule_differs_too(make_run, step):
    folders = []
    for policy, steps in (("bf16", 300), ("fp16", 200)):
        records = [step(n, lr=1e-3 * (1 - n / steps)) for n in range(1, 101)]
        records.append(EvalRecord(step=100, metrics={"loss": 2 + 10 / steps}))
        words = {"precision.policy": policy, "eval.every": steps}
        folders.append(str(make_run(records, steps=steps, folder=policy, **words)))
    found = compare(folders)
    notes = " ".join(found.notes)
    assert "differ in several settings (precision.policy, steps)" in notes
    assert f"learning rates: at step 100, 6.67 × 10⁻⁴ in {folders[0]}, 5.00 × 10⁻⁴" in notes
    assert "(the runs differ in more than one setting)" in headline(found)


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"precision.loss_scale.init_scale": 2.0, "checkpoint.every": 7, "eval.every": 5},
    ],
)
def test_runs_that_differ_in_the_format_alone_get_no_note_about_settings(words, make):
    folders = [make("a"), make("b", **{"precision.policy": "fp32"}, **words)]
    found = compare(folders)
    assert not any("differ in" in note for note in found.notes)
    assert "more than one" not in headline(found)


def test_skipped_steps_are_no_other_learning_rate_schedule(make_run, step):
    folders = [
        str(
            make_run(
                [step(1, lr=lr), EvalRecord(step=1, metrics={"loss": 2.0})],
                steps=1,
                folder=policy,
                **{"precision.policy": policy},
            )
        )
        for policy, lr in (("fp32", 1e-3), ("fp16", 2e-3))
    ]
    assert not any("learning rates" in note for note in compare(folders).notes)


@pytest.mark.parametrize("again", ["a", "a/", "./a"])
def test_a_run_is_not_compared_with_itself(again, make, tmp_path, monkeypatch):
    make("a")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="two or more different run folders"):
        compare(["a", again])


@pytest.mark.parametrize("target", [math.nan, math.inf])
def test_a_target_that_is_no_number_is_refused(target, make):
    with pytest.raises(ConfigError, match="must be a finite number"):
        compare([make("a"), make("b", seed=1)], target=target)


def test_one_run_is_no_comparison(make):
    with pytest.raises(ConfigError, match="two or more"):
        compare([make("a")])


def test_a_run_without_a_step_is_refused(make, make_run):
    empty = str(make_run([], steps=3, folder="empty"))
    with pytest.raises(CheckpointError, match="empty has no recorded step yet"):
        compare([make("a"), empty])


def test_a_run_that_was_never_finite_is_refused(make, make_run, step):
    lost = str(make_run([step(1, loss=math.nan)], steps=1, folder="lost"))
    with pytest.raises(ConfigError, match=r"training loss was never finite in .*lost"):
        compare([make("a"), lost])


def test_a_metric_that_some_run_lacks_is_refused_with_those_there_are(make):
    with pytest.raises(ConfigError, match=r"got crps. Write one of loss, 'training"):
        compare([make("a"), make("b", seed=1)], metric="crps")


@pytest.mark.parametrize(("better", "best"), [("higher", [True, False]), ("lower", [False, True])])
def test_which_value_is_best_and_what_is_reached_is_as_the_task_says(better, best, make):
    task = TaskInfo(metrics=(Metric(name="score", better=better),))
    folders = [
        make("a", metric="score", offset=0.2, clip_norm=2.0, task=task),
        make("b", metric="score", task=task),
    ]
    found = compare(folders, target=2.25 if better == "higher" else 2.5)
    assert [row["best"] for row in rows(found)] == best
    assert found.to_json()["lower_is_better"] is (better == "lower")
    # The score falls from 3: what is high is reached at once, what is low later.
    steps = [group.steps_to.mean for group in found.groups]
    assert steps == ([10, 10] if better == "higher" else [30, 20])


def test_a_metric_is_written_as_its_task_says(make, classifier):
    folders = [make(f"r{i}", metric="accuracy", seed=i, task=classifier) for i in (0, 1)]
    (row,) = rows(compare(folders))
    assert row["at_step"] == "200.0% ± 0.0%"


def test_the_headline_of_the_task_is_compared_though_another_metric_was_written_first(
    make_run, step, classifier
):
    found = EvalRecord(step=1, metrics={"loss": 2.0, "accuracy": 0.5})
    folders = [
        str(make_run([step(1), found], steps=1, folder=f"r{s}", seed=s, task=classifier))
        for s in (0, 1)
    ]
    assert compare(folders).terms.metric.name == "accuracy"


def test_runs_are_compared_by_a_part_of_their_loss(make_run, step):
    folders = [
        str(make_run([step(1, loss_parts={"prior": 0.5 + s})], steps=1, folder=f"p{s}", seed=s))
        for s in (0, 1)
    ]
    found = compare(folders, metric="loss/prior")
    assert headline(found).startswith("quickstart in fp16: prior part of the training loss 1.0")


def test_an_unfinished_run_is_told(make, make_run, step):
    short = str(make_run([step(1), EvalRecord(step=1, metrics={"loss": 2.0})], steps=9, folder="s"))
    assert any("has done 1 of its 9 steps" in note for note in compare([make("a"), short]).notes)


def test_a_loss_that_is_not_finite_is_left_out_of_the_curve(make_run, step):
    losses = [2.0, math.nan, 1.5]
    evals = [EvalRecord(step=n, metrics={"loss": x}) for n, x in enumerate(losses, 1)]
    folders = [
        str(make_run([*(step(n) for n in (1, 2, 3)), *evals], steps=3, folder=f"r{s}", seed=s))
        for s in (0, 1)
    ]
    (group,) = compare(folders).groups
    assert [p.step for p in group.runs[0].points] == [1, 3]
    assert replace(group.at_step, half_width=None).mean == 1.5


def test_a_run_that_diverged_is_said_to_and_never_called_best(make, make_run, step):
    skipped = [step(n, applied=n <= 20) for n in range(1, 41)]
    evals = [EvalRecord(step=n, metrics={"loss": 0.5 if n < 40 else math.nan}) for n in (20, 40)]
    dead = str(make_run([*skipped, *evals], steps=40, folder="dead", clip_norm=9.0))
    found = compare([dead, make("alive", clip_norm=1.0)])
    assert headline(found).startswith("clip_norm=1.0 has the best evaluated loss at step 20")
    assert [(row["label"], row["best"]) for row in rows(found)] == [
        ("clip_norm=9.0 (diverged)", False),
        ("clip_norm=1.0", True),
    ]
    assert [group["diverged"] for group in found.to_json()["groups"]] == [1, 0]
    assert f"{dead} has diverged and is not ranked: its last evaluated loss is nan" in " ".join(
        found.notes
    )


def test_where_every_run_diverged_none_is_best(make_run, step):
    evals = [EvalRecord(step=n, metrics={"loss": 0.5 if n < 2 else math.nan}) for n in (1, 2)]
    records = [step(1), step(2), *evals]
    folders = [
        str(make_run(records, steps=2, folder=f"d{clip}", clip_norm=clip)) for clip in (1.0, 2.0)
    ]
    found = compare(folders)
    assert headline(found) == "Every group has runs that diverged, so there is no best one."
    assert not any(row["best"] for row in rows(found))
