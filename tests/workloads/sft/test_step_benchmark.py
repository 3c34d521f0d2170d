"""What `benchmarks/sft_step.py` measures is a step of what it says, by transformers' own loss."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("peft")
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def contenders(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from sft_contenders import clock, ours, peers, settings

    return clock, ours, peers, settings


def documents_of(rows):
    for tokens, positions in zip(rows["input_ids"], rows["position_ids"], strict=True):
        starts = (positions == 0).nonzero().flatten().tolist()
        yield from tokens.tensor_split(starts[1:])


@pytest.mark.parametrize("tune", ["full", "lora"])
def test_the_first_loss_is_that_of_each_document_alone(contenders, tune):
    clock, ours, _, settings = contenders
    shape = settings.SHAPES["tiny"]
    rows = settings.packed_rows(shape, 3)
    timer = clock.Clock("cpu", warm_up=1, gated=False)
    ours.run_ours("narrowcast", shape, tune, rows, timer, device="cpu", steps=3)
    losses = timer.result()["losses"]
    model = settings.built_model(shape, tune, "cpu").float()
    first = {name: tensor[: shape.rows] for name, tensor in rows.items()}
    with torch.no_grad():
        parts = [
            F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="sum")
            for ids in documents_of(first)
        ]
    learnt = (first["labels"] != settings.IGNORED).sum()
    assert losses[0] == pytest.approx(float(sum(parts) / learnt), abs=2e-3)
    assert losses[-1] < losses[0]


def test_the_trainer_takes_the_rows_in_their_order(contenders):
    clock, _, peers, settings = contenders
    shape = settings.SHAPES["tiny"]
    rows = settings.packed_rows(shape, 2)
    timer = clock.Clock("cpu", warm_up=1, gated=False)
    told = peers.run_trainer(shape, "full", rows, timer, device="cpu", steps=2)
    model = settings.built_model(shape, "full", "cpu")
    tokens, labels = (rows[name][: shape.rows] for name in ("input_ids", "labels"))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = float(model(tokens, labels=labels).loss)
    assert timer.result()["losses"][0] == pytest.approx(expected, abs=2e-3)
    assert told["optimizer"]
