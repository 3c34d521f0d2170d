"""Hyena beside attention and beside the usual FFT convolution, forward and backward, by length.

Run: python benchmarks/hyena.py [--quick] [--only LENGTH ...] [--methods WAY ...] [--skip-tuning]
                                [--skip-model] [--json PATH]

One operator of width 256 with its projections, causal: rows of 1,024 letters up to one row of
1,048,576, as many letters in all. `plain` is written as public implementations are: real FFTs of
twice the length in fp32, every step a tensor that autograd keeps; in fp32, and under bf16 autocast
with the FFT in fp32. `attention` is SDPA, which takes its flash kernel, in bf16. Ours run under
bf16 autocast, once for each method. Contenders take turns in one process; times are events of the
device, medians; memory is the peak of a step above what lay there before it.

Precision is the error of outputs and gradients against the same operator in fp64, relative to their
size (root mean squares). `model` is one step of the preset `long` on a row of 1,048,576 letters.
`--quick` shows in half a minute on a CPU that it runs, at width 32; its times mean nothing.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.runs import describe_machine
from narrowcast.workloads.genomics.models import transforms
from narrowcast.workloads.genomics.models.blocks import Attention
from narrowcast.workloads.genomics.models.config import PRESETS, GenomicConfig
from narrowcast.workloads.genomics.models.convolution import gated_convolution
from narrowcast.workloads.genomics.models.heads import NextTokenHead
from narrowcast.workloads.genomics.models.hyena import HyenaOperator
from narrowcast.workloads.genomics.models.model import GenomicModel

FASTER, MEMORY_SHARE, AT = 2.0, 0.6, 32_768
"""What is asked for against the plain one in fp32, at this length."""
SECONDS, MOST, FEWEST = 1.0, 15, 3
"""Time a contender takes at one length, and bounds on its steps."""
TOO_SLOW = 4.0
"""Seconds of a step of attention after which longer rows are left out."""


class PlainHyena(nn.Module):
    """The operator as it is usually written, with the weights of ours."""

    def __init__(self, ours: HyenaOperator) -> None:
        super().__init__()
        self.ours = ours

    def forward(self, x: Tensor) -> Tensor:
        ours, length = self.ours, x.shape[1]
        projected = ours.project(x).transpose(1, 2)
        taps, bias = ours.short.weight[:, None], ours.short.bias
        short = F.conv1d(projected, taps, bias, padding=2, groups=len(bias))[..., :length]
        last, gate, value = short.split(ours.width, dim=1)
        u = value * gate
        filters = ours.filter(length)[0]
        spectrum = torch.fft.rfft(filters, n=2 * length) / (2 * length)
        of_u = torch.fft.rfft(u.float(), n=2 * length)
        y = torch.fft.irfft(of_u * spectrum, n=2 * length, norm="forward")[..., :length]
        y = (y + u * ours.filter.bias[0][:, None]).to(u.dtype)
        return ours.out((y * last).transpose(1, 2))


@dataclass(frozen=True)
class Setting:
    """Where contenders run, how wide they are, and which ways of ours there are."""

    device: str
    width: int
    letters: int
    methods: list[str]


def operator(length: int, setting: Setting, method: Any = None) -> HyenaOperator:
    torch.manual_seed(0)
    return HyenaOperator(setting.width, max_length=length, method=method).to(setting.device)


def contenders(length: int, setting: Setting) -> dict[str, tuple[nn.Module, bool]]:
    """Return each by name, and whether it runs under bf16 autocast."""
    width, heads = setting.width, max(setting.width // 64, 1)
    ways: dict[str, tuple[nn.Module, bool]] = {
        "plain fp32": (PlainHyena(operator(length, setting)), False),
        "plain bf16": (PlainHyena(operator(length, setting)), True),
        "attention": (Attention(width, heads=heads, causal=True).to(setting.device), True),
    }
    for method in setting.methods:
        ways[f"ours {method}"] = (operator(length, setting, method), True)
    return ways


class Timer:
    """Seconds of a call: by events of a GPU, or by the clock."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __call__(self, call: Callable[[], None]) -> float:
        if self.device == "cpu":
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def peak_bytes(self, call: Callable[[], None]) -> int:
        if self.device == "cpu":
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def step_of(module: nn.Module, x: Tensor, grad: Tensor, bf16: bool) -> Callable[[], None]:
    def step() -> None:
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=bf16):
            y = module(x)
        y.backward(grad.to(y.dtype))
        x.grad = None
        module.zero_grad(set_to_none=True)

    return step


