import math

import pytest
import torch

from narrowcast.health.diagnose.diagnosis import Diagnosis, Remedy
from narrowcast.health.diagnose.inputs import LARGEST_TO_FP16, SQUARE_ROOT, Location, written


def verdict(role="grad_output", *, format="fp16", amax=7.1e4, **others):  # noqa: A002  # the field
    place = Location("blocks.7.mlp.down", role, format)
    return Diagnosis(location=place, amax=amax, micro_batch=3, micro_batches=8, **others)


def test_a_verdict_reads_as_a_sentence():
    assert verdict().sentence == (
        "blocks.7.mlp.down grad_output overflowed fp16 (amax 7.1e4, micro-batch 3 of 8)"
    )
    assert verdict().where == "blocks.7.mlp.down grad_output, micro-batch 3 of 8"


@pytest.mark.parametrize(
    ("role", "amax", "format", "said"),
    [
        ("output", math.nan, "bf16", "output became NaN (micro-batch 3 of 8)"),
        ("output", math.inf, "bf16", "output overflowed bf16 (amax inf, micro-batch 3 of 8)"),
        ("input", 1e30, "bf16", "input grew beyond what fp32 can square (amax 1.0e30, micro"),
        ("input", 1e30, "fp16", "input overflowed fp16 (amax 1.0e30, micro"),
        ("output", math.inf, "", "output became infinite (amax inf, micro"),
        ("weight", math.inf, "fp32", "weight is infinite (amax inf, micro"),
        ("weight", math.nan, "fp32", "weight is NaN (micro"),
    ],
)
def test_each_kind_has_its_words(role, amax, format, said):  # noqa: A002  # the field
    assert verdict(role, amax=amax, format=format).sentence.startswith(f"blocks.7.mlp.down {said}")


@pytest.mark.parametrize("value", [LARGEST_TO_FP16, SQUARE_ROOT])
def test_a_limit_is_the_last_number_that_fits(value):
    fp16 = value == LARGEST_TO_FP16
    below, above = torch.tensor([value, value * (1 + 2.0**-14)], dtype=torch.float32)
    through = (lambda x: x.half()) if fp16 else (lambda x: x.square())
    assert through(below).isfinite()
    assert through(above).isinf()


@pytest.mark.parametrize(
    ("value", "text"), [(312.4, "312"), (71000.0, "7.1e4"), (2e-5, "2.0e-5"), (math.inf, "inf")]
)
def test_magnitudes_are_short(value, text):
    assert written(value) == text


def test_a_loss_scale_is_blamed_where_a_lower_one_was_tried_and_helped():
    blamed = "the loss scale was too high"
    tried = verdict(remedy=Remedy(scale="gives way"))
    assert tried.advice(loss_scale=65536.0).startswith(blamed)
    assert not tried.advice(loss_scale=1.0).startswith(blamed)
    assert not verdict().advice(loss_scale=65536.0).startswith(blamed)


@pytest.mark.parametrize(
    ("role", "amax", "form", "outgrew"),
    [
        ("input", 7e4, "fp16", True),
        ("output", math.inf, "fp16", True),
        ("weight", 7e4, "fp16", True),
        ("weight", math.inf, "fp16", False),  # it was so before the step
        ("output", math.nan, "fp16", False),
        ("output", math.inf, "bf16", False),  # fp32 ends where bf16 does
        ("input", math.inf, "e4m3", False),
        ("batch", math.inf, "", False),
    ],
)
def test_only_what_more_range_would_have_held_has_outgrown_its_format(role, amax, form, outgrew):
    assert verdict(role, amax=amax, format=form).outgrew_format is outgrew
