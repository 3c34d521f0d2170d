"""`eval.keep_best`: a run ends with the weights of its best evaluation, bit for bit."""

import json
import math
from itertools import count

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from narrowcast.errors import CheckpointError
from narrowcast.runs import EvalRecord, StepRecord
from narrowcast.training.checkpoints.checkpoint import latest, load_checkpoint
from narrowcast.training.checkpoints.verify import first_difference
from narrowcast.training.train_loop import train_loop

POLICIES = ["fp32", "fp16", "bf16-pure", "bf16, params=bf16, master=split", "aggressive",
            "fp16, params=fp16, master=kahan"]  # fmt: skip
# Evaluated every 2 steps of 10; the best is that of step 6.
ERRORS = {2: 0.9, 4: 0.8, 6: 0.5, 8: 0.6, 10: 0.7}


def judged(ready, policy="fp32", *, errors=ERRORS, begun=0, parts=None, **settings):
    """A run whose evaluations are given; what the model held at each is noted in `seen`."""
    steps, seen = count(begun + 2, 2), {}

    def evaluate(model):
        step = next(steps)
        state = model.state_dict()
        seen[step] = {name: each.detach().clone() for name, each in state.items()}
        return {"error": errors[step]}

    settings = {"steps": 10, "eval": {"every": 2, "keep_best": True}, **settings}
    settings = {"checkpoint": {"every": 3, "keep": 2}, **settings}
    made = ready(policy, parts={"evaluate": evaluate, **(parts or {})}, **settings)
    return made, seen


def course(made, **settings):
    """Train, and return the full weights and the average right after each evaluation."""
    found = {}
    for record in train_loop(made.prepared, made.task, made.recipe, **settings):
        if isinstance(record, EvalRecord):
            found[record.step] = full(made)
    return found


def full(made):
    average = made.prepared.ema_state_dict() if made.prepared.has_ema else {}
    weights = made.prepared.fp32_state_dict()
    return {"average": average, "weights": {name: w.clone() for name, w in weights.items()}}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_run_ends_with_the_weights_of_its_best_evaluation(ready, tmp_path, policy):
    made, seen = judged(ready, policy)
    found = course(made, folder=tmp_path)
    exported = load_file(tmp_path / "model.safetensors")
    expected = {n: w for n, w in found[6]["weights"].items() if n != "second.weight"}  # tied
    assert first_difference(exported, expected) is None
    assert first_difference(full(made), found[6]) is None
    # And the model computes with them. Of a full value half-way between two of fp16, as kahan may
    # have it, either is the nearest.
    if "kahan" not in policy:
        assert first_difference(dict(made.task.model.state_dict()), seen[6]) is None
    assert not torch.equal(found[6]["weights"]["rise.weight"], found[10]["weights"]["rise.weight"])
    said = json.loads((tmp_path / "finished.json").read_text())
    assert said["exported"] == {"step": 6, "error": 0.5}
    # The last checkpoint is of the last step all the same: more steps go on from there.
    state = load_checkpoint(latest(tmp_path / "checkpoints"))
    last = state["prepared"]["weights"]["rise.bias"]
    assert torch.equal(last, seen[10]["rise.bias"])


def test_averages_end_as_they_were_too(ready, tmp_path):
    made, _ = judged(ready, "bf16-pure", ema={"decay": 0.5})
    errors = {2: 0.9, 4: 0.8, 6: 0.5, 8: 0.6, 10: 0.7}
    values = iter(v for error in errors.values() for v in (error, error))
    made = made.but(evaluate=lambda model: {"error": next(values)})
    found = course(made, folder=tmp_path)
    assert first_difference(full(made), found[6]) is None
    assert first_difference(found[6]["average"], found[10]["average"]) is not None


def test_the_task_writes_its_results_with_them(ready, tmp_path):
    made, seen = judged(ready)

    def write(folder, prepared):
        torch.save(prepared.model.state_dict(), folder / "own.pt")

    course(made.but(write_results=write), folder=tmp_path)
    assert first_difference(dict(torch.load(tmp_path / "own.pt")), seen[6]) is None


def test_without_a_folder_the_model_has_them_in_the_end(ready):
    made, _ = judged(ready, "bf16-pure")
    found = course(made)
    assert first_difference(full(made), found[6]) is None


def test_weights_that_are_not_trained_are_not_kept_again(ready, tmp_path):
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(1, 256)
            self.base.requires_grad_(False)
            self.norm = nn.BatchNorm1d(256)
            self.fall = nn.Linear(256, 1)

        def forward(self, x):
            return self.fall(self.norm(self.base(x)))

    made, _ = judged(ready, parts={"model": Frozen()})
    found = course(made, folder=tmp_path)
    (kept,) = [load_file(path) for path in (tmp_path / "best").iterdir()]
    names = {name.removeprefix("weights/") for name in kept}
    assert names == {name for name in found[6]["weights"] if not name.startswith("base.")}
    assert first_difference(load_file(tmp_path / "model.safetensors"), found[6]["weights"]) is None


