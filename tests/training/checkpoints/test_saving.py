"""Checkpoints written by a thread: those that training would have waited for, and as safe."""

import pytest
import torch

from narrowcast.errors import CheckpointError
from narrowcast.hardware.transfers import HostCopies
from narrowcast.runs.records import CheckpointRecord, StepRecord
from narrowcast.training.checkpoints.checkpoint import checkpoints, load_checkpoint
from narrowcast.training.checkpoints.tree import flatten
from narrowcast.training.train_loop import train_loop


def run(ready, folder, *, background, resume=None, until=None):
    checkpoint = {"every": 3, "keep": 9, "background": background}
    made = ready("bf16", steps=9, checkpoint=checkpoint)
    records = []
    for record in train_loop(made.prepared, made.task, made.recipe, folder=folder, resume=resume):
        records.append(record)
        if until is not None and getattr(record, "step", 0) == until:
            break
    return made, records


def tensors(path):
    return flatten(load_checkpoint(path))[1]


def test_a_thread_writes_what_training_would_have_waited_for(ready, tmp_path):
    waited, _ = run(ready, tmp_path / "waited", background=False)
    behind, records = run(ready, tmp_path / "behind", background=True)
    told = [record for record in records if isinstance(record, CheckpointRecord)]
    assert [record.step for record in told] == [3, 6, 9]
    assert all(0 < record.seconds_blocked < record.seconds_total for record in told)
    for one, other in zip(
        checkpoints(tmp_path / "waited" / "checkpoints"),
        checkpoints(tmp_path / "behind" / "checkpoints"),
        strict=True,
    ):
        assert one.name == other.name
        mine, its = tensors(one), tensors(other)
        assert mine.keys() == its.keys()
        # Weights are changed in place: a checkpoint that was not copied would hold later ones.
        assert all(torch.equal(mine[name], its[name]) for name in mine)
    for one, other in zip(
        waited.task.model.parameters(), behind.task.model.parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_what_a_thread_wrote_is_resumed_from(ready, tmp_path):
    _, whole = run(ready, tmp_path / "whole", background=True)
    _, before = run(ready, tmp_path / "cut", background=True, until=7)
    state = load_checkpoint(tmp_path / "cut" / "checkpoints" / "step-000006")
    _, after = run(ready, tmp_path / "cut", background=True, resume=state)
    losses = {r.step: r.loss for r in (*before, *after) if isinstance(r, StepRecord)}
    assert list(losses.values()) == [r.loss for r in whole if isinstance(r, StepRecord)]


def test_a_checkpoint_that_cannot_be_written_ends_the_run(ready, tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match="checkpoints"):
        run(ready, tmp_path, background=True)


def test_what_is_copied_shares_no_memory_with_the_state():
    weight = torch.zeros(4)
    state = {"weight": weight, "part": weight[1:3]}
    copies = HostCopies(flatten(state)[1])
    weight.fill_(1)
    kept = copies.wait()
    assert list(kept) == ["weight", "part"]
    assert all(not each.any() for each in kept.values())
