"""Runs on several ranks against the same recipe in one process."""

import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from tests.fork_server import ForkedPopen

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.runner.run import train
from narrowcast.runs import CheckpointRecord, EvalRecord, FindingRecord, RunFolder, StepRecord
from narrowcast.training.parallel import find_place

pytest.importorskip("torch.distributed")
BF16 = {"rel_tol": 2.0**-7, "rel_tol_norm": 2.0**-5}
"""A rounding of bf16 that goes the other way moves later steps."""
FP32 = "precision.policy=fp32"
TIMEOUT = 60


def records_of(folder):
    with RunFolder.open(folder) as run:
        return run.records()


def steps_of(folder):
    return [record for record in records_of(folder) if isinstance(record, StepRecord)]


def checkpointed(folder, step):
    return (folder / "checkpoints" / f"step-{step:06d}").is_dir()


class Launched:
    """Processes that got their places from a launcher's variables, as torchrun sets them."""

    def __init__(self, words, ranks, folder, port=None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = port or free.getsockname()[1]
        shared = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self.processes = [
            ForkedPopen(
                [sys.executable, "-m", "narrowcast", *map(str, words)],
                env={
                    **os.environ,
                    **{k: str(v) for k, v in {**shared, "RANK": r, "LOCAL_RANK": r}.items()},
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=folder,
            )
            for r in range(ranks)
        ]

    def ended(self):
        """Return the exit code and the error text of each rank."""
        ends = [process.communicate(timeout=TIMEOUT) for process in self.processes]
        return [(p.returncode, err) for p, (_, err) in zip(self.processes, ends, strict=True)]


@pytest.fixture
def launch(tmp_path):
    started = []

    def start(*words, ranks=2, port=None):
        started.append(Launched(words, ranks, tmp_path, port))
        return started[-1]

    yield start
    for process in [p for each in started for p in each.processes]:
        process.kill()
        process.communicate()


def wait_for(happened, launched):
    deadline = time.monotonic() + TIMEOUT
    while not happened():
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in launched.processes)
        time.sleep(0.02)


def agree(ours, theirs, *, rel_tol=2e-5, rel_tol_norm=2e-4):
    """Return whether steps are the same but for the order in which sums are made."""
    assert len(ours) == len(theirs)
    return all(
        (a.step, a.applied, a.lr, a.items) == (b.step, b.applied, b.lr, b.items)
        and math.isclose(a.loss, b.loss, rel_tol=rel_tol)
        and math.isclose(a.grad_norm, b.grad_norm, rel_tol=rel_tol_norm)
        for a, b in zip(ours, theirs, strict=True)
    )


def test_three_ranks_of_uneven_shares_train_as_one_process_does(launch, narrowcast, tiny, tmp_path):
    words = ["train", tiny, FP32, "steps=6", "batch_size=5", "gradient_accumulation_steps=2"]
    words += ["eval.every=3", "checkpoint.every=3", "health.every=2", "eval.keep_best=true"]
    assert [code for code, _ in launch(*words, "--out", "three", ranks=3).ended()] == [0, 0, 0]
    assert narrowcast(*words, "--out", tmp_path / "one").code == 0
    three, one = records_of(tmp_path / "three"), records_of(tmp_path / "one")
    assert [type(record) for record in three] == [type(record) for record in one]
    assert agree(steps_of(tmp_path / "three"), steps_of(tmp_path / "one"))
    losses = [[r.metrics["loss"] for r in rs if isinstance(r, EvalRecord)] for rs in (three, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    ours, theirs = (load_file(tmp_path / n / "model.safetensors") for n in ("three", "one"))
    assert all((ours[name] - theirs[name]).abs().max() < 1e-4 for name in theirs)


@pytest.mark.parametrize("policy", ["fp32", "bf16, params=bf16, master=split"])
def test_a_run_on_two_shards_is_resumed_on_one_rank(launch, narrowcast, tiny, tmp_path, policy):
    words = ["train", tiny, f"precision.policy={policy}", "steps=6", "batch_size=5"]
    words += ["checkpoint.every=3", "checkpoint.keep=9", "eval.every=3", "health.every=3"]
    words.append(f"checkpoint.background={str(policy != 'fp32').lower()}")
    ended = launch(*words, "parallel.strategy=fsdp", "--out", "shards").ended()
    assert [code for code, _ in ended] == [0, 0], ended
    shards, resumed = tmp_path / "shards", tmp_path / "resumed"
    assert narrowcast(*words, "--out", tmp_path / "one").code == 0
    shutil.copytree(shards, resumed)
    for path in ("checkpoints/step-000006", "finished.json", "model.safetensors", "report.html"):
        shutil.rmtree(resumed / path) if "step" in path else (resumed / path).unlink()
    assert narrowcast("resume", resumed).code == 0
    near = {"rel_tol": 2e-5, "rel_tol_norm": 2e-4} if policy == "fp32" else BF16
    for other in (tmp_path / "one", resumed):
        assert agree(steps_of(shards), steps_of(other), **near)
    ours, theirs = (load_file(path / "model.safetensors") for path in (shards, resumed))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=4e-3) for name in ours)


def test_two_ranks_that_are_stopped_are_resumed_on_one(launch, narrowcast, tiny, tmp_path):
    words = [
        "train",
        tiny,
        FP32,
        "steps=60",
        "batch_size=4",
        "checkpoint.every=2",
        "data.workers=1",
    ]
    assert narrowcast(*words, "--out", tmp_path / "straight").code == 0
    run = launch(*words, "--out", "stopped")
    records = tmp_path / "stopped" / "records.jsonl"
    wait_for(lambda: records.exists() and steps_of(tmp_path / "stopped"), run)
    run.processes[1].send_signal(signal.SIGTERM)  # one is enough
    (code, said), (other, silent) = run.ended()
    assert (code, other) == (130, 130)
    assert "Resume with: narrowcast resume stopped" in said
    assert silent == ""
    saved = [r.step for r in records_of(tmp_path / "stopped") if isinstance(r, CheckpointRecord)]
    assert saved[-1] == steps_of(tmp_path / "stopped")[-1].step < 40
    again = narrowcast("resume", tmp_path / "stopped")
    assert again.code == 0
    assert "continues on 1 rank instead of 2" in again.out
    assert agree(steps_of(tmp_path / "stopped"), steps_of(tmp_path / "straight"))


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_dies_is_named_with_the_command_to_resume(launch, tiny, tmp_path, killed):
    run = launch("train", tiny, FP32, "steps=100000", "checkpoint.every=2", "--out", "run")
    wait_for(lambda: checkpointed(tmp_path / "run", 2), run)
    run.processes[killed].kill()
    ends = run.ended()
    assert ends[killed][0] == -signal.SIGKILL
    code, said = ends[1 - killed]
    assert code == 5
    assert ("Rank 1 died" if killed else "rank 0, died") in said
    assert "with `narrowcast resume run`" in said


def test_an_error_of_all_ranks_is_printed_once(launch, tiny):
    (code, said), (other, silent) = launch("train", tiny, "batch_size=1", "--out", "run").ended()
    assert (code, other) == (2, 2)
    assert "narrowcast:" not in silent
    assert "batch_size must be at least the number of ranks, 2" in said


def test_a_fault_on_every_rank_is_one_skipped_step_and_one_finding(launch, tiny, tmp_path):
    fault = "fault_injection=[{step: 2, module: blocks.0.mlp.up, role: output, value: inf}]"
    words = ["train", tiny, FP32, "steps=3", fault, "--out", "run"]
    assert [code for code, _ in launch(*words).ended()] == [0, 0]
    assert [step.applied for step in steps_of(tmp_path / "run")] == [True, False, True]
    found = [r for r in records_of(tmp_path / "run") if isinstance(r, FindingRecord)]
    assert [(f.what, f.rank) for f in found if f.what == "fault injected"] == [
        ("fault injected", None)
    ]
    assert [f.module for f in found if f.what != "fault injected"] == ["blocks.0.mlp.up"]


def test_ranks_that_torchrun_restarts_resume_by_themselves(launch, tiny, tmp_path, monkeypatch):
    words = ["train", tiny, FP32, "steps=400", "checkpoint.every=2", "--out", "run"]
    run = launch(*words)
    wait_for(lambda: checkpointed(tmp_path / "run", 2), run)
    for process in run.processes:
        process.kill()
    run.ended()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    run = launch(*words)
    wait_for(lambda: steps_of(tmp_path / "run")[-1].step > 8, run)
    run.processes[0].send_signal(signal.SIGINT)
    assert [code for code, _ in run.ended()] == [130, 130]
    steps = [step.step for step in steps_of(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))


def test_narrowcast_starts_the_ranks_and_passes_signals_on(start, tiny, tmp_path):
    words = [FP32, "steps=100000", "checkpoint.every=5", "parallel.ranks=2"]
    with start("train", tiny, *words, cwd=tmp_path) as process:
        folder = tmp_path / "runs" / "tiny"
        deadline = time.monotonic() + TIMEOUT
        while not checkpointed(folder, 5):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.terminate()
        _, said = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    assert "Resume with: narrowcast resume runs/tiny" in said
    assert steps_of(folder)[-1].step in [
        record.step for record in records_of(folder) if isinstance(record, CheckpointRecord)
    ]


def test_ranks_whose_launcher_dies_end_with_a_checkpoint(launch, tiny, tmp_path, monkeypatch):
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # as torchrun's, which has it
    words = [FP32, "steps=100000", "parallel.strategy=fsdp", "--out", "run"]
    run, folder = launch("train", tiny, *words, port=store.port), tmp_path / "run"
    wait_for(lambda: (folder / "records.jsonl").exists() and steps_of(folder), run)
    del store
    (code, said), (other, _) = run.ended()
    assert (code, other) == (130, 130)
    assert "Resume with: narrowcast resume run" in said
    assert checkpointed(folder, steps_of(folder)[-1].step)


def test_ranks_without_a_launcher_say_how_to_start_them(tiny):
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 2"):
        train(tiny, ["parallel.ranks=2"])


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[03-05,9],cpu1", "gpu03"), ("node7", "node7"), ("a-b2,c[1-2]", "a-b2")],
)
def test_slurm_places_are_found_and_rank_0_is_on_the_first_node(nodes, first):
    variables = {
        "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": nodes,
    }  # fmt: skip
    place = find_place(variables)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (3, 4, 1, 2)
    assert (place.address, place.port) == (first, 15_077)
    assert find_place({**variables, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None


def test_a_broken_place_is_reported():
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        find_place({"RANK": "2", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="WORLD_SIZE must be a whole number, got 'two'"):
        find_place({"RANK": "0", "WORLD_SIZE": "two"})
    assert find_place({"WORLD_SIZE": "2"}) is None


@pytest.mark.parametrize(
    ("recipe", "word", "wrong"),
    [
        ("hybrid/quickstart", "strategy.preset=aggressive", "Jumps use one rank"),
        ("quickstart", "parallel.strategy=hsdp", "parallel.shard must divide the 2 ranks"),
        ("tutorial", "precision.adapt.enabled=true", "precision.adapt.enabled=true uses one rank"),
        ("decompose/tms_5-2", "steps=1", "decompose weighs the micro-batches of one process"),
    ],
)
def test_what_several_ranks_cannot_train_raises_before_training(recipe, word, wrong):
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group(
        "fake", store=torch.distributed.HashStore(), rank=0, world_size=2
    )
    try:
        with pytest.raises((ConfigError, UnsupportedError), match=wrong):
            train(recipe, [word, "device=cpu"])
    finally:
        torch.distributed.destroy_process_group()
