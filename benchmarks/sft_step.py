"""A step of fine-tuning: narrowcast, TRL's SFTTrainer and transformers' Trainer on the same rows.

Run: python benchmarks/sft_step.py [--models M,…] [--tune full,lora] [--contenders NAME;…]
                                   [--steps N] [--together N] [--quick] [--json PATH]

A Llama in the shape of SmolLM2-135M and one of 1.3B, random weights from one seed, all of it
trained or adapters of rank 16 on every linear layer; rows of 2,048 tokens, full of documents whose
lengths are log-normal (400 on average, before the last of a row is cut), in one order for
everybody; AdamW, gradients clipped at 1. Full training begins with fp32 weights: the peers keep
them and multiply in bf16 (autocast), narrowcast keeps them as bf16 with the digits beside (split).
A base under adapters is bf16.

- Trainer: bf16=True and nothing else. Its rows are plain, so that its documents see one another.
- trl: 1.16 or newer with its own fused LM head, gradient checkpointing off, Liger's layer kernels
  where Liger is installed, packing as said in `sft_contenders/peers.py`, compiled or not. The
  fastest that runs, whether it keeps documents apart or not, is what others are compared with.
- narrowcast: documents kept apart; compiled block by block and captured, unless the name says else.

Each is a process of its own. Several warm up side by side and are then measured one at a time:
milliseconds are the median of steps by events of the device, memory is the most that was allocated,
the loss is that of the last step. Whoever fails has a row that says why. `--quick` is for a CPU:
two layers, fp32 for narrowcast and no Liger kernels, which need a GPU.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, TextIO

import torch

sys.path.insert(0, str(Path(__file__).parent))
from narrowcast.runs import describe_machine
from sft_contenders.clock import Clock
from sft_contenders.ours import OURS, run_ours
from sft_contenders.peers import TRAINER, TRL, package_version, run_trainer, run_trl
from sft_contenders.settings import SHAPES, packed_rows

FASTER_THAN_TRL, FASTER_THAN_TRAINER = 1.15, 1.3
"""What is asked for, at no more memory than TRL's."""
WARM_UP = 8
"""Steps before any is measured: compilers compile, and the fourth is captured."""
USUAL = [
    TRAINER, "trl, wrapped", "trl, flex", "trl, wrapped, compiled", "trl, flex, compiled",
    "narrowcast", "narrowcast, fp8", "narrowcast, base e4m3", "narrowcast, base e4m3, fp8 products",
]  # fmt: skip
KEEPS_BORDERS = ("narrowcast", "trl, flex", "trl, sdpa")
PATIENCE_SECONDS = 240


def work(options: argparse.Namespace) -> None:
    """Be one contender; print what it took as a line of JSON."""
    shape, name = SHAPES[options.model], options.work
    clock = Clock(options.device, warm_up=options.warm_up, gated=options.gated)
    rows = torch.load(options.rows)
    steps = options.warm_up + options.steps
    given: dict[str, Any] = {"device": options.device, "steps": steps}
    if name == TRAINER:
        told = run_trainer(shape, options.tune, rows, clock, **given)
    elif name in TRL:
        told = run_trl(name, shape, options.tune, rows, clock, **given)
    else:
        told = run_ours(name, shape, options.tune, rows, clock, **given)
    print(json.dumps({**told, **clock.result()}), flush=True)


class Contender:
    """A process that warms up, waits, and measures when it is told to."""

    def __init__(self, name: str, words: dict[str, Any], folder: Path, *, gated: bool) -> None:
        self.name = name
        self._errors = (folder / "errors").open("w+")
        command = [sys.executable, str(Path(__file__)), "--work", name, *(["--gated"] * gated)]
        for key, value in words.items():
            command += [f"--{key.replace('_', '-')}", str(value)]
        quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env={**os.environ, **quiet},
        )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        self._deadline = time.monotonic() + PATIENCE_SECONDS
        self._last = ""

    def ready(self) -> bool:
        """Wait until it is warm; say whether it is."""
        return self._until("ready")

    def go(self) -> None:
        assert self._process.stdin is not None
        self._deadline = time.monotonic() + PATIENCE_SECONDS
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        """Wait for its end; return what it measured, or why there is nothing."""
        self._until(None)
        late = self._process.poll() is None and time.monotonic() > self._deadline
        if late:
            self._process.kill()
        code = self._process.wait()
        self._errors.seek(0)
        errors = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        self._errors.close()
        if code == 0 and self._last.startswith("{"):
            told: dict[str, Any] = json.loads(self._last)
            return told
        why = f"no end after {PATIENCE_SECONDS} s" if late else (errors or ["no word"])[-1]
        return {"failed": why[:300], "errors": errors[-12:]}

    def _read(self, stream: TextIO) -> None:
        for line in stream:
            self._lines.put(line.strip())
        self._lines.put(None)

    def _until(self, word: str | None) -> bool:
        while True:
            try:
                line = self._lines.get(timeout=max(self._deadline - time.monotonic(), 0.01))
            except queue.Empty:
                return False
            if line is None:
                self._lines.put(None)
                return word is None
            if line == word:
                return True
            self._last = line


