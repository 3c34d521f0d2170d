"""Tokens per second of whole models on one GPU, in the protocol of LLMQ.

Run: python benchmarks/llmq_protocol.py [--models NAME,…] [--rows NAME,…] [--steps N] [--json PATH]
                                        [--small]

LLMQ is a trainer in CUDA and C++. It publishes rates for the shapes of Qwen2.5 on one H100, with
sequences of 1,024 tokens and 524,288 tokens per optimizer step. It keeps weights in bf16 without
fp32 digits, and moments in bf16. Here transformers' models with random weights train with
`nc.prepare` and every fp32 digit, compiled, with AdamW and clipping at 1.

A Llama-3-8B shape trains with all its weights too, with sequences of 1,024 and of 8,192 tokens.

Every row is a process of its own: two micro-batches and an update to warm up, then whole optimizer
steps between device events. Gradients of micro-batches are accumulated. Rows are written as they
come. The bars are 1.05 of LLMQ's fp8 rate, and 14,500 tokens per second for Llama-3-8B.

A row takes about one minute to build and compile, and 3 s (0.5B) to 30 s (7B) per optimizer step.
`--small` trains tiny models, also on a CPU, where the rates mean nothing.
"""

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
import narrowcast as nc
from narrowcast.precision.plan.memory import block_names
from narrowcast.runs import describe_machine
from sft_contenders.processes import measure_in_turn

TOKENS_PER_STEP = 2**19
LR = 1e-4
BAR_OF_LLMQ = 1.05


class Shape(NamedTuple):
    """A model, its micro-batch, and the rate it must reach."""

    config: dict[str, Any]
    rows: int
    length: int = 1024
    llmq_fp8: int | None = None
    bar: int | None = None
    family: str = "Qwen2"


def _qwen(width: int, inner: int, layers: int, heads: int, groups: int, *, tied: bool) -> Any:
    return {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": 151936,
        "tie_word_embeddings": tied,
    }  # fmt: skip


LLAMA3_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip
SHAPES = {
    "qwen2.5-0.5b": Shape(_qwen(896, 4864, 24, 14, 2, tied=True), rows=32, llmq_fp8=164_000),
    "qwen2.5-1.5b": Shape(_qwen(1536, 8960, 28, 12, 2, tied=True), rows=16, llmq_fp8=73_000),
    "qwen2.5-3b": Shape(_qwen(2048, 11008, 36, 16, 2, tied=True), rows=16, llmq_fp8=40_000),
    "qwen2.5-7b": Shape(_qwen(3584, 18944, 28, 28, 4, tied=False), rows=8, llmq_fp8=19_000),
    "llama3-8b": Shape(LLAMA3_8B, rows=8, bar=14_500, family="Llama"),
    "llama3-8b-8k": Shape(LLAMA3_8B, rows=1, length=8192, bar=14_500, family="Llama"),
    "tiny": Shape(TINY, rows=4, length=32, llmq_fp8=1),
}


class Way(NamedTuple):
    """A policy, and what is computed again in the backward pass."""

    policy: str
    recompute: str = "none"
    models: tuple[str, ...] = tuple(SHAPES)


BIG = ("qwen2.5-7b", "llama3-8b", "llama3-8b-8k", "tiny")
SPLIT = "params=bf16, master=split"
WAYS = {
    "bf16": Way(f"bf16, {SPLIT}", models=tuple(name for name in SHAPES if name not in BIG[:3])),
    "fp8": Way(f"fp8-delayed, {SPLIT}", models=tuple(n for n in SHAPES if n not in BIG[:3])),
    "fp8, int8 moments": Way(f"fp8-delayed, {SPLIT}, moments=int8", models=("tiny",)),
    "fp8, int8 moments, selective": Way(
        f"fp8-delayed, {SPLIT}, moments=int8", recompute="selective", models=BIG
    ),
    "fp8, int8 moments, auto": Way(
        f"fp8-delayed, {SPLIT}, moments=int8", recompute="auto", models=BIG
    ),
    "fp8, int8 moments, blocks": Way(
        f"fp8-delayed, {SPLIT}, moments=int8", recompute="blocks", models=BIG
    ),
}


