import functools
import math
import re
import signal
import threading
from dataclasses import dataclass

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from narrowcast.config.sections import DataSection, FaultSection
from narrowcast.errors import CheckpointError, ConfigError, DivergedError, Interrupted
from narrowcast.runs import (
    CheckpointRecord,
    EvalRecord,
    FindingRecord,
    HealthRecord,
    StepRecord,
    same_trajectory,
)
from narrowcast.training.checkpoints.checkpoint import checkpoints, latest, load_checkpoint
from narrowcast.training.checkpoints.verify import first_difference
from narrowcast.training.data import Order
from narrowcast.training.optimizers import build_optimizer
from narrowcast.training.setup import lr_factor
from narrowcast.training.train_loop import train_loop


def run(made, **settings):
    return list(train_loop(made.prepared, made.task, made.recipe, **settings))


def steps_of(records):
    return [r for r in records if isinstance(r, StepRecord)]


def plain_torch(task, recipe):
    """The same training in plain torch; returns the learning rates and losses of its steps."""
    model = task.model
    optimizer = build_optimizer(recipe.optimizer, model, device=torch.device("cpu"))
    scheduler = LambdaLR(optimizer, lr_factor(recipe.lr_schedule, recipe.steps))
    order = Order(samples=len(task.train_data), batch_size=recipe.batch_size, seed=recipe.seed)
    batches = order.starting_at(0)
    torch.manual_seed(recipe.seed)
    rates, losses = [], []
    for _ in range(recipe.steps):
        rates.append(optimizer.param_groups[0]["lr"])
        total = 0.0
        for _ in range(recipe.gradient_accumulation_steps):
            loss = task.loss(model, task.train_data.__getitems__(next(batches)))
            (loss / recipe.gradient_accumulation_steps).backward()
            total += loss.item() / recipe.gradient_accumulation_steps
        losses.append(total)
        if recipe.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return rates, losses


@pytest.mark.parametrize("gradient_accumulation_steps", [1, 3])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_an_fp32_run_is_the_plain_torch_loop_bit_for_bit(
    ready, gradient_accumulation_steps, clip_norm
):
    made = ready(
        "fp32",
        steps=15,
        gradient_accumulation_steps=gradient_accumulation_steps,
        clip_norm=clip_norm,
    )
    records = steps_of(run(made))
    reference = ready(
        "fp32",
        steps=15,
        gradient_accumulation_steps=gradient_accumulation_steps,
        clip_norm=clip_norm,
    ).task
    rates, losses = plain_torch(reference, made.recipe)
    assert first_difference(made.task.model.state_dict(), reference.model.state_dict()) is None
    assert [r.lr for r in records] == rates
    # A loss is a sum of three fp32 numbers here, and of three float64 there.
    assert [r.loss for r in records] == pytest.approx(losses, rel=3 * 2**-23)


def test_every_attempt_is_recorded_with_its_numbers(ready):
    records = steps_of(run(ready("bf16", steps=6, gradient_accumulation_steps=2)))
    assert [r.step for r in records] == [1, 2, 3, 4, 5, 6]
    for r in records:
        assert r.applied
        assert r.skip_reason == ""
        assert r.items == 16
        assert r.seconds > 0
        assert r.peak_bytes > 2**20
        assert 0 < r.grad_norm < math.inf


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_training_learns(ready, policy):
    records = run(ready(policy, steps=150))
    first, last = steps_of(records)[0], records[-1]
    assert isinstance(last, EvalRecord)
    # The mean square of a sine is 1/2, the error of knowing nothing.
    assert first.loss > 0.5
    assert last.metrics["error"] < 0.1


def test_an_overflow_is_recorded_as_skipped_and_the_schedule_waits(ready):
    """A scale of 2**40 overflows fp16 until it has been halved often enough."""
    settings = {"loss_scale": {"init_scale": 2.0**40, "max_scale": 2.0**40}, "policy": "fp16"}
    made = ready(steps=60, precision=settings)
    records = steps_of(run(made))
    skipped = [r for r in records if not r.applied]
    applied = [r for r in records if r.applied]
    assert len(records) == 60
    # A step that was replayed names the first bad tensor, the others the nearest module.
    why = re.compile(r"^not finite: \w+ \w+, micro-batch|weights are inf or NaN, nearest the loss")
    assert all(why.search(r.skip_reason) for r in skipped)
    assert all(r.skip_reason == "" for r in applied)
    # Two in the scale for each skip, and as many different rates as updates.
    scales = [r.loss_scale for r in records]
    assert scales == [2.0 ** (40 - sum(not r.applied for r in records[:k])) for k in range(60)]
    factor = lr_factor(made.recipe.lr_schedule, 60)
    assert [r.lr for r in applied] == [0.01 * factor(k) for k in range(len(applied))]


