import json

import pytest
import torch

from narrowcast.cli.entry import run_command
from narrowcast.runs import EvalRecord, RunFolder, StepRecord
from narrowcast.workloads import report_sections
from narrowcast.workloads.tutorial.roman import SIGNS, roman
from narrowcast.workloads.tutorial.task import HELD_OUT, TRAINED, collate


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of the shipped recipe, from the command line."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("runs") / "tutorial"
    assert run_command(["train", "tutorial", "device=cpu", "--out", str(out), "--quiet"]) == 0
    torch.set_num_threads(before)
    return out


def test_it_learns_to_read_numerals_that_it_has_not_seen(trained):
    with RunFolder.open(trained) as run:
        judged = [r for r in run.records() if isinstance(r, EvalRecord)]
        assert run.task_info().headline.better == "higher"
    assert judged[-1].metrics["accuracy"] > 0.95


def test_its_steps_tell_the_parts_of_the_loss(trained):
    with RunFolder.open(trained) as run:
        steps = [r for r in run.records() if isinstance(r, StepRecord)]
    for step in steps:
        assert list(step.loss_parts) == ["digit", "size"]
        # The sum is made in fp32, of numbers that are told in fp32.
        total = step.loss_parts["digit"] + 0.1 * step.loss_parts["size"]
        assert step.loss == pytest.approx(total, rel=2**-22)
        assert step.items == 64


def test_its_results_are_drawn_in_the_report(trained):
    misread = json.loads((trained / "misread.json").read_text())
    with RunFolder.open(trained) as run:
        (section,) = report_sections(run.read_json("resolved.json"), trained, run.records())
    assert section.title == "Misread numerals"
    assert section.html == f"<p>{', '.join(misread) or 'none'}</p>"


def test_a_run_of_a_workload_that_is_not_here_adds_nothing_to_its_report(tmp_path):
    assert report_sections({"workload": {"value": "knitting"}}, tmp_path, []) == ()
    assert report_sections({}, tmp_path, []) == ()


def test_no_number_is_both_trained_and_held_out():
    assert sorted([*TRAINED, *HELD_OUT]) == list(range(1, 4000))


def test_a_numeral_adds_up_to_its_number():
    for number in range(1, 4000):
        rest, value = roman(number), 0
        while rest:
            sign = rest[:2] if rest[:2] in SIGNS else rest[0]
            rest, value = rest[len(sign) :], value + SIGNS[sign]
        assert value == number


def test_numerals_of_any_length_end_in_one_column():
    batch = collate([1, 3888, 5])
    assert batch["letters"].shape == (3, 15)
    assert batch["letters"][:, -1].tolist() == [1, 1, 2]
    assert (batch["letters"] > 0).sum(1).tolist() == [1, 15, 1]


def test_its_command_writes_a_numeral(capsys):
    assert run_command(["tutorial", "1994"]) == 0
    assert capsys.readouterr().out == "MCMXCIV\n"