@pytest.mark.parametrize("at", [3, 6, 9])
@pytest.mark.parametrize("policy", ["fp32", "bf16, params=bf16, master=split"])
def test_a_resumed_run_ends_with_the_same_weights(ready, tmp_path, policy, at):
    keep = {"checkpoint": {"every": 3, "keep": 9}}
    straight, _ = judged(ready, policy, **keep)
    course(straight, folder=tmp_path)
    expected, final = load_file(tmp_path / "model.safetensors"), full(straight)
    state = load_checkpoint(tmp_path / f"checkpoints/step-{at:06d}")
    again, _ = judged(ready, policy, begun=at // 2 * 2, **keep)
    course(again, folder=tmp_path, resume=state)
    assert first_difference(load_file(tmp_path / "model.safetensors"), expected) is None
    assert first_difference(full(again), final) is None


def kept_steps(folder):
    return sorted(int(path.stem.removeprefix("step-")) for path in (folder / "best").iterdir())


def test_a_best_stays_as_long_as_a_checkpoint_counts_on_it_and_no_longer(ready, tmp_path):
    errors = {step: 1 / step for step in range(2, 42, 2)}  # each better than all before
    made, _ = judged(ready, errors=errors, steps=40, checkpoint={"every": 5, "keep": 2})
    found = []
    for record in train_loop(made.prepared, made.task, made.recipe, folder=tmp_path):
        if isinstance(record, StepRecord) and (tmp_path / "best").exists():
            bests = kept_steps(tmp_path)
            found.append(len(bests))
            for path in (tmp_path / "checkpoints").glob("step-*"):
                step = load_checkpoint(path)["best_weights"]["step"]
                assert step in bests
    assert max(found) <= 5  # that of now, and two for each checkpoint at most
    assert kept_steps(tmp_path)[-1] == 40


def test_a_best_of_a_course_that_was_left_is_not_taken_for_one(ready, tmp_path):
    """Killed after its best of step 6, and continued from step 5 with rarer evaluations."""
    errors = {step: 1 / step for step in range(2, 22, 2)}
    made, _ = judged(ready, errors=errors, checkpoint={"every": 5, "keep": 2})
    for record in train_loop(made.prepared, made.task, made.recipe, folder=tmp_path):
        if isinstance(record, StepRecord) and record.step == 7:
            break
    assert kept_steps(tmp_path) == [4, 6]
    state = load_checkpoint(latest(tmp_path / "checkpoints"))
    assert (state["step"], state["best_weights"]["step"]) == (5, 4)
    again, seen = judged(ready, errors={12: 0.01, 14: 1.0}, begun=10, steps=15,
                         eval={"every": 9, "keep_best": True},
                         checkpoint={"every": 5, "keep": 9})  # fmt: skip
    found = course(again, folder=tmp_path, resume=state)  # evaluated at 9 and 15
    assert kept_steps(tmp_path) == [4, 9]
    assert first_difference(full(again), found[9]) is None
    assert set(seen) == {12, 14}


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_best_that_is_gone_is_said_and_the_run_can_go_on_without(ready, tmp_path, damage):
    made, _ = judged(ready, checkpoint={"every": 3, "keep": 9})
    found = course(made, folder=tmp_path)
    file = tmp_path / "best/step-000006.safetensors"
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    state = load_checkpoint(tmp_path / "checkpoints/step-000009")
    again, _ = judged(ready, begun=8)
    with pytest.raises(CheckpointError, match=r"add eval\.keep_best=false to export"):
        train_loop(again.prepared, again.task, again.recipe, folder=tmp_path, resume=state)
    without, _ = judged(ready, begun=8, eval={"every": 2})
    course(without, folder=tmp_path, resume=state)
    expected = {n: w for n, w in found[10]["weights"].items() if n != "second.weight"}
    assert first_difference(load_file(tmp_path / "model.safetensors"), expected) is None


def test_a_run_that_kept_none_cannot_end_with_its_best(ready, tmp_path):
    made, _ = judged(ready, eval={"every": 2})
    course(made, folder=tmp_path)
    assert not (tmp_path / "best").exists()
    state = load_checkpoint(latest(tmp_path / "checkpoints"))
    again, _ = judged(ready, steps=12)
    with pytest.raises(CheckpointError, match="cannot be switched on"):
        train_loop(again.prepared, again.task, again.recipe, folder=tmp_path, resume=state)


def test_an_evaluation_that_is_no_number_is_no_best(ready, tmp_path):
    made, _ = judged(ready, errors={2: math.nan, 4: 0.8, 6: -math.inf, 8: 0.9, 10: 1.0})
    found = course(made, folder=tmp_path)
    assert first_difference(full(made), found[4]) is None


def test_equal_weights_give_equal_files(ready, tmp_path):
    for name in ("one", "other"):
        course(judged(ready)[0], folder=tmp_path / name)
    one, other = ((tmp_path / n / "best/step-000006.safetensors") for n in ("one", "other"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["bf16", "bf16, params=bf16, master=split", "fp8-delayed"])
def test_the_run_ends_with_its_best_weights_on_the_gpu(ready, tmp_path, policy):
    made, _ = judged(ready, policy, device="cuda")
    found = course(made, folder=tmp_path)
    assert first_difference(full(made), found[6]) is None