def sequences(length: int, setting: Setting) -> tuple[Tensor, Tensor]:
    shape = (max(setting.letters // length, 1), length, setting.width)
    x = torch.randn(shape, device=setting.device, requires_grad=True)
    return x, torch.randn(shape, device=setting.device, dtype=torch.bfloat16)


def measure(length: int, setting: Setting, skip: set[str]) -> list[dict[str, Any]]:
    timer = Timer(setting.device)
    x, grad = sequences(length, setting)
    steps, told = {}, {}
    for name, (module, bf16) in contenders(length, setting).items():
        if name in skip:
            continue
        step = step_of(module, x, grad, bf16)
        told[name] = {"way": name, "length": length, "rows": len(x)}
        try:
            step()
            told[name]["peak_bytes"] = timer.peak_bytes(step)
            told[name]["once"] = timer(step)
            steps[name] = step
        except torch.OutOfMemoryError:
            told[name]["failed"] = "out of memory"
        except Exception as error:  # noqa: BLE001  # one way that fails is told beside the others
            told[name]["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
    slowest = max((told[name]["once"] for name in steps), default=SECONDS)
    turns = max(FEWEST, min(MOST, int(SECONDS / slowest)))
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            taken[name].append(timer(step))
    for name, seconds in taken.items():
        told[name]["seconds"] = statistics.median(seconds)
        told[name]["turns"] = turns
    return list(told.values())


def sweep(length: int, setting: Setting) -> list[dict[str, Any]]:
    """Try how many numbers of a spectrum are alive at once."""
    timer = Timer(setting.device)
    x, grad = sequences(length, setting)
    told = []
    for method in setting.methods:
        step = step_of(operator(length, setting, method), x, grad, True)
        for numbers in (2**power for power in range(21, 25)):
            with contextlib.suppress(torch.OutOfMemoryError), in_force(numbers):
                step()
                told.append({"method": method, "length": length, "numbers": numbers})
                told[-1]["peak_bytes"] = timer.peak_bytes(step)
                told[-1]["seconds"] = statistics.median(timer(step) for _ in range(5))
    return told


@contextlib.contextmanager
def in_force(numbers: int) -> Iterator[None]:
    """Change what the library is tuned to."""
    usual, transforms.NUMBERS_AT_ONCE = transforms.NUMBERS_AT_ONCE, numbers
    try:
        yield
    finally:
        transforms.NUMBERS_AT_ONCE = usual


def errors(length: int, setting: Setting) -> list[dict[str, Any]]:
    """Return errors of a gated convolution of bf16 sequences against fp64."""
    torch.manual_seed(0)
    channels, device = 8, setting.device
    exact = [torch.randn(2, channels, length, device=device).bfloat16() for _ in range(4)]
    decay = torch.exp(-torch.arange(length, device=device) * 5 / length)
    filters = torch.randn(channels, length, device=device) * decay / length**0.5
    bias = torch.randn(channels, device=device)
    told = []

    def outcome(dtype: torch.dtype, method: Any) -> list[Tensor]:
        value, before, after, grad = (t.to(dtype) for t in exact)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        leaves = [t.detach().requires_grad_() for t in (value, before, after)]
        more = [t.to(wide).requires_grad_() for t in (filters, bias)]
        value, before, after = leaves
        y = gated_convolution(
            value, more[0], bias=more[1], before=before, after=after, method=method
        )
        return [y.detach(), *torch.autograd.grad(y, [*leaves, *more], grad)]

    right = outcome(torch.float64, "torch")
    names = ("result", "value", "before", "after", "filters", "bias")
    rounded = {"rounding to bf16": [t.bfloat16() for t in right]}
    for method in setting.methods:
        with contextlib.suppress(torch.OutOfMemoryError):
            for dtype in (torch.float32, torch.bfloat16):
                of = f"{method}, {str(dtype).removeprefix('torch.')} sequences"
                rounded[of] = outcome(dtype, method)
    for of, found in rounded.items():
        pairs = zip(found, right, strict=True)
        sizes = [float((a.double() - b).norm() / b.norm()) for a, b in pairs]
        told.append({"of": of, **dict(zip(names, sizes, strict=True))})
    return told


def whole_model(device: str, *, quick: bool) -> dict[str, Any]:
    """Take one step of the preset `long` over one row as long as it may be."""
    config = GenomicConfig(vocab_size=16, causal=True, **PRESETS["tiny" if quick else "long"])
    length = config.max_length
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(GenomicModel(config), NextTokenHead(config.width, 16))
        tokens = torch.randint(7, 11, (1, length))
    timer, told = Timer(device), {"length": length, "layers": config.layers}

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(tokens)[0, :-1]
            loss = F.cross_entropy(logits.float(), tokens[0, 1:])
        loss.backward()
        model.zero_grad(set_to_none=True)

    try:
        step()
        told["peak_bytes"] = timer.peak_bytes(step)
        told["seconds"] = statistics.median(timer(step) for _ in range(3))
    except torch.OutOfMemoryError:
        told["failed"] = "out of memory"
    return told


def table(rows: list[dict[str, Any]]) -> None:
    print("| letters of a row | way | ms | of plain fp32 | peak MiB | of plain fp32 |")
    print("|---|---|---|---|---|---|")
    plain = {r["length"]: r for r in rows if r["way"] == "plain fp32"}
    for row in rows:
        if "seconds" not in row:
            print(f"| {row['length']:,} | {row['way']} | {row['failed']} | | | |")
            continue
        beside = plain.get(row["length"], {})
        faster = beside["seconds"] / row["seconds"] if "seconds" in beside else 0.0
        share = row["peak_bytes"] / max(beside.get("peak_bytes", 0), 1)
        row["faster"], row["memory_share"] = round(faster, 3), round(share, 3)
        print(
            f"| {row['length']:,} | {row['way']} | {row['seconds'] * 1000:.2f} | {faster:.2f} × | "
            f"{row['peak_bytes'] / 2**20:,.0f} | {share:.2f} |"
        )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Say whether what is asked for is met, and where attention is overtaken."""
    done = [row for row in rows if "seconds" in row]
    told: dict[str, Any] = {}
    of = {(row["way"], row["length"]): row for row in done}
    for row in done:
        if row["length"] == AT and row["way"].startswith("ours"):
            met = row["faster"] >= FASTER and row["memory_share"] <= MEMORY_SHARE
            told[f"{row['way']}, {AT:,}"] = {
                "faster": row["faster"], "memory_share": row["memory_share"], "met": met
            }  # fmt: skip
    for way in sorted({row["way"] for row in done if row["way"].startswith("ours")}):
        ratios = {
            length: of["attention", length]["seconds"] / of[way, length]["seconds"]
            for name, length in of
            if name == way and ("attention", length) in of
        }
        ahead = [length for length, ratio in ratios.items() if ratio > 1]
        told[f"{way} against attention"] = {
            "crossover": min(ahead, default=None),
            "ratios": {length: round(ratio, 2) for length, ratio in ratios.items()},
        }
    return told


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short rows, on a CPU too")
    parser.add_argument("--only", type=int, nargs="+", help="lengths to measure")
    parser.add_argument("--methods", nargs="+", help="ways of ours to measure")
    parser.add_argument("--skip-model", action="store_true")
    parser.add_argument("--skip-tuning", action="store_true")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser


def main() -> None:
    options = arguments().parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    usual = ["torch", "fused"] if device == "cuda" else ["torch"]
    setting = Setting(
        device=device,
        width=32 if options.quick else 256,
        letters=2**12 if options.quick else 2**20,
        methods=options.methods or usual,
    )
    lengths = options.only or [2**power for power in range(10, setting.letters.bit_length())]
    rows: list[dict[str, Any]] = []
    skip: set[str] = set()
    for length in lengths:
        measured = measure(length, setting, skip)
        rows += measured
        for row in measured:
            if row["way"] == "attention" and row.get("seconds", 0) * 4 > TOO_SLOW:
                skip.add("attention")
    table(rows)
    environment = describe_machine()
    figures: dict[str, Any] = {"environment": environment, "width": setting.width, "rows": rows}
    size = 2048 if options.quick else AT
    parts: dict[str, Callable[[], Any]] = {
        "summary": lambda: summary(rows),
        "errors": lambda: errors(size, setting),
    }
    if not options.quick and not options.skip_tuning:
        tuned = (1024, 16_384, AT, 65_536, 262_144, 1_048_576)
        parts["tuning"] = lambda: [row for length in tuned for row in sweep(length, setting)]
    if not options.skip_model:
        parts["model"] = lambda: whole_model(device, quick=options.quick)
    for name, part in parts.items():
        each = figures[name] = part()
        print(f"\n{name}")
        for line in each if isinstance(each, list) else each.items():
            print(" ", line)
        if options.json:  # after each part: whoever ends the run has what is done
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
