"""What fused pieces give a Llama of transformers: narrowcast's, Liger's and none, in one run.

Run on a GPU: python benchmarks/fused.py [--modes eager compiled] [--only WORD …] [--kernels]
                                         [--json PATH]

A Llama of 348M parameters (24 layers of width 1024, 16 heads, 8 of keys, MLP 2816, vocabulary
32,000), 16 × 1024 random tokens, fused AdamW, clipping to 1, each way in a process of its own.
Milliseconds of the device for a step, the least of three rounds; the most memory of a step;
the loss after all steps, by which ways that compute the same can be told. Liger's kernels where
liger_kernel is installed, as it puts them into the model itself. `--kernels` measures the single
kernels instead, forward and backward, against torch's composed and compiled functions: the share of
a tensor's traffic at the rate of a copy. A layer norm is torch's in bf16, and widened as a policy
has it that normalises in fp32.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.runs import describe_machine

WARM_UP, STEPS, ROUNDS = 5, 10, 3
SPLIT = "bf16, params=bf16, master=split"
PIECES = ("loss", "mask", "rms_norm", "rotary", "swiglu")
Way = dict[str, Any]

WAYS: dict[str, Way] = {
    "AMP": {},
    "AMP + Liger": {"liger": True},
    "bf16, unfused": {"policy": "bf16", "fuse": "none"},
    "bf16, fused": {"policy": "bf16", "fuse": "auto"},
    "bf16 + split, unfused": {"policy": SPLIT, "fuse": "none"},
    "bf16 + split, fused": {"policy": SPLIT, "fuse": "auto"},
    "bf16 + split, all by name": {"policy": SPLIT, "fuse": list(PIECES)},
    **{f"bf16 + split, {piece}": {"policy": SPLIT, "fuse": [piece]} for piece in PIECES},
    "fp8-delayed + split, fused": {"policy": f"fp8-delayed, {SPLIT[6:]}", "fuse": "auto"},
}
COMPILED_WAYS = [way for way in WAYS if way.removeprefix("bf16 + split, ") not in PIECES[1:]]


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        intermediate_size=2816,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=1024,
        use_cache=False,
    )
    return LlamaForCausalLM(config).cuda().train()


def step_of(way: Way, *, compiled: bool) -> tuple[Callable[[], Tensor], list[str]]:
    """Return one training step, and what of it is fused, in words."""
    model = llama()
    ids = torch.randint(0, 32000, (16, 1024), device="cuda")
    if way.get("liger"):
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if "policy" not in way:
        run_model = torch.compile(model) if compiled else model

        def amp_step() -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = run_model(input_ids=ids, labels=ids).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return amp_step, ["by Liger"] if way.get("liger") else []

    import narrowcast as nc

    run = nc.prepare(model, optimizer, policy=way["policy"], clip_norm=1.0, fuse=way["fuse"])
    our_model = torch.compile(model) if compiled else model

    def our_step() -> Tensor:
        with run.autocast():
            loss = our_model(input_ids=ids, labels=ids).loss
        run.step(loss)
        return loss.detach()

    return our_step, [str(piece) for piece in run.plan.fused]


def measure_step(name: str, mode: str) -> dict[str, Any]:
    step, told = step_of(WAYS[name], compiled=mode == "compiled")
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    rounds, loss = [], torch.zeros(())
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(STEPS):
            loss = step()
        end.record()
        torch.cuda.synchronize()
        rounds.append(begin.elapsed_time(end) / STEPS)
    return {
        "way": name,
        "mode": mode,
        "ms": round(min(rounds), 2),
        "all_ms": [round(each, 2) for each in rounds],
        "gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "loss": round(float(loss), 4),
        "fused": told,
    }


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """As transformers has it between 16-bit layers, with a weight in fp32."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (weight * normed).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As between 16-bit layers with weights in fp32: widened, normalised, narrowed."""
    return F.layer_norm(x.to(weight.dtype), x.shape[-1:], weight, bias).to(x.dtype)


