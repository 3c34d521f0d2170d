"""Adapters beside a frozen base: as it came, in e4m3 and widened, in e4m3 and multiplied in fp8.

Run: python benchmarks/frozen_base.py [--device cuda] [--compile] [--steps N] [--json PATH]
                                      [--model FOLDER [--text FILE]]

A Llama of 1.3B random weights on a GPU, a tiny one on a CPU, with adapters of rank 16 by peft on
every linear layer; weights and policy are bf16 (fp32 on a CPU), seeds and batches the same in every
row. `ms` is the median of the steps after the first five, on a CPU of the processor's time, which
other work does not lengthen; `weights` is what the base takes, `peak` all of it, `loss` that of the
last step. `--model` tells what e4m3 loses of a real model's weights in dB, with row scales that are
powers of two, that are any number, and with one scale for a matrix; with `--text`, what that does
to its loss on the first 512 tokens.
"""

import argparse
import gc
import json
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import narrowcast as nc
from narrowcast.precision.quantized_frozen import QuantizedFrozenLayer
from narrowcast.runs import describe_machine

NOT_COUNTED = 5
FORWARD_ONLY = "; *.base_layer: forward=e4m3, grad_input=bf16, grad_weight=bf16, scaling=row"


@dataclass(frozen=True)
class Shape:
    """Of a Llama and of its batches."""

    width: int
    inner: int
    layers: int
    heads: int
    vocabulary: int
    rows: int
    length: int


SHAPES = {
    "cuda": Shape(2048, 5504, 24, 16, 32000, rows=4, length=2048),
    "cpu": Shape(256, 688, 4, 4, 512, rows=2, length=128),
}
CASES = {
    "as it came": (None, ""),
    "e4m3, widened": ("wide", ""),
    "e4m3, fp8 forwards": ("auto", FORWARD_ONLY),
    "e4m3, fp8 both ways": ("fp8", ""),
}


def built(shape: Shape, device: str) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.inner,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads, max_position_embeddings=shape.length,
    )  # fmt: skip
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        base = LlamaForCausalLM._from_config(config, dtype=dtype)
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    torch.manual_seed(1)
    model: nn.Module = get_peft_model(base, adapters).train()
    return model


def base_bytes(model: nn.Module) -> int:
    tensors = [p for p in model.parameters() if not p.requires_grad]
    scales = [m.weight_scale for m in model.modules() if isinstance(m, QuantizedFrozenLayer)]
    return sum(t.nbytes for t in [*tensors, *scales])


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    products, exception = CASES[name]
    device, shape = options.device, SHAPES[options.device]
    on_gpu = device == "cuda"
    model = built(shape, device)
    if products is not None:
        nc.quantize_frozen(model, products=products)
    policy = ("bf16" if on_gpu else "fp32") + exception
    rows = shape.rows * shape.length
    plan = nc.plan(
        model, policy, hardware=nc.detect_hardware(device), gemm_rows=rows, skip_slow_fp8=False
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    run = nc.prepare(model, torch.optim.AdamW(trained, lr=1e-3), policy=plan)
    if options.compile:
        for layer in model.base_model.model.model.layers:
            layer.compile()
    generator = torch.Generator().manual_seed(2)
    size = (options.steps, shape.rows, shape.length)
    # Half of the tokens, so that there is something to learn of random ones.
    batches = torch.randint(0, shape.vocabulary // 2, size, generator=generator).to(device)
    seconds, loss = [], torch.zeros(())
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for batch in batches:
        loss, taken = timed_step(run, model, batch, on_gpu)
        seconds.append(taken)
    return {
        "case": name,
        "ms": 1e3 * statistics.median(seconds[NOT_COUNTED:] or seconds),
        "base_bytes": base_bytes(model),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "loss": float(loss),
        "layers": sorted({m.reason for m in plan.modules if m.frozen}),
    }


def timed_step(run: Any, model: nn.Module, batch: Tensor, on_gpu: bool) -> tuple[Tensor, float]:
    clock = time.perf_counter if on_gpu else time.process_time
    begin = clock()
    with run.autocast():
        loss: Tensor = model(input_ids=batch, labels=batch).loss
    run.step(loss)
    if on_gpu:
        torch.cuda.synchronize()
    return loss.detach(), clock() - begin


def steps(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    print("| base | ms | weights MiB | peak GiB | loss |\n|---|---|---|---|---|")
    for name in CASES:
        row = measured(name, options)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f}"
        held = row["base_bytes"] / 2**20
        print(f"| {name} | {row['ms']:.1f} | {held:.1f} | {peak} | {row['loss']:.4f} |")
        rows.append(row)
    return rows


def snr_db(weight: Tensor, back: Tensor) -> float:
    noise = (weight - back).double().square().sum()
    return 10 * math.log10(float(weight.double().square().sum() / noise))


def cast_with(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def losses(options: argparse.Namespace) -> dict[str, Any]:
    """Tell what e4m3 loses of a model, by the last name of its layers."""
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    model.requires_grad_(False)
    weights = {
        name: m.weight.clone() for name, m in model.named_modules() if isinstance(m, nn.Linear)
    }
    before = loss_on(model, options)
    found = nc.quantize_frozen(model)
    by_kind: dict[str, list[tuple[float, float, float]]] = {}
    for name, kept in found.items():
        weight = weights[name]
        row = cast_with(weight, weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / 448)
        whole = cast_with(weight, weight.abs().amax() / 448)
        last = name.rpartition(".")[2]
        by_kind.setdefault(last, []).append((kept, snr_db(weight, row), snr_db(weight, whole)))
    print("\n| layer | how many | dB: least | median | most | any row scale | one scale |")
    print("|---|---|---|---|---|---|---|")
    table = []
    for kind, values in by_kind.items():
        powers, anything, whole_db = ([v[i] for v in values] for i in range(3))
        medians = [statistics.median(each) for each in (powers, anything, whole_db)]
        cells = (min(powers), medians[0], max(powers), *medians[1:])
        print(f"| {kind} | {len(values)} | {' | '.join(f'{c:.2f}' for c in cells)} |")
        table.append({"layer": kind, "count": len(values), "db": cells})
    result: dict[str, Any] = {"model": Path(options.model).name, "table": table}
    if before is not None:
        after = loss_on(model, options)
        print(f"\nloss on the first 512 tokens: {before:.4f} in fp32, {after:.4f} in e4m3")
        result |= {"loss_fp32": before, "loss_e4m3": after}
    return result


@torch.no_grad()
def loss_on(model: nn.Module, options: argparse.Namespace) -> float | None:
    if options.text is None:
        return None
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = options.text.read_text(encoding="utf-8")[:20000]
    ids = torch.tensor([tokenizer(text)["input_ids"][:512]])
    return float(model(input_ids=ids, labels=ids).loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile", action="store_true", help="each block")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--model", type=Path, help="a folder of a Hugging Face model")
    parser.add_argument("--text", type=Path, help="text to measure that model's loss on")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, Any] = {"environment": describe_machine(), "compiled": options.compile}
    figures["steps"] = steps(options)
    if options.model:
        figures["losses"] = losses(options)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