def build(shape: Shape, device: torch.device) -> nn.Module:
    """Return the model with random fp32 weights on its device."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{shape.family}Config")(
        **shape.config, max_position_embeddings=shape.length, use_cache=False
    )
    with device:
        model: nn.Module = getattr(transformers, f"{shape.family}ForCausalLM")(config)
    return model.train()


def example(shape: Shape) -> dict[str, Tensor]:
    """Return a micro-batch without memory."""
    ids = torch.zeros(shape.rows, shape.length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Train one row; return its tokens per second and peak memory."""
    shape, way = SHAPES[job["model"]], WAYS[job["row"]]
    device, small = torch.device(job["device"]), job["small"]
    model = build(shape, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    plan = nc.plan(
        model,
        way.policy,
        gemm_rows=shape.rows * shape.length,
        execution="eager" if small else "compiled",
        memory=nc.Memory(activation_checkpointing=way.recompute),
        batch=example(shape) if way.recompute == "auto" else None,
        gradient_accumulation_steps=2 if way.recompute == "auto" else 1,
    )
    run = nc.prepare(model, optimizer, policy=plan, clip_norm=1.0)
    forward: Any = model
    if not small and way.recompute in ("auto", "blocks"):
        for name in block_names(model):  # in a whole compiled model they would run uncompiled
            model.get_submodule(name).compile()
    elif not small:
        forward = torch.compile(model)
    micro_batches = 4 if small else TOKENS_PER_STEP // (shape.rows * shape.length)
    generator = torch.Generator(device).manual_seed(0)
    vocab = shape.config["vocab_size"]

    def draw() -> Tensor:
        drawn = (shape.rows, shape.length)
        return torch.randint(vocab, drawn, generator=generator, device=device)

    batches = [draw() for _ in range(4)]

    def optimizer_step(count: int) -> Tensor:
        for index in range(count):
            ids = batches[index % len(batches)]
            with run.autocast():
                loss: Tensor = forward(input_ids=ids, labels=ids).loss / count
            if index < count - 1:
                run.backward(loss)
        run.step(loss)
        return loss.detach() * count

    optimizer_step(2)
    run.sync()
    if job["gated"]:
        print("ready", flush=True)
        sys.stdin.readline()
    seconds, loss = timed(partial(optimizer_step, micro_batches), job["steps"], device)
    tokens, predicted = micro_batches * shape.rows * shape.length, plan.memory.predicted
    return {
        "tokens_per_second": tokens / seconds,
        "seconds_per_step": seconds,
        "tokens_per_step": tokens,
        "micro_batch": [shape.rows, shape.length],
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "loss": float(loss),
        "parameters": sum(p.numel() for p in model.parameters()),
        "policy": str(plan.policy),
        "fp8_layers": sum("fp8" in module.bytes for module in plan.modules),
        "recompute": plan.memory.chosen or way.recompute,
        "predicted_bytes": predicted.allocated if predicted else None,
        "skipped": run.stats().skipped,
    }


def timed(step: Any, steps: int, device: torch.device) -> tuple[float, Tensor]:
    """Return the mean seconds of a step, and the last loss."""
    if device.type != "cuda":
        begin = time.perf_counter()
        losses = [step() for _ in range(steps)]
        return (time.perf_counter() - begin) / steps, losses[-1]
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin_event.record()
    losses = [step() for _ in range(steps)]
    end_event.record()
    end_event.synchronize()
    return begin_event.elapsed_time(end_event) / 1000 / steps, losses[-1]


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| model | row | tokens/s | of LLMQ's fp8 | peak GiB | fp8 layers | loss | bar |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        if "tokens_per_second" not in row:
            print(f"| {row['model']} | {row['row']} | failed: {row['failed']} | | | | | |")
            continue
        peak = row["peak_bytes"]
        cells = (
            row["model"],
            row["row"],
            f"{row['tokens_per_second']:,.0f}",
            f"{row['of_llmq']:.2f}" if row["of_llmq"] else "",
            f"{peak / 2**30:.1f}" if peak else "",
            row["fp8_layers"],
            f"{row['loss']:.3f}",
            row["result"],
        )
        print("|", " | ".join(map(str, cells)), "|", flush=True)


def judge(row: dict[str, Any]) -> None:
    """Add the ratio to LLMQ's rate, and whether the row reaches its bar."""
    shape, rate = SHAPES[row["model"]], row.get("tokens_per_second", 0.0)
    row["of_llmq"] = rate / shape.llmq_fp8 if shape.llmq_fp8 else None
    bar = BAR_OF_LLMQ * shape.llmq_fp8 if shape.llmq_fp8 else shape.bar
    row["result"] = "pass" if bar and rate >= bar else "fail"


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        print(json.dumps(measure(json.loads(sys.argv[1]))))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", help=f"of {', '.join(SHAPES)}, joined with commas")
    parser.add_argument("--rows", help=f"of {'; '.join(WAYS)}, joined with semicolons")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps that are timed")
    parser.add_argument("--small", action="store_true", help="a tiny model, also without a GPU")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.small:
        raise SystemExit("These models need a GPU, got a CPU. Write --small for a tiny model.")
    usual = ["tiny"] if options.small else [name for name in SHAPES if name != "tiny"]
    models = options.models.split(",") if options.models else usual
    ways = options.rows.split(";") if options.rows else list(WAYS)
    for name, known in [(m, SHAPES) for m in models] + [(w, WAYS) for w in ways]:
        if name not in known:
            raise SystemExit(f"{name!r} is unknown. Choose from {'; '.join(known)}.")
    figures: dict[str, Any] = {"environment": describe_machine(), "rows": []}
    jobs = {
        f"{model}, {way}": {"model": model, "row": way}
        for model in models
        for way in ways
        if model in WAYS[way].models
    }

    def command(job: dict[str, Any], wait: bool) -> list[str]:
        more = {"device": device, "small": options.small, "steps": options.steps, "gated": wait}
        return [sys.executable, __file__, json.dumps(job | more)]

    def ended(name: str, result: dict[str, Any]) -> None:
        row = jobs[name] | result
        judge(row)
        figures["rows"].append(row)
        rate = f"{row.get('tokens_per_second', 0):,.0f} tokens/s"
        print(f"- {name}: {row.get('failed') or rate}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        commands = {name: partial(command, job) for name, job in jobs.items()}
        measure_in_turn(commands, Path(folder), together=1, ended=ended)
    print()
    print_table(figures["rows"])
    sys.exit(1 if any("failed" in row for row in figures["rows"]) else 0)


if __name__ == "__main__":
    main()
