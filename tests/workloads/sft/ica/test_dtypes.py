import logging

import pytest
import torch

from narrowcast.workloads.sft.ica import ICAMask
from narrowcast.workloads.sft.ica.signals import storage_for

HALF = [torch.float16, torch.bfloat16]
RULE = [
    *[(None, model, torch.float32) for model in [*HALF, torch.float32, torch.float64, None]],
    *[("float32", model, torch.float32) for model in [*HALF, torch.float32, torch.float64, None]],
    *[("auto", model, torch.float32) for model in [*HALF, torch.float32, None]],
    ("auto", torch.float64, torch.float64),
    ("float16", torch.float32, torch.float16),
    ("bfloat16", torch.float32, torch.bfloat16),
]


@pytest.mark.parametrize(("asked", "model", "stored"), RULE)
def test_what_ica_dtype_means(asked, model, stored):
    assert storage_for(asked, model).dtype == stored
    assert storage_for(asked, model).findings == ()


def test_an_unknown_one_is_float32_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        storage = storage_for("float8", torch.bfloat16)
    assert storage.dtype == torch.float32
    assert "ica_dtype must be auto, float32, float16, bfloat16, got 'float8'" in caplog.text
    assert storage.findings[0].answer == "Using float32"


def test_the_familiar_name_follows_the_rule():
    assert ICAMask().dtype_for() == torch.float32
    assert ICAMask(ica_dtype="bfloat16").dtype_for() == torch.bfloat16
    assert ICAMask(ica_dtype="auto").dtype_for(torch.nn.Linear(2, 2).half()) == torch.float32
    assert ICAMask(ica_dtype="auto").dtype_for(torch.nn.Linear(2, 2).double()) == torch.float64
