import math
import weakref

import pytest
import torch

from narrowcast.errors import ConfigError
from narrowcast.runs import Metric, StepRecord, TaskInfo
from narrowcast.training.checkpoints.verify import first_difference
from narrowcast.training.task import LossParts
from narrowcast.training.train_loop import train_loop

PARTS = TaskInfo(metrics=(Metric(name="error"),), loss_parts=("near", "far"))


def in_parts(model, batch):
    error = (model(batch[0]) - batch[1]).square().squeeze(1)
    near = torch.where(batch[0].squeeze(1).abs() < 0.5, error, 0.0).mean()
    return LossParts(total=error.mean(), parts={"near": near, "far": error.mean() - near})


def steps(made):
    records = train_loop(made.prepared, made.task, made.recipe)
    return [record for record in records if isinstance(record, StepRecord)]


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_a_loss_in_parts_trains_as_the_same_loss_in_one(ready, policy):
    whole = ready(policy, steps=6, gradient_accumulation_steps=2)
    parted = ready(policy, steps=6, gradient_accumulation_steps=2).but(loss=in_parts, info=PARTS)
    assert [r.loss for r in steps(whole)] == [r.loss for r in steps(parted)]
    assert first_difference(whole.prepared.state_dict(), parted.prepared.state_dict()) is None


def test_parts_are_averaged_over_the_micro_batches(ready):
    seen = []

    def loss(model, batch):
        found = in_parts(model, batch)
        seen.append({name: value.item() for name, value in found.parts.items()})
        return found

    records = steps(ready(steps=4, gradient_accumulation_steps=3).but(loss=loss, info=PARTS))
    for number, record in enumerate(records):
        mine = seen[3 * number : 3 * number + 3]
        for name in ("near", "far"):
            exact = math.fsum(each[name] for each in mine) / 3
            # Two additions and a division in fp32.
            assert record.loss_parts[name] == pytest.approx(exact, rel=3 * 2.0**-24)


def test_a_step_of_one_piece_has_no_parts(ready):
    assert all(record.loss_parts == {} for record in steps(ready(steps=2)))


@pytest.mark.parametrize("names", [(), ("near",), ("near", "far", "other")])
def test_parts_that_were_not_declared_are_refused_with_the_names(ready, names):
    info = TaskInfo(metrics=(Metric(name="error"),), loss_parts=names)
    made = ready(steps=2).but(loss=in_parts, info=info)
    with pytest.raises(ConfigError, match=r"got near, far\. Use"):
        steps(made)


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_losses_with_scales_of_their_own_have_the_gradient_of_their_sum(ready, policy):
    def first(scaled):
        parts = {"loss": in_parts, "info": PARTS, "scaled_losses": scaled}
        precision = {"policy": policy, "loss_scale": {"init_scale": 1024.0}}
        (record,) = steps(
            ready(steps=1, gradient_accumulation_steps=2, parts=parts, precision=precision)
        )
        return record

    one, two = first(()), first(("near", "far"))
    assert two.applied
    assert two.loss == one.loss
    # The same products, rounded once more for each of two losses: fp16 has 11 digits.
    digits = {"fp32": 24, "fp16": 11}[policy]
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=8 * 2.0**-digits)


def test_a_scale_gives_way_where_its_own_loss_overflows(ready):
    calls = iter(range(100))

    def loss(model, batch):
        found = in_parts(model, batch)
        bad = found.parts["far"] * (math.inf if next(calls) == 1 else 1.0)
        return LossParts(
            total=found.parts["near"] + bad, parts={"near": found.parts["near"], "far": bad}
        )

    made = ready(
        "fp16",
        steps=3,
        parts={"loss": loss, "info": PARTS, "scaled_losses": ("near", "far")},
        health={"diagnose": False},
        precision={"policy": "fp16", "loss_scale": {"init_scale": 1024.0}},
    )
    assert [record.applied for record in steps(made)] == [True, False, True]
    scales = made.prepared.state_dict()["scales"]["losses"]
    assert (scales["near"]["value"].item(), scales["far"]["value"].item()) == (1024.0, 512.0)


def test_a_bad_step_of_several_scaled_losses_is_looked_into(ready):
    def loss(model, batch):
        found = in_parts(model, batch)
        return LossParts(
            total=found.total * math.inf,
            parts={"near": found.parts["near"] * math.inf, "far": found.parts["far"] * math.inf},
        )

    parts = {"loss": loss, "info": PARTS, "scaled_losses": ("near", "far")}
    made = ready("fp16", steps=1, parts=parts)
    record = next(train_loop(made.prepared, made.task, made.recipe))
    assert record.skip_reason.startswith("not finite: ")


def test_scaled_losses_that_are_not_the_total_are_refused(ready):
    def loss(model, batch):
        found = in_parts(model, batch)
        return LossParts(total=2 * found.total, parts=found.parts)

    made = ready("fp32", steps=2).but(loss=loss, info=PARTS, scaled_losses=("near", "far"))
    with pytest.raises(ConfigError, match=r"must sum to the total loss, got .* and a total of"):
        steps(made)


class Marker:
    """A hook that does nothing, and is alive for as long as the graph it is in."""

    def __call__(self, grad):
        return None


def test_what_a_loss_was_computed_from_does_not_outlive_its_micro_batch(ready):
    alive = []

    def loss(model, batch):
        assert all(marker() is None for marker in alive)
        found, marker = in_parts(model, batch), Marker()
        found.parts["near"].register_hook(marker)
        alive.append(weakref.ref(marker))
        return found

    parts = {"loss": loss, "info": PARTS, "scaled_losses": ("near", "far")}
    scale = {"policy": "fp16", "loss_scale": {"init_scale": 1024.0}}
    steps(
        ready(
            steps=2,
            gradient_accumulation_steps=3,
            parts=parts,
            health={"diagnose": False},
            precision=scale,
        )
    )
    assert len(alive) == 6


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda model, batch: {"loss": 1.0}, "got a dict"),
        (lambda model, batch: model(batch[0]), r"got shape \(8, 1\)"),
        (lambda model, batch: LossParts(total=0.5), r"got 0\.5"),
    ],
)
def test_a_loss_that_is_no_number_on_the_device_is_refused(ready, loss, why):
    with pytest.raises(ConfigError, match=why):
        steps(ready(steps=1).but(loss=loss))


def test_an_exception_in_a_loss_says_that_it_was_the_tasks(ready):
    def loss(model, batch):
        raise KeyError("labels")

    with pytest.raises(KeyError) as caught:
        steps(ready(steps=1).but(loss=loss))
    assert caught.value.__notes__ == ["This was the task's loss."]
