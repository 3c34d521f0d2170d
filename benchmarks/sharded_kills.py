"""Two ranks killed at random moments while they train and save: is the resumed run the same run?

Run: python benchmarks/sharded_kills.py [--recipe] [--kills N] [--seed N] [--json PATH]

Two ranks train an FSDP2 model with bf16 weights and split master weights, and replace one
checkpoint after every step, half of the runs in the background. A SIGKILL ends both ranks,
or one of them, at a moment drawn from the seed. Then two new ranks load what is there, and finish.
The last checkpoint must be that of a run that was never killed, byte for byte: weights, master
weights, moments, EMA, counts and position. First, one process is killed before each file operation
of a save that replaces a checkpoint; what is left must be the old or the new one.

With --recipe, the ranks are those of `narrowcast train quickstart parallel.strategy=fsdp`, and
`narrowcast resume` continues the run. On two ranks, its records, checkpoint and weights must be
those of a run that was never killed, bit for bit. Every fourth is resumed on one rank, and its
losses must be the same but for the order of sums. Exits with 1 if any differs.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS, EVERY, WIDTH, TIME_LIMIT = 30, 1, 1024, 120.0
RECIPE_STEPS = 24
RECIPE = [
    *["quickstart", "parallel.strategy=fsdp", "device=cpu", f"steps={RECIPE_STEPS}"],
    *["model.layers=2", "model.width=64", "model.heads=2", "batch_size=4", "data.length=64"],
    *["data.eval_windows=8", "checkpoint.every=1", "eval.every=0", "ema.decay=0.9"],
    "precision.policy=bf16, params=bf16, master=split",
]
PRELOADED = ["torch", "torch._dynamo", "narrowcast.training.run_state"]
CONTEXT = multiprocessing.get_context("forkserver")


def train(rank: int, folder: Path, rendezvous: Path, *, background: bool) -> None:
    """Train as one of two ranks, from the checkpoint if there is one."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    import narrowcast as nc

    torch.set_num_threads(1)
    where = f"file://{rendezvous}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    policy = "bf16, params=bf16, master=split"
    run = nc.prepare(model, optimizer, policy=policy, ema_decay=0.9, emulate=True)
    checkpoint, done = folder / "checkpoint", 0
    if checkpoint.exists() or checkpoint.with_name("checkpoint.previous").exists():
        done = nc.load_checkpoint(run, checkpoint)["step"]
        (folder / f"resumed-{rank}").write_text(str(done))
    for step in range(done, STEPS):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2 * step + rank))
        with run.autocast():
            loss = run.model(x).square().mean()
        run.step(loss)
        if (step + 1) % EVERY == 0:
            extra = {"step": step + 1}
            nc.save_checkpoint(run, checkpoint, extra=extra, background=background)
    nc.save_checkpoint(run, folder / "final", extra={"step": STEPS})
    dist.destroy_process_group()


