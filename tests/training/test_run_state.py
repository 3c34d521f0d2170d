"""Hooks, dict batches and ragged samples: a run that is resumed is the run that was not."""

import pytest
import torch

from narrowcast.errors import CheckpointError
from narrowcast.runs import StepRecord
from narrowcast.training.checkpoints.checkpoint import latest, load_checkpoint
from narrowcast.training.checkpoints.verify import first_difference
from narrowcast.training.task import Hook
from narrowcast.training.train_loop import train_loop


class Ragged:
    """Sample i is its number, i % 3 + 1 times."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.full((index % 3 + 1,), index / 30 - 1)


def collate(samples):
    return {
        "x": torch.stack([sample[0] for sample in samples])[:, None],
        "inner": [{"lengths": torch.tensor([len(sample) for sample in samples])}],
    }


def loss(model, batch):
    weight = batch["inner"][0]["lengths"].float()[:, None]
    return (weight * (model(batch["x"]) - batch["x"].sin()).square()).mean()


def counting():
    """A hook that keeps weights small and remembers how often, on the device."""
    held = {"applied": torch.zeros(()), "begun": 0}

    def begin(prepared):
        held["begun"] += 1

    def project(prepared, applied):
        weight = prepared.model.rise.weight
        weight.copy_(torch.where(applied, weight.clamp(-0.3, 0.3), weight))
        held["applied"] += applied

    def load(state):
        held.update(state)

    return held, Hook(
        name="small",
        before_first_step=begin,
        after_step=project,
        state_dict=lambda: dict(held),
        load_state_dict=load,
    )


@pytest.fixture
def run(ready):
    def go(folder=None, *, resume=None, steps=10, policy="fp16", workers=0, **settings):
        held, hook = counting()
        made = ready(policy, steps=10, checkpoint={"every": 4, "keep": 9}, **settings)
        made = made.but(
            train_data=Ragged(),
            collate=collate,
            loss=loss,
            items=lambda batch: int(batch["inner"][0]["lengths"].sum()),
            hooks=(hook,),
        )
        data = made.recipe.data.model_copy(update={"workers": workers})
        recipe = made.recipe.model_copy(update={"data": data})
        records = []
        for record in train_loop(made.prepared, made.task, recipe, folder=folder, resume=resume):
            records.append(record)
            if isinstance(record, StepRecord) and record.step == steps:
                break
        return [r for r in records if isinstance(r, StepRecord)], made.prepared, held

    return go


@pytest.mark.parametrize("policy", ["fp32", "fp16", "bf16, params=bf16, master=split"])
def test_a_run_with_hooks_and_dict_batches_is_resumed_bit_for_bit(run, tmp_path, policy):
    straight, prepared, held = run(policy=policy)
    run(tmp_path, steps=6, policy=policy)
    state = load_checkpoint(latest(tmp_path / "checkpoints"))
    assert state["step"] == 4
    rest, resumed, again = run(tmp_path, resume=state, policy=policy)
    assert [(r.loss, r.items) for r in rest] == [(r.loss, r.items) for r in straight[4:]]
    assert first_difference(prepared.state_dict(), resumed.state_dict()) is None
    assert first_difference(held, again) is None
    assert held["begun"] == 1


def test_a_hook_knows_of_the_steps_that_were_applied_and_projects_after_each(run):
    precision = {"policy": "fp16", "loss_scale": {"init_scale": 2.0**40, "max_scale": 2.0**40}}
    records, prepared, held = run(precision=precision)
    applied = sum(record.applied for record in records)
    assert 0 <= applied < 10
    assert held["applied"].item() == applied
    assert prepared.fp32_state_dict()["rise.weight"].abs().max() <= (0.3 if applied else 1.0)


def test_items_are_counted_and_workers_change_nothing(run):
    alone, _, _ = run()
    helped, _, _ = run(workers=2)
    assert [(r.loss, r.items) for r in alone] == [(r.loss, r.items) for r in helped]
    assert {type(r.items) for r in alone} == {int}
    assert all(8 <= r.items <= 24 for r in alone)


def test_a_checkpoint_of_other_hooks_is_refused(run, ready, tmp_path):
    run(tmp_path, steps=6)
    state = load_checkpoint(latest(tmp_path / "checkpoints"))
    state["samples"] = 100
    made = ready("fp16", steps=10)
    with pytest.raises(
        CheckpointError, match="state for the hooks small, and the task has the hooks none"
    ):
        train_loop(made.prepared, made.task, made.recipe, resume=state)
