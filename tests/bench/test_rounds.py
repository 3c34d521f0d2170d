"""Real workers in real processes; what they measure is as small as it gets."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from narrowcast.bench.contenders import PEERS, Contender, select_contenders
from narrowcast.bench.rounds import BenchRequest, Rounds


def measured(tiny, tmp_path, contenders, *, usable_bytes=2**40, **settings):
    lines = []
    rounds = Rounds(
        BenchRequest(recipe=tiny, steps=2, **settings),
        contenders,
        baseline=contenders[0],
        usable_bytes=usable_bytes,
        folder=tmp_path,
        log=lines.append,
    )
    return {result.contender.name: result for result in rounds.run()}, lines


def ours(*policies):
    return select_contenders(peers="none", policies=" | ".join(policies), device_type="cpu")


def children_of(pid):
    """Return the processes that `pid` started and that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # over since it was listed
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.usefixtures("forked_python")
def test_groups_share_the_baseline_and_failures_are_reported(tiny, tmp_path):
    contenders = (
        PEERS["torch-fp32"],
        *ours("fp32", "bf17"),
        Contender(name="absent", kind="torch", requires=("no_such_module",)),
    )
    results, lines = measured(tiny, tmp_path, contenders, repeats=2, together=2)
    assert len(results["narrowcast fp32"].rounds) == 2
    assert [group for group, _ in results["torch-fp32"].rounds] == [0, 0]
    seconds = results["narrowcast fp32"].rounds[0][1]["seconds"]
    assert len(seconds) == 2
    assert min(seconds) > 0
    wrong = results["narrowcast bf17"]
    assert "no preset 'bf17'" in wrong.failure
    assert any("Traceback" in line for line in wrong.log)
    assert results["absent"].failure == "no_such_module is not installed"
    assert any(line.startswith("torch-fp32: ready: start ") for line in lines)


@pytest.mark.usefixtures("forked_python")
def test_contenders_that_do_not_fit_meet_the_baseline_in_groups_of_their_own(tiny, tmp_path):
    contenders = (PEERS["torch-fp32"], *ours("fp32", "fp32, grads=fp32"))
    results, _ = measured(tiny, tmp_path, contenders, repeats=1, usable_bytes=0)
    assert [group for group, _ in results["torch-fp32"].rounds] == [0, 1]
    assert [group for group, _ in results["narrowcast fp32"].rounds] == [0]
    assert [group for group, _ in results["narrowcast fp32, grads=fp32"].rounds] == [1]


@pytest.mark.usefixtures("forked_python")
def test_a_contender_that_runs_out_of_memory_beside_others_is_tried_again(tiny, tmp_path):
    # An option that does not exist ends the worker with its name on the last line of the log.
    options = {"compute": "fp32", "compiled": False, "out of memory": True}
    large = Contender(name="large", kind="torch", options=options)
    results, lines = measured(tiny, tmp_path, (PEERS["torch-fp32"], large), repeats=1)
    assert "large: out of memory with others on the device, will be retried alone" in lines
    assert lines.count("large: starting") == 2
    assert "out of memory" in results["large"].failure
    assert len(results["torch-fp32"].rounds) == 1


def test_a_worker_without_an_answer_is_ended(tiny, tmp_path):
    others = children_of(os.getpid())  # what tests before this one have left behind
    results, _ = measured(tiny, tmp_path, (PEERS["torch-fp32"],), timeout_seconds=0.2)
    assert results["torch-fp32"].failure == "no response for 0.2 s, so it was stopped"
    assert set(children_of(os.getpid())) <= set(others)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
@pytest.mark.usefixtures("forked_python")
def test_workers_die_with_the_coordinator(tiny):
    command = [sys.executable, "-m", "narrowcast", "bench", "step", tiny, "--repeats", "100000"]
    with subprocess.Popen(
        [*command, "--peers", "torch-fp32", "--policies", "none"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        # Until the measuring has begun, so that the worker is past all imports.
        assert any(line.startswith("round 2") for line in process.stdout)
        workers = children_of(process.pid)
        assert workers
        process.send_signal(signal.SIGKILL)
        process.stdout.close()
        process.wait(timeout=60)
    deadline = time.monotonic() + 30
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))
