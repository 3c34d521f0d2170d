"""`benchmarks/model_claims.py` checks each claim from both sides of its bar."""

import importlib.util
import sys
from pathlib import Path

import pytest

from narrowcast.bench.zoo.ways import AMP, BF16, BF16_SPLIT, FP8_SPLIT, LIGER, TORCHAO

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "model_claims.py"


@pytest.fixture(scope="module")
def held():
    """Return whether each claim holds, by what it says."""
    spec = importlib.util.spec_from_file_location("model_claims", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["model_claims"] = module  # for its dataclass
    spec.loader.exec_module(module)

    def check(rows, **settings):
        return {claim.what: claim.holds for claim in module.claims(rows, **settings)}

    yield check
    del sys.modules["model_claims"]


def row(model, way, mode, ms, **more):
    facts = {"peak_bytes": 100, "first_step_seconds": 1.0, "failure": ""}
    return {"model": model, "way": way, "mode": mode, "ms": ms, **facts, **more}


@pytest.mark.parametrize(
    ("model", "ms", "holds"),
    [("unet", 101.0, True), ("unet", 101.1, False), ("resnet-50", 100.0, True),
     ("resnet-50", 100.1, False)],
)  # fmt: skip
@pytest.mark.parametrize("way", [BF16, BF16_SPLIT])
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_no_16_bit_policy_is_slower_than_torch_in_the_same_mode(held, model, ms, holds, way, mode):
    other = "eager" if mode == "compiled" else "compiled"
    rows = [row(model, AMP, mode, 100.0), row(model, AMP, other, 1.0), row(model, way, mode, ms)]
    assert held(rows)[f"{model}: {way}, {mode} against AMP, {mode}"] is holds


@pytest.mark.parametrize(("ms", "holds"), [(102.0, True), (102.1, False)])
def test_fp8_is_never_slower_than_our_own_bf16(held, ms, holds):
    rows = [row("lstm", BF16_SPLIT, "graphed", 100.0), row("lstm", FP8_SPLIT, "graphed", ms)]
    what = f"lstm: {FP8_SPLIT}, graphed against {BF16_SPLIT}, graphed"
    assert held(rows) == {what: holds}


def test_first_steps_are_judged_where_caches_were_empty(held):
    rows = [
        row("unet", AMP, "compiled", 1.0, first_step_seconds=10.0),
        row("unet", BF16, "compiled", 1.0, first_step_seconds=11.6),
        row("unet", BF16_SPLIT, "compiled", 1.0, first_step_seconds=11.4),
    ]
    first = {what: ok for what, ok in held(rows).items() if "first step" in what}
    assert list(first.values()) == [False, True]
    assert not any("first step" in what for what in held(rows, cold=False))


@pytest.mark.parametrize(("theirs", "mine", "judged"), [(1, 1, 1), (1, 4, 0), (4, 1, 0), (4, 4, 0)])
def test_first_steps_are_judged_where_both_were_set_up_alone(held, theirs, mine, judged):
    rows = [
        row("unet", AMP, "compiled", 1.0, together=theirs),
        row("unet", BF16, "compiled", 1.0, together=mine),
    ]
    found = list(held(rows))
    assert sum("first step" in what for what in found) == judged
    assert f"unet: {BF16}, compiled against {AMP}, compiled" in found  # speeds are, always


def test_the_small_llama_is_judged_by_the_best_mode_of_each_side(held):
    model = "llama-348m"
    rows = [
        row(model, AMP, "eager", 160.0),
        row(model, AMP, "compiled", 120.0),
        row(model, LIGER, "eager", 116.0, peak_bytes=90),
        row(model, LIGER, "compiled", 130.0, peak_bytes=10),
        row(model, BF16_SPLIT, "eager", 110.0),
        row(model, BF16_SPLIT, "graphed", 100.0, peak_bytes=91),
        row(model, FP8_SPLIT, "graphed", 92.0),
    ]
    found = held(rows)
    assert found[f"{model}: {BF16_SPLIT}, graphed against {LIGER}, eager"]  # 1.16
    assert found[f"{model}: {BF16_SPLIT}, graphed against {AMP}, compiled"]  # 1.20
    assert not found[f"{model}: memory of {BF16_SPLIT}, graphed against {LIGER}, eager"]
    assert found[f"{model}: {FP8_SPLIT}, graphed against {LIGER}, eager"]  # 1.26 of the better


@pytest.mark.parametrize(("ms", "amp", "torchao"), [(100.0, True, True), (101.0, False, False)])
def test_the_large_llama_is_judged_in_fp8(held, ms, amp, torchao):
    model = "llama-1.3b"
    rows = [
        row(model, AMP, "compiled", 135.0),
        row(model, TORCHAO, "compiled", 115.0),
        row(model, FP8_SPLIT, "compiled", ms),
    ]
    found = held(rows)
    assert found[f"{model}: {FP8_SPLIT}, compiled against {AMP}, compiled"] is amp
    assert found[f"{model}: {FP8_SPLIT}, compiled against {TORCHAO}, compiled"] is torchao


@pytest.mark.parametrize(("eager", "graphed"), [(100.0, 88.0), (100.1, 88.1)])
def test_vit_is_judged_eager_and_graphed_against_eager_torch(held, eager, graphed):
    rows = [
        row("vit-l", AMP, "eager", 110.0),
        row("vit-l", BF16, "eager", 105.0),
        row("vit-l", BF16_SPLIT, "eager", eager),
        row("vit-l", FP8_SPLIT, "graphed", graphed),
    ]
    found = held(rows)
    assert found[f"vit-l: {BF16_SPLIT}, eager against AMP, eager"] is (eager == 100.0)
    assert found[f"vit-l: {FP8_SPLIT}, graphed against AMP, eager"] is (graphed == 88.0)


def test_missing_and_failed_rows_decide_nothing(held):
    failed = row("unet", AMP, "eager", 0.0, failure="out of memory")
    assert held([failed, row("unet", BF16, "eager", 5.0)]) == {}
