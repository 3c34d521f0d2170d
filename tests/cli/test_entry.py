import re
import resource
import subprocess
import sys

import click
import pytest

from narrowcast import __version__
from narrowcast.cli import entry
from narrowcast.config import workload

VERBS = ("doctor", "recipes", "plan", "train", "resume", "report", "verify-resume", "schema")


def test_help_names_every_verb(narrowcast):
    ended = narrowcast("--help")
    assert ended.code == 0
    assert all(f"\n  {verb} " in ended.out for verb in VERBS)


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["recipes"], ["schema"]])
def test_what_needs_no_torch_does_not_import_it(words):
    script = (
        "import sys; from narrowcast.cli.entry import run_command; "
        f"assert run_command({words!r}) == 0; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0


def test_a_misspelt_setting_is_answered_without_torch():
    script = (
        "import sys; from narrowcast.cli.entry import run_command; "
        "assert run_command(['train', 'quickstart', 'stesp=3']) == 2; "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0
    assert "stesp=3: no such setting. Did you mean steps" in done.stderr


def test_help_takes_less_than_half_a_second():
    # Processor time: the clock on the wall would also count whatever else runs here.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "narrowcast", "--help"], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_the_version_is_the_package_s(narrowcast):
    assert narrowcast("--version").out == f"narrowcast, version {__version__}\n"


def test_a_misspelt_verb_gets_a_suggestion(narrowcast):
    ended = narrowcast("trian", "quickstart")
    assert ended.code == 2
    assert "train" in ended.err
    assert ended.out == ""


def test_a_setting_written_as_an_option_is_told_how_to_write_it(narrowcast):
    ended = narrowcast("train", "quickstart", "--precision.policy=fp16")
    assert ended.code == 2
    assert "Write precision.policy=VALUE" in ended.err


def test_a_missing_argument_is_bad_input(narrowcast):
    ended = narrowcast("train")
    assert ended.code == 2
    assert "RECIPE" in ended.err


def test_an_exception_that_is_a_bug_is_not_swallowed(monkeypatch):
    @click.command()
    def broken() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setitem(entry.narrowcast.commands, "broken", broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        entry.run_command(["broken"])


def test_ctrl_c_before_there_is_a_run_exits_130_without_a_traceback(monkeypatch, narrowcast):
    @click.command()
    def slow() -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(entry.narrowcast.commands, "slow", slow)
    ended = narrowcast("slow")
    assert ended.code == 130
    assert ended.err.strip() == "narrowcast: interrupted"


def test_a_reader_that_has_seen_enough_is_no_traceback(start):
    with start("schema") as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 1


def test_no_workload_can_take_the_name_of_a_verb():
    assert set(workload.VERBS) == set(entry.narrowcast.commands)


def test_help_lists_the_command_of_a_workload_without_importing_it():
    script = (
        "import sys; from narrowcast.cli.entry import run_command; "
        "assert run_command(['--help']) == 0; "
        "sys.exit(any('tutorial.command' in name or name == 'pydantic' for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0
    listed = (
        r"Commands of workloads:\n  decompose  +compares .*\n  forecast  +forecasts .*\n"
        r"  genomics  +pretrains .*\n"
        r"  ica  +finds, .*\n  lm-eval  +evaluates .*\n  tutorial  +reads "
    )
    assert re.search(listed, done.stdout)


def test_a_word_that_is_neither_a_verb_nor_a_workload_is_refused(narrowcast):
    assert narrowcast("knit").code == 2
