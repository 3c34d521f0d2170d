"""A step of preference tuning: narrowcast and TRL's DPOTrainer on the same pairs.

Run: python benchmarks/dpo.py [--models M,…] [--tune full,lora] [--contenders NAME;…]
                              [--steps N] [--together N] [--quick] [--json PATH]

Models, weights and adapters are those of `sft_step.py`: a Llama in the shape of SmolLM2-135M and
one of 1.3B. A pair has a prompt and two responses of log-normal lengths. The order of the pairs is
the same for everybody. AdamW, gradients clipped at 1, sigmoid loss with beta 0.1. Full training
begins with fp32 weights, which TRL multiplies in bf16 (autocast). narrowcast stores them as bf16
with the missing digits beside (split). A base under adapters is bf16.

- trl: 1.16 or newer, with its fused LM head, reference log-probabilities computed before training,
  gradient checkpointing off, and Liger's layer kernels where Liger is installed. Rows are padded,
  or in one row without padding with FlexAttention. The fastest that runs is the baseline.
- narrowcast: rows padded, or packed; compiled block by block, unless the name says otherwise.

Each contender is a process. Milliseconds are the median of steps by events of the device. The
losses of all steps are in the JSON, and `loss_difference` is the largest difference to TRL's.
`--quick` is for a CPU: two layers, and fp32 for both.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import narrowcast as nc
from narrowcast.runs import TaskInfo, describe_machine
from narrowcast.training.setup import prepare_recipe
from narrowcast.training.step.stepping import Stepper
from narrowcast.workloads import load_recipe
from narrowcast.workloads.sft.attention import Calling, separate_conversations
from narrowcast.workloads.sft.data.preferences import PairedRows
from narrowcast.workloads.sft.data.tokenised import TokenRows
from narrowcast.workloads.sft.objectives import LogProbs, Preferences
from narrowcast.workloads.sft.settings import DpoSection
from sft_contenders.clock import Clock
from sft_contenders.ours import SPLIT
from sft_contenders.peers import (
    check_trl_version,
    common_arguments,
    package_version,
    tokenizer_for_tokens,
    with_timing,
)
from sft_contenders.processes import measure_in_turn
from sft_contenders.settings import CLIP_NORM, LR, SHAPES, adapted, built_model

FASTER_THAN_TRL = 1.15
WARM_UP = 8
BETA = 0.1
PAIRS = {"smollm2-135m": 16, "llama-1.3b": 8, "tiny": 4}
"""Pairs of a step, twice as many rows."""
LONGEST = {"smollm2-135m": 1024, "llama-1.3b": 1024, "tiny": 64}


@dataclass(frozen=True)
class Trl:
    """How TRL's trainer is set up."""

    attention: str = "sdpa"
    padding_free: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class Ours:
    """How steps are laid out and launched."""

    packed: bool = False
    compiled: bool = True


TRL = {
    "trl": Trl(),
    "trl, compiled": Trl(compiled=True),
    "trl, padding-free flex": Trl(attention="flex_attention", padding_free=True),
}
OURS = {
    "narrowcast": Ours(),
    "narrowcast, packed": Ours(packed=True),
    "narrowcast, eager": Ours(compiled=False),
    "narrowcast, packed, eager": Ours(packed=True, compiled=False),
}


