"""Runs that are resumed with what is not theirs: settings, a checkpoint, words."""

import json
import shutil
from pathlib import Path
from typing import Any

from attacks import tiny
from attacks.case import (
    SECONDS,
    STOPPED_AFTER,
    Case,
    contents,
    require_equal,
    require_untouched,
    resumed_equal,
    steps_of,
    watch_until,
)
from attacks.oracle import BAD_INPUT, DONE, Found, Verdict, refused

DECIDING: dict[str, tuple[Any, ...]] = {
    "seed": (1, 12345),
    "batch_size": (1, 3),
    "gradient_accumulation_steps": (2,),
    "clip_norm": (None, 0.01),
    "optimizer.name": ("adam",),
    "optimizer.lr": (1.0, 1e-5),
    "optimizer.weight_decay": (0.5, 0.0),
    "optimizer.betas": ([0.5, 0.5],),
    "optimizer.eps": (1e-3,),
    "lr_schedule.name": ("linear", "constant"),
    "lr_schedule.warmup": (0, 50),
    "lr_schedule.min_lr_ratio": (0.9,),
    "ema.decay": (0.9,),
    "precision.policy": ("fp16", "fp32"),
    "precision.loss_scale.growth_interval": (1,),
    "precision.loss_scale.init_scale": (2.0,),
    "precision.loss_scale.backoff_factor": (0.25,),
    "data.length": (8, 32),
    "data.validation_share": (0.5,),
    "data.eval_windows": (2,),
    "data.text": ("synthetic",),
    "model.rope_base": (100.0,),
    "model.norm": ("rmsnorm",),
    "model.mlp": ("swiglu",),
    "model.tied": (False,),
    "health.every": (1,),
    "faults": ([{"step": 10, "module": "blocks.0.mlp.up", "role": "output", "value": "inf"}],),
    "rehearse.swell": (3,),
}
"""Settings that decide steps or what is said of them, with other values."""


def edited_settings(case: Case) -> Verdict:
    """Edit resolved.json: refused, and `--accept settings` goes on with those of the checkpoint."""
    recipe = case.rng.choice(("bf16", "fp16"))
    straight, run = case.straight(recipe), case.stopped(recipe)
    file = run / "resolved.json"
    resolved = json.loads(file.read_text())
    keys = [key for key in DECIDING if key in resolved]
    key = case.turn(keys)
    different = [each for each in DECIDING[key] if each != resolved[key]["value"]]
    if not different:
        return Verdict.FINE
    value = case.rng.choice(different)
    case.tell(f"{recipe}: {key} edited to {value}")
    resolved[key]["value"] = value
    file.write_text(json.dumps(resolved))
    before = contents(run)
    ended = case.run("resume", run, codes={DONE, BAD_INPUT})
    if not refused(ended):
        require_equal(run, straight)
        if json.loads(file.read_text())[key]["value"] == value and key not in ended.said:
            raise Found(Verdict.SILENT, f"{key} was ignored, and resolved.json still shows it")
        return Verdict.EQUAL
    require_untouched(run, before)
    resumed_equal(case, run, straight, "--accept", "settings")
    return Verdict.EQUAL


def given_settings(case: Case) -> Verdict:
    """Give words that a continued run may not take: refused, and nothing changes."""
    recipe = case.rng.choice(("bf16", "fp16"))
    run = case.stopped(recipe)
    resolved = json.loads((run / "resolved.json").read_text())
    key = case.turn([key for key in DECIDING if key in resolved])
    different = [each for each in DECIDING[key] if each != resolved[key]["value"]]
    if not different:
        return Verdict.FINE
    word = f"{key}={json.dumps(case.rng.choice(different))}"
    case.tell(f"{recipe}: resume with {word}")
    before = contents(run)
    case.run("resume", run, word, codes={BAD_INPUT})
    require_untouched(run, before)
    return Verdict.REFUSED


def another_checkpoint(case: Case) -> Verdict:
    """Put in the checkpoint of a run with another setting: refused, or it decides nothing."""
    straight, run = case.straight("bf16"), case.stopped("bf16")
    keys = [key for key in DECIDING if not key.startswith(("model.mlp", "model.tied"))]
    key = case.turn(keys)
    value = DECIDING[key][0]
    case.tell(f"the checkpoint of a run with {key}={value}")
    other = case.folder / "other"
    words = [*tiny.RECIPES["bf16"], f"{key}={json.dumps(value)}"]
    if key == "lr_schedule.name":
        words.append("lr_schedule.min_lr_ratio=0")
    command = case.start("train", *words, "--out", other)
    watch_until(command, lambda: steps_of(other) >= STOPPED_AFTER)
    command.kill()
    command.wait(SECONDS)
    _take(other, run, newest_only=case.rng.random() < 0.5)
    before = contents(run)
    ended = case.run("resume", run, codes={DONE, BAD_INPUT})
    if not refused(ended):
        require_equal(run, straight)
        return Verdict.EQUAL
    require_untouched(run, before)
    return Verdict.REFUSED


def more_steps(case: Case) -> Verdict:
    """Give words that a continued run may take: it goes on, and once done has nothing to do."""
    recipe = case.turn(tiny.RECIPES)
    run = case.stopped(recipe)
    words = case.rng.choice(
        (
            ("steps=15",),
            ("checkpoint.every=1",),
            ("checkpoint.keep=1",),
            ("eval.every=0",),
            ("data.prefetch=1",),
            ("device=cpu",),
        )
    )
    case.tell(f"{recipe}: resume with {' '.join(words)}")
    case.run("resume", run, *words, codes={DONE})
    before = contents(run)
    case.run("resume", run, codes={DONE})
    require_untouched(run, before)
    return Verdict.FINE


def _take(other: Path, run: Path, *, newest_only: bool) -> None:
    checkpoints = run / "checkpoints"
    theirs = sorted((other / "checkpoints").glob("step-??????"))
    if not newest_only:
        shutil.rmtree(checkpoints)
        checkpoints.mkdir()
    for each in theirs[-1:] if newest_only else theirs:
        target = checkpoints / each.name
        if target.exists():
            shutil.rmtree(target)
        shutil.copytree(each, target)
