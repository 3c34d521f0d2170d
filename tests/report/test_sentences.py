from narrowcast.report.summary import sentences
from narrowcast.runs import FindingRecord, PrecisionRecord


def finding(step=9, **changes):
    values = {
        "since": 4,
        "module": "blocks.7.mlp",
        "role": "grad_output",
        "what": "overflow",
        "why": "amax 7.1e4 is beyond 65,504",
        "action": "",
        "advice": "try bf16",
    }
    return FindingRecord(step=step, **{**values, **changes})


def change(step, module, before="e4m3", after="bf16"):
    return PrecisionRecord(step=step, module=module, before=before, after=after, reason="")


def told(data):
    return [text for _, text in sentences(data)]


def test_a_finding_is_a_sentence_with_its_place_its_beginning_and_what_to_try(run_data_of, step):
    assert told(run_data_of([step(1), finding()], steps=1)) == [
        "Overflow in `blocks.7.mlp` (grad_output) since step 4: amax 7.1e4 is beyond 65,504. "
        "Try bf16."
    ]


def test_a_sentence_ends_with_one_point_and_keeps_its_capitals(run_data_of, step):
    found = finding(what="NaN", why="a NaN.", advice="look at the data.", module="", role="")
    assert told(run_data_of([step(1), found], steps=1)) == [
        "NaN since step 4: a NaN. Look at the data."
    ]


def test_findings_that_say_the_same_are_told_once_from_their_first_beginning(run_data_of, step):
    data = run_data_of([step(1), finding(9), finding(20, since=15)], steps=1)
    (sentence,) = told(data)
    assert "since step 4" in sentence


def test_a_verdict_s_own_naming_of_its_place_is_not_told_twice(run_data_of, step):
    why = "blocks.7.mlp grad_output overflowed fp16 (amax 7.1e4)"
    (sentence,) = told(run_data_of([step(9), finding(9, since=9, why=why)], steps=1))
    start = "Overflow in `blocks.7.mlp` (grad_output) at step 9: overflowed fp16 (amax 7.1e4)."
    assert sentence.startswith(start)


def test_what_something_was_done_about_is_told_first_and_a_rehearsal_last(run_data_of, step):
    found = [
        finding(1, what="fault injected", action="the step runs in eager mode"),
        finding(2, what="magnitudes grow", role="input"),
        finding(2, what="magnitudes grow", role="output"),
        finding(3, what="overflow", action="the step is skipped"),
        finding(4, what="overflow", action="the step is skipped", why="again"),
    ]
    first, second, third, more = told(run_data_of([step(1), *found], steps=1))
    assert first.startswith("Overflow in `blocks.7.mlp` (grad_output)")
    assert second.startswith("Magnitudes grow in `blocks.7.mlp` (input)")
    assert third.startswith("Fault injected")
    assert more == "There are 2 more findings below."


def test_many_findings_are_counted(run_data_of, step):
    data = run_data_of([step(1), *(finding(module=f"m{i}") for i in range(5))], steps=1)
    assert told(data)[3] == "There are 2 more findings below."


def test_skips_are_told_with_their_share(run_data_of, step):
    records = [step(n, applied=n not in (2, 3)) for n in range(1, 11)]
    assert told(run_data_of(records, steps=10)) == [
        "2 of 10 steps were skipped (20 %), the last at step 3."
    ]
    assert told(run_data_of([step(1), step(2, applied=False)], steps=2)) == [
        "One step of 2 was skipped, step 2."
    ]
    assert sentences(run_data_of([step(1, applied=False)], steps=1)) == [
        ("bad", "Every step was skipped, so the weights never changed.")
    ]


def test_changes_of_modules_say_whether_they_lasted(run_data_of, step):
    lasting = run_data_of([step(1), change(1, "a")], steps=1)
    assert told(lasting) == ["`a` went from e4m3 to bf16 at step 1, and stayed so."]
    overruled = run_data_of([step(1), change(1, "a"), change(2, "", "fp16", "bf16")], steps=1)
    assert told(overruled)[1] == "`a` went from e4m3 to bf16 at step 1, but not until the end."
    returned = run_data_of([step(1), change(1, "a"), change(2, "a", "bf16", "e4m3")], steps=1)
    assert told(returned) == [
        "`a` changed its format during the run, back to the original format at the end."
    ]
    many = run_data_of([step(1), *(change(1, f"m{i}") for i in range(5))], steps=1)
    assert told(many) == [
        "`m0`, `m1` and 3 other modules changed their formats during the run, 5 of them at the end."
    ]


def test_phases_are_told_in_their_order(run_data_of, step):
    phases = [change(100, "", "fp32", "fp8-tensor"), change(900, "", "fp8-tensor", "bf16")]
    assert told(run_data_of([step(1), *phases], steps=1)) == [
        "The policy changed during the run, at steps 100, 900: fp32 → fp8-tensor → bf16."
    ]


def test_a_calm_run_says_so(run_data_of, step):
    assert sentences(run_data_of([step(1)], steps=1)) == [
        ("good", "No steps were skipped and there are no findings.")
    ]


def test_a_run_that_has_not_begun_has_nothing_to_tell(run_data_of):
    assert sentences(run_data_of([], steps=1)) == []