def test_divergence_ends_the_run_and_keeps_the_last_good_checkpoint(ready, tmp_path):
    made = ready(
        steps=50,
        checkpoint={"every": 2},
        precision={"policy": "fp32", "loss_scale": {"max_skipped_steps": 4}},
    )
    good = made.task.loss
    losses = iter(range(1, 1000))

    def poisoned(model, batch):
        return good(model, batch) * (math.nan if next(losses) > 6 else 1.0)

    made = made.but(loss=poisoned)
    records = []
    with pytest.raises(DivergedError, match=r"4 steps in a row.*In step 7 the loss became NaN"):
        records.extend(train_into(records, made, tmp_path))
    assert [r.step for r in steps_of(records) if r.applied] == [1, 2, 3, 4, 5, 6]
    assert any(isinstance(r, FindingRecord) for r in records)
    newest = latest(tmp_path / "checkpoints")
    assert newest is not None
    for tensor in load_checkpoint(newest)["prepared"]["weights"].values():
        assert tensor.isfinite().all()


def train_into(records, made, folder):
    """Train, and keep what was yielded before an error."""
    for record in train_loop(made.prepared, made.task, made.recipe, folder=folder):
        records.append(record)
    return []


def poisoned(task, bad, *, gradient_accumulation_steps=2):
    """Let the loss of the first micro-batch of some steps go through an infinity, ever again.

    By the batch, not by a count: a replay is to meet the same.
    """
    order = Order(samples=len(task.train_data), batch_size=8, seed=0)
    data = task.train_data
    first = [
        data.__getitems__(order.indices((step - 1) * gradient_accumulation_steps))[0]
        for step in bad
    ]
    good = task.loss

    def loss(model, batch):
        hit = any(torch.equal(batch[0], each) for each in first)
        return good(model, batch) * (math.inf if hit else 1.0)

    return {"loss": loss}


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "fp8-delayed"])
def test_a_run_with_verdicts_is_the_run_without_bit_for_bit(ready, policy):
    """Dropout, running means, scales and histories: a replay leaves no trace in any of them."""
    ends, records = [], []
    for verdicts in (False, True):
        # A scale at which no step overflows by itself.
        precision = {"policy": policy, "loss_scale": {"init_scale": 1024.0}}
        health = {"diagnose": verdicts}
        made = ready(steps=12, gradient_accumulation_steps=2, health=health, precision=precision)
        made = made.but(**poisoned(made.task, [1, 2, 7]))
        records.append(steps_of(run(made)))
        ends.append((made.prepared.state_dict(), torch.get_rng_state()))
    assert first_difference(*ends) is None
    without, with_verdicts = records
    assert [r.applied for r in without] == [step not in (1, 2, 7) for step in range(1, 13)]
    for a, b in zip(without, with_verdicts, strict=True):
        assert (a.loss, a.grad_norm, a.loss_scale) == pytest.approx(
            (b.loss, b.grad_norm, b.loss_scale), rel=0, abs=0, nan_ok=True
        )
    assert "not finite: the loss, micro-batch 1 of 2" in with_verdicts[0].skip_reason
    assert "nearest the loss" in with_verdicts[1].skip_reason  # the second of a row is not replayed
    assert "not finite: the loss, micro-batch 1 of 2" in with_verdicts[6].skip_reason


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclass(frozen=True)
class BadSample:
    """Samples of which one is not a number."""

    good: object
    number: int

    def __len__(self):
        return len(self.good)

    def __getitems__(self, indices):
        x, y = self.good.__getitems__(indices)
        x[[i for i, number in enumerate(indices) if number == self.number]] = math.nan
        return x, y


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp8-tensor"])
def test_a_bad_sample_is_named_in_every_way_to_take_a_step(ready, policy, device):
    """On a GPU the steps are captured by then, and the next is under way when this one is read."""
    precision = {"policy": policy, "loss_scale": {"init_scale": 1024.0}}
    made = ready(steps=20, precision=precision, device=device)
    order = Order(samples=100, batch_size=8, seed=0)
    made = made.but(train_data=BadSample(made.task.train_data, order.indices(14)[5]))
    records = run(made)
    skipped = [r for r in steps_of(records) if not r.applied]
    assert skipped[0].skip_reason.startswith("not finite: the batch, micro-batch 1 of 1")
    first = next(i for i in range(20) if made.task.train_data.number in order.indices(i))
    assert skipped[0].step == first + 1
    index = order.indices(first).index(made.task.train_data.number)
    told = next(r for r in records if isinstance(r, FindingRecord) and r.role == "batch")
    assert told.why.startswith(
        f"the batch itself holds a NaN at batch[0][{index}, 0], 1 of 8 values (micro-batch 1 of 1)"
    )
    assert told.advice.startswith(f"look at batch[0][{index}, 0]")