def pairs(model: str, steps: int, *, seed: int = 0) -> TokenRows:
    """Return chosen and rejected rows in turn: a prompt of a third, and two responses."""
    chance, shape, longest = np.random.default_rng(seed), SHAPES[model], LONGEST[model]
    rows = []
    for _ in range(PAIRS[model] * steps):
        lengths = chance.lognormal(0.0, 0.6, 3) * longest / 5
        prompt, *answers = lengths.astype(int).clip(2, longest // 3)
        begin = chance.integers(3, shape.vocabulary, prompt)
        for side, count in enumerate(answers):
            # Chosen responses have other tokens than rejected ones, so there is something to learn.
            tokens = chance.integers(3, shape.vocabulary // 2, count) + side * 3
            row = np.concatenate([begin, tokens]).astype(np.int32)
            rows.append((row, np.arange(len(row)) >= prompt))
    return TokenRows.joined(rows)


def run_ours(name: str, options: argparse.Namespace, rows: TokenRows, clock: Clock) -> Any:
    how, on_gpu, size = OURS[name], options.device != "cpu", PAIRS[options.model]
    shape, steps = SHAPES[options.model], options.warm_up + options.steps
    model = built_model(shape, options.tune, options.device)
    if not on_gpu:
        model = model.float()
    separate_conversations(model)
    model = adapted(model) if options.tune == "lora" else model
    model.train()
    policy = f"bf16, {SPLIT}" if options.tune == "full" else "bf16"
    words = {
        "precision.policy": policy if on_gpu else "fp32",
        "steps": steps,
        "batch_size": size,
        "clip_norm": CLIP_NORM,
        "optimizer.lr": LR,
        "optimizer.weight_decay": 0,
        "lr_schedule.name": "constant",
        "lr_schedule.warmup": 0,
        "compile": str(how.compiled and on_gpu).lower(),
        "dpo.loss_type": "sigmoid",
        "dpo.beta": BETA,
    }
    recipe = load_recipe("sft/tiny", [f"{key}={value}" for key, value in words.items()]).recipe
    data = PairedRows(rows=rows, padding=0, flat=how.packed)
    objective = Preferences(
        recipe.section(DpoSection),
        LogProbs(model, Calling(packing=True, bounded=True, context=None)),
        train=data,
        held=None,
        judged=0,
        recipe=recipe,
        device=torch.device(options.device),
    )
    task = nc.Task(
        model=model,
        train_data=data,
        loss=objective.loss,
        evaluate=lambda _: {"loss": 0.0},
        items=objective.items,
        gemm_rows=2 * size * LONGEST[options.model],
        info=TaskInfo(unit="token", loss_parts=objective.loss_parts),
        hooks=objective.hooks(),
    )
    hardware = nc.detect_hardware(options.device)
    plan = nc.plan(model, recipe.precision.policy, hardware=hardware, gemm_rows=task.gemm_rows)
    prepared = prepare_recipe(recipe, task, plan=plan)
    begin = time.perf_counter()
    task.before_first_step(prepared)
    seconds = time.perf_counter() - begin
    step = Stepper(prepared, task, recipe)
    for number in range(steps):
        batch = data.__getitems__(list(range(number * size, (number + 1) * size)))
        if on_gpu:
            batch = {k: t.pin_memory().to("cuda", non_blocking=True) for k, t in batch.items()}
        _, loss = step([batch])
        clock.loss(loss.flatten()[0])
        clock.step_ended()
    return {"policy": recipe.precision.policy, "reference_seconds": round(seconds, 2)}


def run_trl(name: str, options: argparse.Namespace, rows: TokenRows, clock: Clock) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    check_trl_version()
    how, on_gpu, size = TRL[name], options.device != "cpu", PAIRS[options.model]
    shape, steps = SHAPES[options.model], options.warm_up + options.steps
    model = built_model(shape, options.tune, options.device)
    if not on_gpu:
        model = model.float()
    model.set_attn_implementation(how.attention)
    model = adapted(model) if options.tune == "lora" else model
    columns: dict[str, list[list[int]]] = {"prompt_ids": [], "chosen_ids": [], "rejected_ids": []}
    for number in range(0, len(rows), 2):
        tokens, learnt = rows.row(number)
        columns["prompt_ids"].append(tokens[~learnt].tolist())
        columns["chosen_ids"].append(tokens[learnt].tolist())
        tokens, learnt = rows.row(number + 1)
        columns["rejected_ids"].append(tokens[learnt].tolist())

    class Prepared(DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset  # of tokens already

    liger = on_gpu and find_spec("liger_kernel") is not None
    common = common_arguments("", rows=size, steps=steps, device=options.device)
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPOConfig(
            **{**common, "output_dir": folder, "bf16": on_gpu},
            beta=BETA,
            max_length=LONGEST[options.model],
            precompute_ref_log_probs=True,
            padding_free=how.padding_free,
            gradient_checkpointing=False,  # it is on unless told
            use_liger_kernel=liger,
            torch_compile=how.compiled,
            dataloader_num_workers=0 if not on_gpu else 2,
        )
        begin = time.perf_counter()
        trainer = with_timing(Prepared, clock)(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer_for_tokens(),
        )
        seconds = time.perf_counter() - begin
        trainer.train()
    return {"liger": liger, "reference_seconds": round(seconds, 2)}


def work(options: argparse.Namespace) -> None:
    """Be one contender; print the result as a line of JSON."""
    clock = Clock(options.device, warm_up=options.warm_up, gated=options.gated)
    rows = pairs(options.model, options.warm_up + options.steps)
    run = run_trl if options.work in TRL else run_ours
    result = run(options.work, options, rows, clock)
    print(json.dumps({**result, **clock.result()}), flush=True)


def command(name: str, settings: dict[str, Any], wait: bool) -> list[str]:
    words = [sys.executable, __file__, "--work", name, *(["--gated"] * wait)]
    for key, value in settings.items():
        words += [f"--{key.replace('_', '-')}", str(value)]
    return words


def compared(rows: list[dict[str, Any]]) -> None:
    """Add to each row how it compares with the fastest of TRL's."""
    ran = [row for row in rows if "ms" in row]
    trl = [row for row in ran if row["contender"] in TRL]
    best = min(trl, key=lambda row: row["ms"], default=None)
    for row in ran if best is not None else []:
        assert best is not None
        row["ms"] = round(row["ms"], 2)
        row["faster_than_trl"] = round(best["ms"] / row["ms"], 3)
        differences = np.abs(np.array(row["losses"]) - np.array(best["losses"]))
        row["loss_difference"] = round(float(differences.max()), 5)
        if "peak_bytes" in row:
            row["memory_of_trl"] = round(row["peak_bytes"] / best["peak_bytes"], 3)


def shown(name: str, row: dict[str, Any]) -> None:
    measured = row.get("failed") or f"{row['ms']:.1f} ms, loss {row['loss']:.4f}"
    print(f"  {name}: {measured}", flush=True)


def table(rows: list[dict[str, Any]]) -> None:
    keys = ("ms", "loss", "loss_difference", "faster_than_trl", "memory_of_trl")
    print(f"\n| model | contender | {' | '.join(keys)} |\n{'|---' * 7}|")
    for row in rows:
        cells = [row.get("failed", "")] if "failed" in row else [row.get(key, "") for key in keys]
        name = f"{row['model']}, {row['tune']}"
        print(f"| {name} | {row['contender']} | {' | '.join(map(str, cells))} |")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="smollm2-135m,llama-1.3b", help="joined with commas")
    parser.add_argument("--tune", default="full,lora", help="full, lora or both, with a comma")
    parser.add_argument("--contenders", default=";".join([*TRL, *OURS]), help="with semicolons")
    parser.add_argument("--steps", type=int, default=12, help="that are measured")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps before them")
    parser.add_argument("--together", type=int, default=3, help="processes that warm up at once")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    # A process that is a contender gets its name and settings.
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--gated", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    options = arguments().parse_args()
    if options.work:
        work(options)
        return
    names = [name.strip() for name in options.contenders.split(";")]
    if options.quick:
        options.models, options.device, options.together = "tiny", "cpu", 1
        names = ["trl", "narrowcast", "narrowcast, packed"]
    if unknown := [name for name in names if name not in {*TRL, *OURS}]:
        raise SystemExit(
            f"no contender is called {unknown[0]}; there are {', '.join([*TRL, *OURS])}"
        )
    environment, rows = describe_machine(), list[dict[str, Any]]()
    for model in options.models.split(","):
        for tune in options.tune.split(","):
            print(f"{model}, {tune}", flush=True)
            words = {"model": model, "tune": tune, "device": options.device}
            words |= {"steps": options.steps, "warm_up": options.warm_up}
            commands = {name: partial(command, name, words) for name in names}
            with tempfile.TemporaryDirectory() as folder:
                results = measure_in_turn(
                    commands, Path(folder), together=options.together, ended=shown
                )
            about = {"model": model, "tune": tune, "pairs": PAIRS[model]}
            part = [{**about, "contender": name, **row} for name, row in results.items()]
            compared(part)
            rows += part
    table(rows)
    if options.json:
        packages = {name: package_version(name) for name in ("transformers", "trl", "liger-kernel")}
        figures = {"environment": environment, "packages": packages}
        figures |= {"requested": {"faster_than_trl": FASTER_THAN_TRL}, "rows": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