def save_twice(folder: Path, last: int) -> None:
    """Save a checkpoint twice, and end with a SIGKILL before file operation `last` of the second.

    Python reports opened, renamed, made and removed files to audit hooks before it touches them.
    """
    import torch

    import narrowcast as nc

    model = torch.nn.Linear(8, 8)
    run = nc.prepare(model, torch.optim.AdamW(model.parameters()), policy="bf16")
    nc.save_checkpoint(run, folder / "checkpoint", extra={"step": 1})
    count = 0

    def kill(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        named = any(str(each).startswith(str(folder)) for each in arguments[:2])
        if named and event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"):
            count += 1
            if count == last:
                (folder.parent / "event").write_text(event)
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    nc.save_checkpoint(run, folder / "checkpoint", extra={"step": 2})


def kill_at_each_operation(scratch: Path) -> list[dict[str, Any]]:
    """Kill a save before each of its file operations, and load what is left."""
    import torch

    import narrowcast as nc

    rows: list[dict[str, Any]] = []
    while True:
        folder = scratch / "save"
        folder.mkdir()
        process = CONTEXT.Process(target=save_twice, args=(folder, len(rows) + 1))
        process.start()
        process.join()
        if process.exitcode == 0:
            return rows
        left = sorted(path.name for path in folder.iterdir())
        model = torch.nn.Linear(8, 8)
        run = nc.prepare(model, torch.optim.AdamW(model.parameters()), policy="bf16")
        step = nc.load_checkpoint(run, folder / "checkpoint")["step"]
        nc.save_checkpoint(run, folder / "checkpoint", extra={"step": 3})  # and it can go on
        whole = nc.load_checkpoint(run, folder / "checkpoint") == {"step": 3}
        clean = [path.name for path in folder.iterdir()] == ["checkpoint"]
        event = (scratch / "event").read_text()
        equal = process.exitcode == -signal.SIGKILL and step in (1, 2) and whole and clean
        rows.append({"before": event, "left": left, "loads_save": step, "equal": equal})
        shutil.rmtree(folder)


def start(folder: Path, name: str, *, background: bool) -> list[Any]:
    """Start two ranks."""
    ranks = [
        CONTEXT.Process(
            target=_quietly, args=(rank, folder, folder / name), kwargs={"background": background}
        )
        for rank in range(2)
    ]
    for each in ranks:
        each.start()
    return ranks


def _quietly(rank: int, folder: Path, rendezvous: Path, *, background: bool) -> None:
    log = os.open(folder / f"{rendezvous.name}-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    train(rank, folder, rendezvous, background=background)


def finish(ranks: list[Any]) -> bool:
    """Wait for the ranks; return whether all ended well."""
    deadline = time.monotonic() + TIME_LIMIT
    for each in ranks:
        each.join(max(deadline - time.monotonic(), 0))
        if each.exitcode is None:
            each.kill()
            each.join()
    return all(each.exitcode == 0 for each in ranks)


def phase(folder: Path) -> str:
    """Return what a kill has interrupted, by what it left."""
    names = {path.name for path in folder.iterdir()}
    unfinished = [folder / name for name in names if ".tmp-" in name and "removed" not in name]
    if unfinished:
        inside = {path.name for path in unfinished[0].glob("*")}
        if "index.json" in inside:
            return "before the rename"
        return f"writing, {len(inside)} of 2 files"
    if "checkpoint.previous" in names:
        return "removing the old one" if "checkpoint" in names else "between the renames"
    if any("removed" in name for name in names):
        return "removing the old one"
    return "training or saving to memory" if "checkpoint" in names else "before the first"


def kill_once(folder: Path, expected: str, *, after: float, which: str, background: bool) -> Any:
    """Kill a run after so many seconds and resume it; return what happened."""
    folder.mkdir()
    ranks = start(folder, "first", background=background)
    time.sleep(after)
    doomed = {"both": ranks, "rank 0": ranks[:1], "rank 1": ranks[1:]}[which]
    for each in doomed:
        if each.is_alive():
            os.kill(each.pid, signal.SIGKILL)
    killed = all(each.join() is None and each.exitcode == -signal.SIGKILL for each in doomed)
    interrupted = phase(folder)
    for each in ranks:  # one that was not killed fails when it misses the other
        each.join(10)
        each.kill()
        each.join()
    ended = finish(start(folder, "second", background=background))
    saved = [folder / f"resumed-{rank}" for rank in range(2)]
    resumed = {int(file.read_text()) for file in saved if file.exists()}
    index = folder / "final" / "index.json"
    equal = ended and index.exists() and index.read_text() == expected
    return {
        "after_seconds": round(after, 3),
        "killed": which if killed else "ended before",
        "background": background,
        "interrupted": interrupted,
        "resumed_from": max(resumed, default=0),
        "equal": equal and len(resumed) <= 1,
    }


def launch(arguments: list[str], folder: Path, ranks: int) -> list[subprocess.Popen[str]]:
    """Start `narrowcast` on several ranks, as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    places = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)]
    return [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "narrowcast", *arguments],
            env={**os.environ, **({k: str(v) for k, v in place.items()} if ranks > 1 else {})},
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in places
    ]


def ended(processes: list[subprocess.Popen[str]]) -> tuple[list[int], str]:
    """Wait for the ranks, and return their exit codes and what they wrote to stderr."""
    texts = [each.communicate(timeout=TIME_LIMIT)[1] for each in processes]
    return [each.returncode for each in processes], "\n".join(texts)


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step of a run."""
    file = folder / "records.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {each["step"]: each["loss"] for each in records if each["kind"] == "step"}


def first_difference(a: Path, b: Path) -> str:
    """Return where two runs differ but in the moments at which checkpoints were written."""
    from narrowcast.runs import CheckpointRecord, RunFolder, same_trajectory
    from narrowcast.training.checkpoints.checkpoint import latest, load_checkpoint
    from narrowcast.training.checkpoints.export import exported_tensors
    from narrowcast.training.checkpoints.verify import first_difference

    records, states = [], []
    for folder in (a, b):
        with RunFolder.open(folder) as run:
            records.append([r for r in run.records() if not isinstance(r, CheckpointRecord)])
        states.append(load_checkpoint(latest(folder / "checkpoints")))
        for name in ("records", "settings"):
            states[-1].pop(name)
    if len(records[0]) != len(records[1]) or not all(map(same_trajectory, *records)):
        return "records"
    return (
        first_difference(*states, where="checkpoint")
        or first_difference(exported_tensors(a), exported_tensors(b))
        or ""
    )


def kill_recipe_once(
    scratch: Path, straight: Path, number: int, *, at: int, wait: float, which: str
) -> dict[str, Any]:
    """Kill a run of a recipe some time after a step and resume it; return what happened."""
    from narrowcast.training.checkpoints.checkpoint import checkpoint_step, latest

    background, folder = bool(number % 2), scratch / f"killed-{number}"
    text = f"checkpoint.background={str(background).lower()}"
    ranks = launch(["train", *RECIPE, text, "--out", str(folder)], scratch, 2)
    while max(losses(folder), default=0) < at and all(each.poll() is None for each in ranks):
        time.sleep(0.01)
    time.sleep(wait)
    for each in {"both": ranks, "rank 0": ranks[:1], "rank 1": ranks[1:]}[which]:
        each.kill()
    codes, said = ended(ranks)
    left = [path.name for path in (folder / "checkpoints").glob("*")]
    last = latest(folder / "checkpoints")
    on = 1 if number % 4 == 3 else 2
    resumed, text = ended(launch(["resume", str(folder)], scratch, on))
    if on == 2:
        difference = first_difference(straight, folder)
    else:
        pairs = zip(losses(straight).items(), losses(folder).items(), strict=True)
        largest = max(abs(a - b) / a if step == other else 1.0 for (step, a), (other, b) in pairs)
        difference = "" if largest < 1e-3 else f"losses differ by {largest:.1e}"
    named = which == "both" or f"{which}" in said.lower()
    return {
        "killed": which,
        "exit_codes": codes,
        "rank_named": named,
        "background": background,
        "unfinished": any(".tmp-" in name for name in left),
        "resumed_from": checkpoint_step(last) if last else 0,
        "on_ranks": on,
        "difference": difference if set(resumed) == {0} else text[-300:],
    }


def kill_recipes(kills: int, seed: int, scratch: Path) -> list[dict[str, Any]]:
    """Kill runs of a recipe at random moments, and print a row for each."""
    choose, rows, straight = random.Random(seed), [], scratch / "straight"
    codes, text = ended(launch(["train", *RECIPE, "--out", str(straight)], scratch, 2))
    assert codes == [0, 0], text
    print("| killed | exit codes | named | background | unfinished | from | ranks | difference |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for number in range(kills):
        row = kill_recipe_once(
            scratch,
            straight,
            number,
            at=choose.randint(1, RECIPE_STEPS - 2),
            wait=choose.uniform(0, 0.1),
            which=choose.choice(["both", "rank 0", "rank 1"]),
        )
        rows.append(row)
        print(f"| {' | '.join(map(str, row.values()))} |", flush=True)
        shutil.rmtree(scratch / f"killed-{number}")
    return rows


def main_of_recipe(options: argparse.Namespace) -> int:
    """Kill runs of a recipe; print a table, and write JSON if requested."""
    from narrowcast.runs import describe_machine

    with tempfile.TemporaryDirectory(prefix="narrowcast-") as scratch:
        rows = kill_recipes(options.kills, options.seed, Path(scratch))
    equal = sum(not row["difference"] and row["rank_named"] for row in rows)
    print(f"\n{equal} of {len(rows)} equal.")
    if options.json:
        figures = {
            "environment": describe_machine(),
            "seed": options.seed,
            "recipe": RECIPE,
            "kills": rows,
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(equal < len(rows))


def main() -> int:
    """Kill runs at random moments, print a table, and write JSON if requested."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--recipe", action="store_true", help="kill runs of a recipe")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.recipe:
        return main_of_recipe(options)
    CONTEXT.set_forkserver_preload(PRELOADED)
    from narrowcast.runs import describe_machine

    environment, rows = describe_machine(), []
    scratch, choose = Path(tempfile.mkdtemp(prefix="narrowcast-")), random.Random(options.seed)
    try:
        print("| killed before | left in the folder | loads save | equal |")
        print("|---|---|---|---|")
        phases = kill_at_each_operation(scratch)
        for row in phases:
            print(f"| {' | '.join(map(str, row.values()))} |", flush=True)
        straight = scratch / "straight"
        straight.mkdir()
        finish(start(straight, "warm-up", background=False))  # the first forks import torch
        shutil.rmtree(straight)
        straight.mkdir()
        began = time.monotonic()
        assert finish(start(straight, "first", background=False))
        seconds = time.monotonic() - began
        expected = (straight / "final" / "index.json").read_text()
        print(f"A run takes {seconds:.1f} s.\n")
        print("| after | killed | background | interrupted | resumed from | equal |")
        print("|---|---|---|---|---|---|", flush=True)
        for number in range(options.kills):
            row = kill_once(
                scratch / str(number),
                expected,
                after=choose.uniform(0.1, 0.95) * seconds,
                which=choose.choice(["both", "rank 0", "rank 1"]),
                background=bool(number % 2),
            )
            rows.append(row)
            texts = [f"{row['after_seconds']:.2f} s", *list(map(str, row.values()))[1:]]
            print(f"| {' | '.join(texts)} |", flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    equal = sum(row["equal"] for row in rows)
    print(f"\n{equal} of {len(rows)} equal, byte for byte.")
    if options.json:
        figures = {
            "environment": environment,
            "seed": options.seed,
            "steps": STEPS,
            "seconds_of_a_run": round(seconds, 2),
            "kills": rows,
            "file_operations": phases,
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(equal < len(rows) or not all(row["equal"] for row in phases))


if __name__ == "__main__":
    sys.exit(main())