FAULTS = [
    {"step": 3, "module": "first", "role": "grad_output", "value": "nan", "micro_batch": 2},
    {"step": 6, "module": "rise", "role": "weight", "value": "inf"},
]


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp8-delayed"])
def test_a_run_with_verdicts_on_the_gpu_is_the_run_without_bit_for_bit(ready, policy):
    ends = []
    for verdicts in (False, True):
        settings = {
            "precision": {"policy": policy, "loss_scale": {"init_scale": 1024.0}},
            "health": {"diagnose": verdicts},
            "fault_injection": tuple(FaultSection(**fault) for fault in FAULTS),
            "deterministic": True,
        }
        made = ready(steps=12, gradient_accumulation_steps=2, device="cuda", **settings)
        records = steps_of(run(made))
        assert [r.step for r in records if not r.applied] == [3, 6]
        assert ("not finite: first grad_output" in records[2].skip_reason) is verdicts
        ends.append((made.prepared.state_dict(), torch.get_rng_state(), torch.cuda.get_rng_state()))
    assert first_difference(*ends) is None


# Emulated products take the tracer half a minute, and test_compile.py looks at them.
@pytest.mark.parametrize(("policy", "compile"), [("bf16", False), ("fp32", True)])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_faults_of_a_recipe_are_announced_skipped_and_named(ready, policy, compile, monkeypatch):  # noqa: A002
    # What the compiler makes of a graph is its own affair; that there is one is ours.
    traced = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", traced)
    faults = tuple(FaultSection(**fault) for fault in FAULTS)
    made = ready(
        policy, steps=8, gradient_accumulation_steps=2, fault_injection=faults, compile=compile
    )
    records = run(made)
    assert [r.step for r in steps_of(records) if not r.applied] == [3, 6]
    found = [r for r in records if isinstance(r, FindingRecord)]
    assert [(r.step, r.module, r.role, r.what) for r in found] == [
        (3, "first", "grad_output", "fault injected"),
        (3, "first", "grad_output", "NaN"),
        (6, "rise", "weight", "fault injected"),
        (6, "rise", "weight", "infinity"),
    ]
    assert "micro-batch 2 of 2" in found[1].why
    assert all(p.isfinite().all() for p in made.task.model.parameters())


def test_a_run_with_faults_is_resumed_bit_for_bit(ready, tmp_path):
    faults = tuple(FaultSection(**fault) for fault in FAULTS)
    settings = {
        "steps": 8,
        "gradient_accumulation_steps": 2,
        "fault_injection": faults,
        "checkpoint": {"every": 4},
    }
    whole = ready("fp16", **settings)
    records = run(whole, folder=tmp_path / "whole")
    state = load_checkpoint(tmp_path / "whole" / "checkpoints" / "step-000004")
    resumed = ready("fp16", **settings)
    rest = run(resumed, folder=tmp_path / "resumed", resume=state)
    later = [r for r in records if r.step > 4]
    assert all(same_trajectory(a, b) for a, b in zip(later, rest, strict=True))
    ends = [made.prepared.state_dict() for made in (whole, resumed)]
    assert first_difference(*ends) is None


def test_evaluations_and_checkpoints_come_when_asked_and_at_the_end(ready, tmp_path):
    made = ready(steps=10, eval={"every": 4}, checkpoint={"every": 3, "keep": 2})
    records = run(made, folder=tmp_path)
    assert [r.step for r in records if isinstance(r, EvalRecord)] == [4, 8, 10]
    assert [r.step for r in records if isinstance(r, CheckpointRecord)] == [3, 6, 9, 10]
    kept = [path.name for path in checkpoints(tmp_path / "checkpoints")]
    assert kept == ["step-000009", "step-000010"]
    assert (tmp_path / "model.safetensors").is_file()


