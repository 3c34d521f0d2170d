"""Time per optimizer step of the plug-ins, against our own loop and against the plain trainers.

Run: python benchmarks/plugins.py [--models NAME,…] [--sides NAME;…] [--steps N] [--json PATH]
                                  [--together N] [--minutes N] [--small]

Lightning, the transformers Trainer, TRL's SFTTrainer and accelerate train three language models
with random weights, with the plug-in and plain. The own loop calls `nc.prepare` and `run.step`. All
sides begin with the same fp32 weights and train on the same token batches with AdamW and clipping
at 1. The policy is bf16 with split master weights. The plain trainers use bf16 autocast.

Each side is a process of its own. The own loop and the plug-ins run eager and compiled. The plain
trainers run eager, eager with Liger kernels, and compiled, with fused AdamW. torch 2.11 cannot
compile Liger 0.8.5. TRL uses its own fused LM head, plain and with the plug-in. The fastest variant
of each side counts:

- A plug-in must reach 0.90 of the speed of the own loop, eager or compiled.
- It must be at least 1.15 times as fast as its plain trainer.

Plug-ins cannot run graphed steps, so the graphed own loop is shown but does not count.

Seconds are the median step by device events. The peak is the most memory that was allocated.
`waits` are host synchronisations per step, which torch reports in its sync debug mode. They are
counted in further steps after the timed ones. Waits for CUDA events are not reported. `--together`
lets processes warm up side by side. They are still timed one after the other.

An H200 is expected to need half a minute per eager side and one and a half per compiled side, most
of it imports and compilation. A model has 23 sides: 20 minutes in turn, about 6 with `--together 6`
(4 for llama-1.3b, whose optimizer states would not fit). These are estimates, not measurements.
Rows are written as they come. With the `--json` of an earlier call, the sides in it that were
measured at the same commit, on the same device, are not measured again. After `--minutes` no
further side begins, so that a call can end before its limit and another one continue.

`--small` trains tiny models, also on a CPU. There all sides run in fp32, compiled sides do not use
inductor, the peak is that of the process, and the times say nothing about the bars. `--sides`
selects by the beginnings of names. Exits with status 1 if a side fails or, on a GPU, if a bar is
missed.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from narrowcast.runs import describe_machine
from plugin_sides import (
    COUNTED,
    MODELS,
    OWN,
    PACKAGES,
    POLICY,
    WARM_UP,
    Model,
    Side,
)
from sft_contenders.peers import package_version
from sft_contenders.processes import measure_in_turn

OF_OWN_LOOP, OF_PLAIN = 0.90, 1.15
"""The bars: smallest speed of a plug-in, relative to the own loop and to the plain trainer."""
SMALL = ("tiny-llama", "tiny-qwen3")
IGNORED = -100


def all_sides() -> list[Side]:
    sides = [Side(OWN, execution=mode) for mode in ("eager", "compiled", "graphed")]
    for trainer in [name for name in PACKAGES if name != OWN]:
        for mode in ("eager", "compiled"):
            sides.append(Side(trainer, plugin=True, execution=mode))
            sides.append(Side(trainer, execution=mode))
        sides.append(Side(trainer, liger=True))
    # Those that are compiled warm up much longer, so they come last and together.
    return sorted(sides, key=lambda side: side.execution != "eager")


def make_batches(size: Model, steps: int) -> dict[str, Tensor]:
    """Return rows of random tokens. Half of them are of 97 kinds, so that the loss can fall."""
    generator = torch.Generator().manual_seed(0)
    shape = steps * size.rows, size.length
    ids = torch.randint(3, size.config.vocab_size, shape, generator=generator)
    ids = torch.where(torch.rand(shape, generator=generator) < 0.5, ids % 97 + 3, ids)
    labels = ids.clone()
    labels[:, 0] = IGNORED  # no token predicts it, but some losses count it in their mean
    return {"input_ids": ids, "labels": labels}


def measure(
    sides: list[Side],
    task: dict[str, Any],
    folder: Path,
    *,
    together: int,
    earlier: dict[str, dict[str, Any]],
    deadline: float,
    save: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Run each side in its own process; return what it measured, or why there is nothing."""
    skipped = {side.name: side.skip_reason(task["device"]) for side in sides}
    script = str(Path(__file__).with_name("plugin_sides.py"))

    def command(side: Side, wait: bool) -> list[str]:
        return [sys.executable, script, json.dumps({**task, "side": asdict(side), "gated": wait})]

    def ended(name: str, row: dict[str, Any]) -> None:
        print(f"- {name}: {row.get('failed') or format(row['seconds'], '.4f') + ' s'}", flush=True)
        save({"model": task["model"], "side": name} | row)

    found = dict(earlier)
    waiting = [side for side in sides if not skipped[side.name] and side.name not in found]
    for first in range(0, len(waiting), together):
        if time.monotonic() > deadline:
            break
        commands = {side.name: partial(command, side) for side in waiting[first : first + together]}
        found |= measure_in_turn(commands, folder, together=together, ended=ended)
    none = {"skipped": "out of time, run it again with the same --json"}
    return [
        {"model": task["model"], "side": name}
        | (found.get(name) or ({"skipped": reason} if reason else none))
        for name, reason in skipped.items()
    ]


