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
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from narrowcast.runs import describe_machine
from sft_contenders.clock import Clock
from sft_contenders.ours import OURS, run_ours
from sft_contenders.peers import TRAINER, TRL, package_version, run_trainer, run_trl
from sft_contenders.processes import measure_in_turn
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


def command_of(name: str, settings: dict[str, Any], wait: bool) -> list[str]:
    command = [sys.executable, __file__, "--work", name, *(["--gated"] * wait)]
    for key, value in settings.items():
        command += [f"--{key.replace('_', '-')}", str(value)]
    return command


def print_short(name: str, row: dict[str, Any]) -> None:
    measured = row.get("failed") or f"{row['ms']:.1f} ms, loss {row['loss']:.4f}"
    print(f"  {name}: {measured}", flush=True)


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
                commands = {name: partial(command_of, name, words) for name in here}
                found = measure_in_turn(
                    commands, Path(folder), together=options.together, ended=print_short
                )
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
