"""A run of the engine whose task freezes rows, interrupted and taken up again."""

import pytest
import torch

from narrowcast.config.sections import DataSection, Recipe, Section
from narrowcast.hardware import Hardware
from narrowcast.runs import Metric, StepRecord, TaskInfo
from narrowcast.training.checkpoints.checkpoint import latest, load_checkpoint
from narrowcast.training.checkpoints.verify import first_difference
from narrowcast.training.phase_plans import plan_phases
from narrowcast.training.setup import prepare_recipe
from narrowcast.training.task import Task
from narrowcast.training.train_loop import train_loop
from narrowcast.workloads.sft.ica import Freeze

CHOSEN = {0: (1, 5), 2: (0, 15)}


class Sentences:
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(index))


def frozen_run(model, policy, folder=None, *, steps=6, resume=None):
    task = Task(
        model=model,
        train_data=Sentences(),
        collate=torch.stack,
        loss=lambda model, ids: model(input_ids=ids, labels=ids).loss,
        evaluate=lambda model: {"loss": 0.0},
        items=lambda ids: ids.numel(),
        gemm_rows=16,
        info=TaskInfo(metrics=(Metric(name="loss"),)),
        hooks=(Freeze(model, CHOSEN).hook(),),
    )
    recipe = Recipe(
        workload="sft",
        steps=6,
        batch_size=2,
        data=DataSection(),
        model=Section(),
        optimizer={"lr": 0.01, "weight_decay": 0.1},
        precision={"policy": policy},
        checkpoint={"every": 2, "keep": 9},
    )
    anywhere = Hardware(device="cpu", name="any CPU", memory_bytes=2**30)
    plan = plan_phases(recipe, model, hardware=anywhere, gemm_rows=16)[0]
    prepared = prepare_recipe(recipe, task, plan=plan)
    for record in train_loop(prepared, task, recipe, folder=folder, resume=resume):
        if isinstance(record, StepRecord) and record.step == steps:
            break
    return prepared


@pytest.mark.parametrize("policy", ["fp32", "bf16, params=bf16, master=split"])
def test_rows_stay_over_a_resume_and_the_rest_goes_on(make_model, tmp_path, policy):
    before = {name: weight.clone() for name, weight in make_model("llama").state_dict().items()}
    straight = frozen_run(make_model("llama"), policy)
    frozen_run(make_model("llama"), policy, tmp_path, steps=3)
    state = load_checkpoint(latest(tmp_path / "checkpoints"))
    assert state["step"] == 2
    # Other weights than the run began with: what is frozen comes from the checkpoint.
    with torch.no_grad():
        other = make_model("llama")
        for parameter in other.parameters():
            parameter += 1
    resumed = frozen_run(other, policy, tmp_path, resume=state)
    assert first_difference(straight.state_dict(), resumed.state_dict()) is None
    after = resumed.fp32_state_dict()
    for layer, rows in CHOSEN.items():
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        stayed = (after[name] == before[name]).all(1).nonzero()[:, 0].tolist()
        assert stayed == list(rows)