def compare(sides: list[Side], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add speeds relative to the own loop to the rows of one model; return its bars."""
    timed = [(side, row) for side, row in zip(sides, rows, strict=True) if "seconds" in row]

    def fastest(trainer: str, *, plugin: bool = False) -> dict[str, Any] | None:
        variants = [
            row
            for side, row in timed
            if (side.trainer, side.plugin) == (trainer, plugin) and side.execution != "graphed"
        ]
        return min(variants, key=lambda row: row["seconds"], default=None)

    own = fastest(OWN)
    for _, row in timed:
        row["speed_of_own_loop"] = own["seconds"] / row["seconds"] if own else None
    bars = []
    for trainer in dict.fromkeys(side.trainer for side in sides if side.plugin):
        plugin = fastest(trainer, plugin=True)
        for against, bar in ((OWN, OF_OWN_LOOP), (trainer, OF_PLAIN)):
            other = fastest(against)
            row = {"model": rows[0]["model"], "plugin": trainer, "against": against, "bar": bar}
            if plugin and other:
                speed = other["seconds"] / plugin["seconds"]
                row |= {"variant": plugin["side"], "other_variant": other["side"], "speed": speed}
                row |= {"peak": plugin["peak_bytes"] / other["peak_bytes"]}
                if "waits_per_step" in plugin:
                    row |= {"waits": plugin["waits_per_step"], "others": other["waits_per_step"]}
            row["result"] = "not measured" if "speed" not in row else "fail"
            if row.get("speed", 0.0) >= bar:
                row["result"] = "pass"
            bars.append(row)
    return bars


def print_tables(rows: list[dict[str, Any]], bars: list[dict[str, Any]]) -> None:
    print("| side | seconds | peak GiB | waits | last loss | speed of own loop |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        if "seconds" not in row:
            word = "skipped" if "skipped" in row else "failed"
            print(f"| {row['side']} | {word}: {row[word]} | | | | |")
            continue
        speed = row["speed_of_own_loop"]
        cells = (
            row["side"],
            f"{row['seconds']:.4f}",
            f"{row['peak_bytes'] / 2**30:.2f}",
            row.get("waits_per_step", ""),
            f"{row['loss']:.4f}",
            "" if speed is None else f"{speed:.2f}",
        )
        print("|", " | ".join(map(str, cells)), "|")
    print("\n| plug-in | against | speed | bar | result | peak | waits | waits of the other |")
    print("|---|---|---|---|---|---|---|---|")
    for bar in bars:
        measured = "speed" in bar
        cells = (
            bar.get("variant", f"{bar['plugin']} plug-in"),
            bar.get("other_variant", bar["against"]),
            f"{bar['speed']:.2f}" if measured else "",
            bar["bar"],
            bar["result"],
            f"{bar['peak']:.2f}" if measured else "",
            bar.get("waits", ""),
            bar.get("others", ""),
        )
        print("|", " | ".join(map(str, cells)), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", help=f"of {', '.join(MODELS)}, joined with commas")
    parser.add_argument("--sides", default="", help="such as 'own loop;TRL', with semicolons")
    parser.add_argument("--steps", type=int, default=20, help="that are timed")
    parser.add_argument("--together", type=int, default=1, help="processes that warm up at once")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="to begin sides in")
    parser.add_argument("--small", action="store_true", help="tiny models, also without a GPU")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.small:
        raise SystemExit("The models need a GPU, got a CPU. Write --small to train tiny models.")
    usual = [name for name in MODELS if (name in SMALL) == options.small]
    models = options.models.split(",") if options.models else usual
    if unknown := [name for name in models if name not in MODELS]:
        raise SystemExit(f"--models has no {unknown[0]}. Choose from {', '.join(MODELS)}.")
    begins = tuple(options.sides.split(";"))
    sides = [side for side in all_sides() if side.name.startswith(begins)]
    packages = dict.fromkeys(package for names in PACKAGES.values() for package in names)
    figures: dict[str, Any] = {
        "environment": describe_machine(),
        "packages": {name: package_version(name) for name in [*packages, "liger-kernel"]},
        "policy": POLICY if device == "cuda" else "fp32",
        "steps": options.steps,
        "rows": [],
        "bars": [],
    }
    deadline = time.monotonic() + 60 * options.minutes
    earlier = measured_earlier(figures, options.json)
    print(json.dumps({key: figures[key] for key in ("environment", "packages", "policy")}))
    counted = 0 if device == "cpu" else COUNTED
    for name in models:
        size = MODELS[name]()
        print(f"\n{name}, {size.rows} x {size.length} tokens per step\n", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "batches.pt"
            torch.save(make_batches(size, WARM_UP + options.steps + counted), file)
            task = {"model": name, "device": device, "steps": options.steps, "batches": str(file)}
            figures["rows"] = [row for row in figures["rows"] if row["model"] != name]
            before = len(figures["rows"])
            figures["rows"] += [row for row in earlier if row["model"] == name]
            save = partial(add_row, figures, options.json)
            rows = measure(
                sides,
                task,
                Path(folder),
                together=options.together,
                earlier={row["side"]: row for row in earlier if row["model"] == name},
                deadline=deadline,
                save=save,
            )
        bars = compare(sides, rows)
        print_tables(rows, bars)
        others = {row["side"] for row in rows}
        rows += [row for row in figures["rows"][before:] if row["side"] not in others]
        figures["rows"][before:] = rows
        figures["bars"] += bars
        write(figures, options.json)
    missed = device == "cuda" and any(bar["result"] == "fail" for bar in figures["bars"])
    sys.exit(1 if missed or any("failed" in row for row in figures["rows"]) else 0)


def measured_earlier(figures: dict[str, Any], path: Path | None) -> list[dict[str, Any]]:
    """Return the rows with measurements in a file of an earlier call; put them into `figures`."""
    if path is None or not path.exists():
        return []
    before = json.loads(path.read_text())

    def setup(values: dict[str, Any]) -> dict[str, Any]:
        machine = values["environment"]
        same = {key: machine[key] for key in ("commit", "torch", "gpus")}
        return same | {key: values[key] for key in ("packages", "policy", "steps")}

    if setup(before) != setup(figures):
        raise SystemExit(f"{path} has measurements of another setup. Write another --json.")
    figures["rows"] = [row for row in before["rows"] if "seconds" in row]
    return list(figures["rows"])


def add_row(figures: dict[str, Any], path: Path | None, row: dict[str, Any]) -> None:
    figures["rows"].append(row)
    write(figures, path)


def write(figures: dict[str, Any], path: Path | None) -> None:
    """Write what is measured so far."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
