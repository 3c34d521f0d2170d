"""Every shipped recipe with every strategy and preset: is a killed and resumed run the same run?

Run: python benchmarks/verify_resume.py [--recipes NAME …] [--ways NAME …] [--seed N] [--json PATH]

Each case does what `narrowcast verify-resume` does, with the recipe made tiny: it trains without
interruption, trains again with a SIGKILL after a step drawn from the seed, resumes, and compares
records, last checkpoint and exported weights bit for bit. Processes are forked from one that has
imported everything. Exits with 1 if any case differs or fails.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

from attacks.forks import preload, start

STEPS, EVERY = 48, 9
TIME_LIMIT = 600.0
"""Seconds for one run."""
JUMPS = [
    "strategy=hybrid",
    "strategy.preset=aggressive",
    "strategy.jumps.budget=1",
    "strategy.phases.warmup_steps=6",
    "strategy.phases.full_steps=8",
]
WAYS = {
    "plain": ["strategy.enabled=false"],
    "conservative": ["strategy=hybrid", "strategy.preset=conservative"],
    "balanced": ["strategy=hybrid", "strategy.preset=balanced"],
    "aggressive": JUMPS,
    "aggressive, formats by phase": [*JUMPS, "strategy.precision=aggressive"],
}
SMALL_LM = ["model.layers=1", "model.width=16", "model.heads=2", "data.length=16", "batch_size=2"]
BY_MODEL = ["batch_size=2", "eval.every=24"]
SIZES = {
    "quickstart": [*SMALL_LM, "data.eval_windows=8"],
    "tutorial": ["batch_size=16"],
    "hybrid/*": [*SMALL_LM, "data.eval_windows=8", "strategy.baseline=false"],
    "health/*": [*SMALL_LM, "model.layers=3", "data.eval_windows=8"],
    "lm/*": [*SMALL_LM, "model.vocab=256", "compile=false"],
    "decompose/lm": [
        *BY_MODEL,
        "data.length=16",
        "importance.hidden=[8]",
        'sites.names=["blocks.*.mlp.up"]',
        "sites.components=8",
    ],
    "decompose/*": ["batch_size=32", "eval_tasks.pgd_steps=2"],
    "forecast/*": ["epochs=null", "horizon=12", "lookback=48", "batch_size=2", "eval.every=24"],
    "genomics/*": ["epochs=null", "batch_size=2", "gradient_accumulation_steps=1", "eval.every=24"],
    "sft/tiny": BY_MODEL,
    "sft/*": [*BY_MODEL, "data.max_seq_length=64"],
}
"""What makes the recipes of a name tiny; the first pattern that matches counts."""

GPU_TOYS = (
    "decompose/induction",
    "decompose/resid_mlp1",
    "decompose/resid_mlp2",
    "decompose/resid_mlp3",
    "decompose/tms_40-10",
    "decompose/tms_40-10-id",
)
"""Recipes whose toy trains for minutes on a CPU before the first step; name them to check them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What came of one recipe with one strategy."""

    recipe: str
    way: str
    jumps: int = 0
    """Jumps that were tried and accepted or rejected."""
    killed_after: int = 0
    resumed_from: int = 0
    verdict: str
    seconds: float

    @property
    def equal(self) -> bool:
        return self.verdict == "equal"


class _FailedError(Exception):
    pass


def main() -> int:
    options = _options()
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    preload()
    from narrowcast.runs import describe_machine
    from narrowcast.workloads import recipe_files

    requested = options.recipes or ["*"]
    names = [name for name in recipe_files() if any(fnmatch(name, glob) for glob in requested)]
    if not options.recipes:
        names = [name for name in names if name not in GPU_TOYS]
        print(f"Left out: {', '.join(GPU_TOYS)}.\n")
    if any(name.startswith("sft/") for name in names):
        import transformers  # noqa: F401  here once, and not in every fork
    environment, cases = describe_machine(), list[Case]()
    print("| recipe | strategy | jumps | killed after | resumed from | verdict |")
    print("|---|---|---|---|---|---|", flush=True)
    # No TemporaryDirectory: a fork that ends would remove it.
    scratch = Path(tempfile.mkdtemp(prefix="narrowcast-"))
    try:
        files = _needed_files(scratch, names)
        for number, (name, way) in enumerate((n, w) for n in names for w in options.ways):
            words = [*_overrides(name), *files.get(name, []), *WAYS[way]]
            case = _checked(name, way, words, scratch / str(number), seed=options.seed)
            cases.append(case)
            print(
                f"| {name} | {way} | {case.jumps} | {case.killed_after} | {case.resumed_from} "
                f"| {case.verdict} |",
                flush=True,
            )
    finally:
        shutil.rmtree(scratch)
    equal = sum(case.equal for case in cases)
    print(f"\n{equal} of {len(cases)} equal, bit for bit.")
    if options.json:
        rows = [asdict(case) for case in cases]
        figures = {"environment": environment, "seed": options.seed, "cases": rows}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(equal < len(cases))


def _overrides(recipe: str) -> list[str]:
    sizes = next(words for glob, words in SIZES.items() if fnmatch(recipe, glob))
    return [f"steps={STEPS}", "eval.every=16", *sizes]


def _needed_files(scratch: Path, recipes: list[str]) -> dict[str, list[str]]:
    """Return the settings by which recipes that need files of their owner find them, by recipe."""
    found = dict[str, list[str]]()
    base, text, rows = scratch / "base", scratch / "text.txt", scratch / "rows.jsonl"
    base.mkdir()
    sums = [(f"{n} + 1", str(n + 1)) for n in range(2000)]
    text.write_text(" ".join(f"{a} = {b}." for a, b in sums))
    rows.write_text(
        "".join(json.dumps({"instruction": a, "response": b}) + "\n" for a, b in sums[:200])
    )
    if "decompose/lm" in recipes:
        words = ["steps=100", *SMALL_LM, f"data.text=[{text}]"]
        _run(["train", "quickstart", *words, "--out", "lm", "--quiet"], base)
        found["decompose/lm"] = [f"model.path={base / 'lm'}", f"data.text=[{text}]"]
    if {"sft/full", "sft/smollm2"} & set(recipes):
        _run(["train", "sft/tiny", "steps=1", "--out", "tiny", "--quiet"], base)
        words = [f"model.path={base / 'tiny/final_model'}", f"data.path={rows}"]
        found |= {"sft/full": words, "sft/smollm2": words}
    return found


def _checked(recipe: str, way: str, words: list[str], folder: Path, *, seed: int) -> Case:
    from narrowcast.errors import NarrowcastError
    from narrowcast.training.checkpoints.checkpoint import checkpoint_step, latest
    from narrowcast.training.checkpoints.verify import difference_between

    began = time.perf_counter()
    folder.mkdir()
    train = ["train", recipe, *words, f"checkpoint.every={EVERY}", "--quiet", "--out"]
    jumps = killed_after = resumed_from = 0
    try:
        _run([*train, "straight"], folder)
        jumps = _jumps(folder / "straight")
        chosen = random.Random(f"{seed} {recipe} {way}").randint(EVERY, STEPS * 3 // 4)
        killed_after = _killed([*train, "resumed"], folder, after=chosen)
        checkpoint = latest(folder / "resumed/checkpoints")
        resumed_from = 0 if checkpoint is None else checkpoint_step(checkpoint)
        _run(["resume", "resumed", "--quiet"], folder)
        verdict = difference_between(folder / "straight", folder / "resumed") or "equal"
    except (_FailedError, NarrowcastError) as error:
        verdict = f"failed: {error}"
    return Case(
        recipe=recipe,
        way=way,
        jumps=jumps,
        killed_after=killed_after,
        resumed_from=resumed_from,
        verdict=verdict,
        seconds=round(time.perf_counter() - began, 1),
    )


def _run(words: list[str], folder: Path) -> None:
    ended = start(words, cwd=folder, name="said").wait(TIME_LIMIT)
    if ended.code != 0:
        last = ended.said.strip().splitlines()[-1:] or [ended.why_stopped]
        raise _FailedError(f"{words[0]} ended with {ended.code}: {last[0]}")


def _killed(words: list[str], folder: Path, *, after: int) -> int:
    """Start a run, kill it once it has recorded a step, and return the last step it recorded."""
    command = start(words, cwd=folder, name="killed")
    records = folder / words[-1] / "records.jsonl"
    while command.running() and _last_step(records) < after:
        time.sleep(0.002)
    if not command.running():
        raise _FailedError(f"the run ended before step {after} was recorded and it could be killed")
    command.kill()
    command.wait(TIME_LIMIT)
    return _last_step(records)


def _last_step(records: Path) -> int:
    return max((r["step"] for r in _read(records) if r["kind"] == "step"), default=0)


def _jumps(run: Path) -> int:
    from narrowcast.runs import RunFolder, StrategyRecord

    with RunFolder.open(run) as opened:
        records = opened.records()
    return sum(isinstance(r, StrategyRecord) and bool(r.values.get("horizon")) for r in records)


def _read(records: Path) -> list[dict[str, object]]:
    """Return what is written so far; the last line may be half of one."""
    if not records.exists():
        return []
    *lines, _ = records.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", help="names or globs; none: all but GPU_TOYS")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
