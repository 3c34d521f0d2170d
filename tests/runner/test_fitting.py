"""A run that does not fit is refused before it allocates, with settings that make it fit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import narrowcast as nc
from narrowcast.config import LoadedRecipe
from narrowcast.errors import UnsupportedError
from narrowcast.hardware import detect_hardware
from narrowcast.runner.fitting import (
    advise,
    budget,
    describe_exhaustion,
    fit,
    fit_notices,
    largest_model,
    predict,
)

TINY = [
    "device=cpu",
    "model.layers=1",
    "model.width=64",
    "model.heads=4",
    "data.length=64",
    "batch_size=8",
    "steps=1",
    "eval.every=0",
]
CPU = detect_hardware("cpu")


def recipe(*more: str) -> LoadedRecipe:
    return nc.load_recipe("quickstart", [*TINY, "precision.policy=fp32", *more])


@pytest.fixture(scope="module")
def whole() -> int:
    memory = predict(recipe().recipe, CPU).memory
    assert memory is not None
    return memory.needed


def test_run_that_does_not_fit_is_refused_with_advice(whole: int) -> None:
    limit = f"memory.limit={whole * 6 // 10}B"
    with pytest.raises(UnsupportedError, match=r"does not fit(?s:.*)batch_size="):
        nc.train(recipe(limit))


def test_largest_model_fits_and_a_larger_one_does_not() -> None:
    def needed(*more: str) -> int:
        memory = predict(recipe("model.layers=4", *more).recipe, CPU).memory
        assert memory is not None
        return memory.needed

    limit = 3 * needed()
    loaded = recipe("model.layers=4", f"memory.limit={limit}B")
    most = largest_model(loaded.recipe, CPU, predict(loaded.recipe, CPU))
    assert most is not None
    assert most.blocks == 4
    assert needed(f"model.layers={most.most_blocks}") <= 1.03 * limit
    assert needed(f"model.layers={round(1.1 * most.most_blocks)}") > limit
    wide = round(64 * most.width / 8) * 8
    assert needed(f"model.width={wide}") == pytest.approx(limit, rel=0.15)


@pytest.mark.parametrize("share", [0.55, 0.75])
def test_first_advice_fits(whole: int, share: float) -> None:
    loaded = recipe(f"memory.limit={round(whole * share)}B")
    limit = budget(loaded.recipe, CPU)
    assert limit == round(whole * share)
    first = next(advise(loaded, CPU, limit=limit, most=1))
    changed = recipe(f"memory.limit={limit}B", *_words(first.settings))
    memory = predict(changed.recipe, CPU).memory
    assert memory is not None
    assert memory.needed <= limit
    assert fit(changed, CPU)[0] is changed
    rows = loaded.recipe.batch_size * loaded.recipe.gradient_accumulation_steps
    assert rows == changed.recipe.batch_size * changed.recipe.gradient_accumulation_steps


def _words(settings: dict) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def test_auto_applies_the_first_advice_and_records_it(whole: int, tmp_path: Path) -> None:
    loaded = recipe(f"memory.limit={whole * 6 // 10}B", "memory.fit=auto")
    run = nc.train(loaded, out=tmp_path / "run")
    resolved = json.loads((tmp_path / "run" / "resolved.json").read_text())
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    run.close()
    changed = [key for key, entry in resolved.items() if entry["origin"] == "memory.fit"]
    assert "batch_size" in changed
    assert [line for line in run.notices if f"batch_size={run.recipe.batch_size}" in line]
    assert plan["predicted"]["memory"]["allocated"] <= whole * 6 // 10


def test_ignore_tries_anyway(whole: int) -> None:
    loaded = recipe("memory.limit=1MiB", "memory.fit=ignore")
    assert fit(loaded, CPU) == (loaded, None)


def test_exhausted_memory_shows_predicted_and_actual_by_role(tmp_path: Path) -> None:
    run = nc.train(recipe("memory.limit=1GiB"), out=tmp_path / "run")
    error = RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
    text = describe_exhaustion(error, run.prepared, tmp_path / "run", step=3)
    run.close()
    assert "step 4" in text
    assert "predicted: " in text
    assert "moments" in text.partition("actual: ")[0]
    assert "params" in text.partition("actual: ")[2]


def test_plan_of_a_gpu_that_is_not_here_exits_three_without_fitting() -> None:
    command = [sys.executable, "-m", "narrowcast", "plan", "quickstart", *TINY, "hardware=rtx4090"]
    more = ["memory.limit=20MiB", "--json"]
    ended = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
    assert ended.returncode == 3
    predicted = json.loads(ended.stdout)["predicted"]
    assert not predicted["fits"]
    assert predicted["time"]["bound"] in ("tensor cores", "memory", "host")


def test_limit_raises_if_nothing_can_be_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowcast.runner.fitting.MOST_MODULES", 3)
    with pytest.raises(UnsupportedError, match=r"more than 3 modules.*memory\.fit=ignore"):
        fit(recipe("memory.limit=1GiB"), CPU)
    loaded = recipe()
    assert fit(loaded, CPU) == (loaded, None)


def test_auto_checkpointing_recomputes_fewer_blocks_than_all_where_that_is_enough() -> None:
    def needed(*more: str) -> int:
        memory = predict(recipe("model.layers=3", *more).recipe, CPU).memory
        assert memory is not None
        return memory.reserved + memory.context

    none = needed()
    every = needed("memory.activation_checkpointing=blocks")
    limit = f"memory.limit={round(1.05 * (none + every) / 2)}B"
    automatic = recipe("model.layers=3", "memory.activation_checkpointing=auto", limit)
    fitted, prediction = fit(automatic, CPU)
    chosen = fitted.recipe.memory.blocks
    assert 0 < len(chosen) < 3
    assert prediction is not None
    assert fit_notices(fitted, prediction) == [
        f"memory.activation_checkpointing=auto: {len(chosen)} blocks are recomputed."
    ]
    roomy = fit(recipe("model.layers=2", "memory.activation_checkpointing=auto"), CPU)[
        0
    ].recipe.memory
    assert (roomy.activation_checkpointing, roomy.blocks) == ("none", ())