def turned(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, ...]:
    def one(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cosine[:, :, None] + torch.cat((-second, first), -1) * sine[:, :, None]

    return one(query), one(key)


Case = tuple[Callable[..., Any] | None, Callable[..., Any], Any, int]


def kernel_cases(tokens: int) -> dict[str, Case]:
    """Return for each kernel ours, torch's, the tensors they take, and the bytes they must move."""
    from narrowcast.kernels import norms
    from narrowcast.kernels.gated import gated, gated_halves
    from narrowcast.kernels.rotary import turn_halves

    def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()

    def our_rms(x: Tensor, weight: Tensor) -> Tensor:
        return norms.rms_norm(x, weight, eps=1e-6, offset=0.0, rounds=False, dtype=x.dtype)

    def our_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return norms.layer_norm(x, weight, bias, eps=1e-5, dtype=x.dtype)

    cases: dict[str, Case] = {}
    for width in (128, 1024, 4096):
        rows = tokens * 1024 // width
        given = (drawn(rows, width), drawn(width, dtype=torch.float32))
        moved = 2 * 5 * rows * width
        cases[f"rms_norm, width {width}"] = (our_rms, rms, given, moved)
        for weights in (torch.float32, torch.bfloat16):
            of_norm = (given[0], *(drawn(width, dtype=weights) for _ in range(2)))
            name = f"layer_norm, width {width}, {str(weights).removeprefix('torch.')} weights"
            cases[name] = (our_layer_norm, layer_norm, of_norm, moved)
    gate, value = drawn(tokens, 2816), drawn(tokens, 2816)
    of_gate = 2 * 8 * gate.numel()
    cases["swiglu"] = (
        lambda a, b: gated(a, b, "silu"),
        lambda a, b: F.silu(a) * b,
        (gate, value),
        of_gate,
    )
    cases["swiglu of halves"] = (
        lambda both: gated_halves(both, "silu"),
        lambda both: F.silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1],
        (drawn(tokens, 5632),),
        of_gate,
    )
    cases["geglu, tanh"] = (
        lambda a, b: gated(a, b, "gelu_tanh"),
        lambda a, b: F.gelu(a, approximate="tanh") * b,
        (gate, value),
        of_gate,
    )
    batch, angles = tokens // 1024, torch.randn(2, 1, 1024, 64, device="cuda").bfloat16()
    heads = (drawn(batch, 1024, 16, 64), drawn(batch, 1024, 8, 64))
    moved = 2 * 4 * sum(each.numel() for each in heads)
    cases["rotary"] = (
        lambda q, k: turn_halves(q, k, *angles),
        lambda q, k: turned(q, k, *angles),
        heads,
        moved,
    )
    return cases


def milliseconds(work: Callable[[], Any]) -> float:
    for _ in range(5):
        work()
    times = []
    for _ in range(30):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def measure_kernels(tokens: int = 65536) -> list[dict[str, Any]]:
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    rate = 2 * source.numel() / milliseconds(lambda: target.copy_(source))  # bytes a millisecond
    rows = []
    for name, (ours, theirs, given, moved) in kernel_cases(tokens).items():

        def both(function: Callable[..., Any], given: Any = given) -> Callable[[], Any]:
            def once() -> None:
                results = function(*given)
                results = results if isinstance(results, tuple) else (results,)
                torch.autograd.grad(results, given, results)

            return once

        row: dict[str, Any] = {"kernel": name, "at the rate of a copy": moved / rate}
        row["narrowcast"] = milliseconds(both(ours)) if ours else "none"
        row["torch"] = milliseconds(both(theirs))
        row["torch, compiled"] = milliseconds(both(torch.compile(theirs)))
        rows.append({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
    return rows


def show_kernels(rows: list[dict[str, Any]]) -> None:
    print("| kernel, forward and backward | at the rate of a copy | ours | torch | compiled |")
    print("|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(str(each) for each in row.values()) + " |")


def show_steps(rows: list[dict[str, Any]]) -> None:
    print("| way | mode | ms | GiB | loss |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(f"| {row['way']} | {row['mode']} | {row['ms']} | {row['gib']} | {row['loss']} |")


def asked_ways(modes: list[str], only: list[str]) -> list[tuple[str, str]]:
    chosen = [way for way in WAYS if not only or any(word in way for word in only)]
    if importlib.util.find_spec("liger_kernel") is None:
        chosen = [way for way in chosen if not WAYS[way].get("liger")]
    return [
        (way, mode) for mode in modes for way in chosen if mode == "eager" or way in COMPILED_WAYS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"], default=["eager"])
    parser.add_argument("--only", nargs="+", default=[], help="ways with one of these words")
    parser.add_argument("--kernels", action="store_true", help="measure single kernels")
    # A process that measures one way is told which.
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(measure_step(*options.work)))
        return
    figures: dict[str, Any] = {"environment": describe_machine()}
    if options.kernels:
        figures["kernels"] = measure_kernels()
        show_kernels(figures["kernels"])
    else:
        figures["steps"] = []
        for way, mode in asked_ways(options.modes, options.only):
            command = [sys.executable, str(Path(__file__)), "--work", way, mode]
            ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if ran.returncode:
                print(f"{way}, {mode}: ended with {ran.returncode}", file=sys.stderr)
                continue
            figures["steps"].append(json.loads(ran.stdout.splitlines()[-1]))
            print(figures["steps"][-1], file=sys.stderr, flush=True)
        show_steps(figures["steps"])
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
