"""One step of a GPT-2-sized model on a GPU: torch's own mixed precision and ours, side by side.

Run: python benchmarks/engine_gpu.py [--json PATH]

Random tokens, 16 × 1024, fused AdamW, clipping at 1.0, device events over 8 steps after 3.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import narrowcast as nc
from narrowcast.runs import describe_environment
from narrowcast.workloads.lm.model import GPT, build_gpt
from narrowcast.workloads.lm.settings import LmModel

BATCH, LENGTH, VOCAB = 16, 1024, 50304
Step = Callable[[], object]


def timed(step: Step) -> tuple[float, float]:
    """Return milliseconds a step, and the peak in GiB."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(8):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 8, torch.cuda.max_memory_allocated() / 2**30


def ready() -> tuple[GPT, torch.optim.AdamW, torch.Tensor]:
    settings = LmModel(layers=12, width=768, heads=12, tied=True)
    device = torch.device("cuda")
    model = build_gpt(settings, vocab=VOCAB, length=LENGTH, seed=0, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return model, optimizer, torch.randint(0, VOCAB, (BATCH, LENGTH + 1), device=device)


def amp_step(dtype: torch.dtype, *, compiled: bool) -> Step:
    model, optimizer, tokens = ready()
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        with torch.autocast("cuda", dtype=dtype):
            logits = forward(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def our_step(policy: str, *, compiled: bool) -> Step:
    model, optimizer, tokens = ready()
    run = nc.prepare(model, optimizer, policy=policy, clip_norm=1.0)
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        with run.compute():
            logits = forward(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        run.step(loss)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    cases: dict[str, Callable[[bool], Step]] = {
        "torch AMP bf16": lambda c: amp_step(torch.bfloat16, compiled=c),
        "narrowcast bf16": lambda c: our_step("bf16", compiled=c),
        "torch AMP fp16 + GradScaler": lambda c: amp_step(torch.float16, compiled=c),
        "narrowcast fp16": lambda c: our_step("fp16", compiled=c),
        "narrowcast bf16, params=bf16, master=split": lambda c: our_step(
            "bf16, params=bf16, master=split", compiled=c
        ),
        "narrowcast fp8-tensor": lambda c: our_step("fp8-tensor", compiled=c),
    }
    rows = []
    for name, make in cases.items():
        for compiled in (False, True):
            milliseconds, gib = timed(make(compiled))
            rows.append(
                {
                    "step": name,
                    "compiled": compiled,
                    "ms": round(milliseconds, 2),
                    "peak GiB": round(gib, 2),
                }
            )
            torch.cuda.empty_cache()
            torch.compiler.reset()
    print("| step | compiled | ms | peak GiB |\n|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    if options.json:
        figures = {"environment": describe_environment(), "rows": rows}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