def test_evaluating_more_often_changes_nothing_in_training(ready):
    often, once = (ready(steps=12, eval={"every": every}) for every in (1, 0))
    same = zip(steps_of(run(often)), steps_of(run(once)), strict=True)
    assert all(same_trajectory(a, b) for a, b in same)
    assert first_difference(often.prepared.state_dict(), once.prepared.state_dict()) is None


def test_without_a_folder_nothing_is_written(ready, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(ready(steps=4, checkpoint={"every": 1}))
    assert list(tmp_path.iterdir()) == []


def until(records, step):
    """Take records up to that of `step`."""
    taken = []
    for record in records:
        taken.append(record)
        if isinstance(record, StepRecord) and record.step == step:
            return taken
    raise AssertionError(f"no step {step}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(ready, tmp_path, number):
    before = signal.getsignal(number)
    made = ready(steps=10, eval={"every": 3})
    records = train_loop(made.prepared, made.task, made.recipe, folder=tmp_path)
    until(records, 3)
    signal.raise_signal(number)
    checkpoint = next(records)
    assert isinstance(checkpoint, CheckpointRecord)
    assert checkpoint.step == 3
    with pytest.raises(
        Interrupted, match=rf"after step 3\. .*narrowcast resume {tmp_path}"
    ) as info:
        next(records)
    assert info.value.exit_code == 130
    assert signal.getsignal(number) is before
    assert latest(tmp_path / "checkpoints") == tmp_path / "checkpoints/step-000003"


def test_a_run_that_a_signal_ended_goes_on_as_if_it_had_not(ready, tmp_path):
    settings = {"steps": 9, "eval": {"every": 3}}
    straight = ready(**settings)
    expected = run(straight)
    made = ready(**settings)
    records = train_loop(made.prepared, made.task, made.recipe, folder=tmp_path)
    before = until(records, 3)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Interrupted):
        list(records)
    again = ready(**settings)
    after = run(again, resume=load_checkpoint(tmp_path / "checkpoints/step-000003"))
    assert len(before) + len(after) == len(expected)
    assert all(map(same_trajectory, [*before, *after], expected))
    assert first_difference(again.prepared.state_dict(), straight.prepared.state_dict()) is None


def test_signals_have_their_old_meaning_once_the_records_are_closed(ready):
    before = signal.getsignal(signal.SIGINT)
    made = ready(steps=10)
    records = train_loop(made.prepared, made.task, made.recipe)
    next(records)
    assert signal.getsignal(signal.SIGINT) is not before
    records.close()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_in_another_thread_leaves_signals_alone(ready):
    made = ready(steps=2)
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work():
        for _ in train_loop(made.prepared, made.task, made.recipe):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen
    assert all(handler is before for handler in seen)


def saved_state(made, folder):
    run(made, folder=folder)
    newest = latest(folder / "checkpoints")
    assert newest is not None
    return load_checkpoint(newest)


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_loaded(ready, tmp_path):
    state = saved_state(ready(steps=3), tmp_path)
    made = ready(steps=6)
    made.task.model.fall = torch.nn.Linear(16, 2)
    before = {k: v.clone() for k, v in made.task.model.state_dict().items()}
    with pytest.raises(
        CheckpointError,
        match=r"step 3 has another model: fall\.weight is 1×16 in the checkpoint and 2×16 here",
    ):
        train_loop(made.prepared, made.task, made.recipe, resume=state)
    assert first_difference(made.task.model.state_dict(), before) is None


def test_a_checkpoint_of_other_data_is_refused(ready, tmp_path):
    state = saved_state(ready(steps=3), tmp_path)
    made = ready(steps=6, samples=90)
    with pytest.raises(
        CheckpointError, match=r"it had 100 samples and now has 90\. Restore the data"
    ):
        train_loop(made.prepared, made.task, made.recipe, resume=state)


def test_a_checkpoint_of_an_older_version_is_refused_with_what_it_lacks(ready, tmp_path):
    state = saved_state(ready(steps=3), tmp_path)
    del state["adapter"], state["schedule"]
    made = ready(steps=6)
    with pytest.raises(CheckpointError, match="has no schedule, adapter"):
        train_loop(made.prepared, made.task, made.recipe, resume=state)


def test_a_run_that_is_past_the_steps_asked_for_is_refused(ready, tmp_path):
    state = saved_state(ready(steps=6), tmp_path)
    made = ready(steps=3)
    with pytest.raises(
        ConfigError, match="steps must be at least 6, the step that the run has reached, got 3"
    ):
        train_loop(made.prepared, made.task, made.recipe, resume=state)


def test_a_batch_larger_than_the_data_is_refused(ready):
    with pytest.raises(ConfigError, match=r"training samples, 5, got 8\. Write batch_size=5"):
        run(ready(samples=5))


def test_workers_do_not_change_the_course(ready):
    alone = ready(steps=8)
    helped = ready(steps=8, data=DataSection(workers=1))
    same = zip(run(alone), run(helped), strict=True)
    assert all(same_trajectory(a, b) for a, b in same)
    assert first_difference(alone.prepared.state_dict(), helped.prepared.state_dict()) is None


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_no_step_on_the_gpu_makes_the_host_wait(ready, policy, host_never_waits):
    """Torch raises on every operation that waits for the device, except waiting for an event."""
    made = ready(policy, steps=24, device="cuda", health={"every": 2})
    records = train_loop(made.prepared, made.task, made.recipe)
    until(records, 6)  # of which the fourth is captured
    with host_never_waits():
        until(records, 22)


@pytest.mark.gpu
def test_records_of_the_gpu_are_complete_and_in_order(ready, tmp_path):
    made = ready("fp16", steps=9, device="cuda", eval={"every": 4}, checkpoint={"every": 3})
    records = run(made, folder=tmp_path)
    # Findings come with the steps they are of; which there are is not asked here.
    order = [(type(r).__name__[0], r.step) for r in records if not isinstance(r, FindingRecord)]
    assert order == [
        *(("S", k) for k in (1, 2, 3)),
        ("C", 3),
        ("S", 4),
        ("E", 4),
        *(("S", k) for k in (5, 6)),
        ("C", 6),
        *(("S", k) for k in (7, 8)),
        ("E", 8),
        ("S", 9),
        ("E", 9),
        ("C", 9),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("gradient_accumulation_steps", [1, 3])
def test_a_gpu_run_learns_what_a_cpu_run_learns(ready, gradient_accumulation_steps):
    """Not bit for bit: dropout draws other numbers there."""
    made = ready(steps=150, device="cuda", gradient_accumulation_steps=gradient_accumulation_steps)
    assert run(made)[-1].metrics["error"] < 0.1


def test_a_run_that_is_over_leaves_its_model_prepared_and_nothing_else(ready):
    made = ready("fp8-tensor", steps=2, health={"every": 1})
    before = [type(module) for module in made.task.model.modules()]
    records = train_loop(made.prepared, made.task, made.recipe)
    next(records)
    records.close()  # as does an error, or the last step
    assert [type(module) for module in made.task.model.modules()] == before


def test_a_refused_checkpoint_leaves_the_model_prepared_and_nothing_else(ready):
    made = ready("bf16", health={"every": 1})
    before = [type(module) for module in made.task.model.modules()]
    with pytest.raises(CheckpointError, match="older version"):
        train_loop(made.prepared, made.task, made.recipe, resume={"step": 1})
    assert [type(module) for module in made.task.model.modules()] == before


def test_an_evaluation_that_is_no_number_is_told_plainly(ready):
    made = ready("fp16", steps=4, eval={"every": 2})
    values = iter([math.nan, 0.5])
    made = made.but(evaluate=lambda model: {"error": next(values)})
    found = [r for r in run(made) if isinstance(r, FindingRecord) and r.role == "evaluation"]
    assert [(r.step, r.what) for r in found] == [(2, "evaluation not finite")]
    assert found[0].why.startswith("error is nan; the evaluation ran in the formats of training")


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_a_captured_step_is_read_as_a_launched_one_is(ready, policy):
    """Every role, and of the step that is read: a tensor of another has other magnitudes."""
    captured, launched = (
        [
            r
            for r in run(
                ready(policy, steps=12, device="cuda", cuda_graph=wish, health={"every": 2})
            )
            if isinstance(r, HealthRecord)
        ]
        for wish in (True, False)
    )
    assert [r.step for r in captured] == [r.step for r in launched] == [2, 4, 6, 8, 10, 12]
    for one, other in zip(captured, launched, strict=True):
        assert (one.module, one.role) == (other.module, other.role)
        assert {"input", "weight", "output", "grad_output", "grad_weight"} <= set(one.role)
        assert one.amax == pytest.approx(other.amax, rel=0.05)