def measured(
    names: list[str], words: dict[str, Any], folder: Path, *, together: int
) -> dict[str, dict[str, Any]]:
    """Let contenders warm up side by side, and measure one after the other."""
    found: dict[str, dict[str, Any]] = {}
    for first in range(0, len(names), together):
        wave = []
        for place, name in enumerate(names[first : first + together]):
            room = folder / f"{first + place}"
            room.mkdir()
            wave.append(Contender(name, words, room, gated=True))
        warm = {each.name: each.ready() for each in wave}
        for each in wave:
            if warm[each.name]:
                each.go()
            found[each.name] = each.result()
            print(f"  {each.name}: {told_in_short(found[each.name])}", flush=True)
    crowded = [n for n, told in found.items() if "out of memory" in str(told.get("errors"))]
    for name in crowded if together > 1 else []:
        room = folder / f"alone-{names.index(name)}"
        room.mkdir()
        found[name] = Contender(name, words, room, gated=False).result()
        print(f"  {name}, alone: {told_in_short(found[name])}", flush=True)
    return found


def told_in_short(told: dict[str, Any]) -> str:
    return told["failed"] if "failed" in told else f"{told['ms']:.1f} ms, loss {told['loss']:.4f}"


def compared(rows: list[dict[str, Any]]) -> None:
    """Say of each row how it stands to the fastest of TRL's and to the Trainer."""
    ran = [row for row in rows if "ms" in row]
    trl = [row for row in ran if row["contender"] in TRL and not TRL[row["contender"]].pure]
    best = min(trl, key=lambda row: row["ms"], default=None)
    trainer = next((row for row in ran if row["contender"] == TRAINER), None)
    for row in ran:
        row["tokens_per_second"] = round(row["tokens"] / row["ms"] * 1e3)
        if best is not None:
            row["faster_than_trl"] = round(best["ms"] / row["ms"], 3)
            if "peak_bytes" in row:
                row["memory_of_trl"] = round(row["peak_bytes"] / best["peak_bytes"], 3)
        if trainer is not None:
            row["faster_than_trainer"] = round(trainer["ms"] / row["ms"], 3)
        row["borders"] = row["contender"].startswith(KEEPS_BORDERS)


def table(rows: list[dict[str, Any]]) -> None:
    heads = "contender | ms | tokens/s | peak GiB | loss | × TRL | its memory | × Trainer | borders"
    model = None
    for row in rows:
        if (row["model"], row["tune"]) != model:
            model = (row["model"], row["tune"])
            print(f"\n{row['model']}, {row['tune']}\n\n| {heads} |\n{'|---' * 9}|")
        if "ms" not in row:
            print(f"| {row['contender']} | {row['failed']} | | | | | | | |")
            continue
        peak = f"{row['peak_bytes'] / 2**30:.1f}" if "peak_bytes" in row else ""
        cells = [
            row["contender"], f"{row['ms']:.1f}", f"{row['tokens_per_second']:,}", peak,
            f"{row['loss']:.4f}", row.get("faster_than_trl", ""), row.get("memory_of_trl", ""),
            row.get("faster_than_trainer", ""), "kept" if row["borders"] else "not kept",
        ]  # fmt: skip
        print("| " + " | ".join(map(str, cells)) + " |")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="smollm2-135m,llama-1.3b", help="joined with commas")
    parser.add_argument("--tune", default="full,lora", help="full, lora or both, with a comma")
    parser.add_argument("--contenders", default=";".join(USUAL), help="joined with semicolons")
    parser.add_argument("--steps", type=int, default=12, help="that are measured")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps before them")
    parser.add_argument("--together", type=int, default=3, help="processes that warm up at once")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    # A process that is a contender is told which, and what it is given.
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--gated", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    options = arguments().parse_args()
    if options.work:
        work(options)
        return
    if options.quick:
        options.models, options.device = "tiny", "cpu"
    environment = describe_machine()
    names = [name.strip() for name in options.contenders.split(";")]
    if unknown := [name for name in names if name not in {TRAINER, *TRL, *OURS}]:
        raise SystemExit(f"no contender is called {unknown[0]}; there are {TRAINER}, "
                         f"{', '.join([*TRL, *OURS])}")  # fmt: skip
    rows: list[dict[str, Any]] = []
    for model in options.models.split(","):
        shape = SHAPES[model]
        for tune in options.tune.split(","):
            here = [name for name in names if tune == "lora" or "base e4m3" not in name]
            print(f"{model}, {tune}", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "rows.pt"
                torch.save(packed_rows(shape, options.warm_up + options.steps), file)
                words = {"model": model, "tune": tune, "rows": file, "device": options.device}
                words |= {"steps": options.steps, "warm_up": options.warm_up}
                found = measured(here, words, Path(folder), together=options.together)
            shown = {"model": model, "tune": tune, "tokens": shape.tokens}
            part = [{**shown, "contender": name, **told} for name, told in found.items()]
            compared(part)
            rows += part
    table(rows)
    if options.json:
        asked = {"faster_than_trl": FASTER_THAN_TRL, "faster_than_trainer": FASTER_THAN_TRAINER}
        packages = {name: package_version(name) for name in ("transformers", "trl", "liger-kernel")}
        figures = {"environment": environment, "packages": packages, "asked": asked}
        figures |= {"steps": options.steps, "rows": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
