"""A linear layer and its cross-entropy, forward and backward, on a GPU: ours beside what exists.

Run: python benchmarks/linear_loss.py [--json PATH] [--sweep]

16384 rows, 50304 columns, bf16 operands and weights. Milliseconds are medians of 10 by device
events after 3 not counted; peak GiB is above what the operands take. Errors are relative norms of
the gradients against fp32 products of the same operands. `--sweep` times the kernel alone.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.runs import describe_machine

ROWS, COLUMNS = 16384, 50304
WIDTHS = (1024, 2048, 4096)
CHUNKS = (None, 2048, 4096, 8192, 16384)
Loss = Callable[[Tensor, nn.Linear, Tensor], Tensor]


def plain(x: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(x), targets)


def plain_fp32(x: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(x).float(), targets)


def ours(chunk_rows: int | None) -> Loss:
    def loss(x: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
        return nc.linear_cross_entropy(x, head, targets, chunk_rows=chunk_rows)

    return loss


def liger(**settings: object) -> Loss:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def loss(x: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
        result = LigerFusedLinearCrossEntropyFunction.apply(x, head.weight, targets, **settings)
        return result[0] if isinstance(result, tuple) else result

    return loss


def cases() -> dict[str, Loss]:
    found: dict[str, Loss] = {
        "torch eager": plain,
        "torch eager, logits in fp32": plain_fp32,
        "torch compiled": torch.compile(plain, dynamic=False),
    }
    for chunk in CHUNKS:
        found[f"ours, {chunk or 'default'} rows"] = ours(chunk)
    found["ours, default, compiled"] = torch.compile(ours(None), dynamic=False, fullgraph=True)
    try:
        found["liger"] = liger()
    except ImportError as missing:
        print(f"liger is left out: {missing}")
    return found


def operands(width: int) -> tuple[Tensor, nn.Linear, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(ROWS, width, device="cuda", generator=generator).bfloat16().requires_grad_()
    head = nn.Linear(width, COLUMNS, bias=False, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        head.weight.normal_(std=width**-0.5, generator=generator)
    return x, head, torch.randint(0, COLUMNS, (ROWS,), device="cuda", generator=generator)


def gradients(loss: Loss, x: Tensor, head: nn.Linear, targets: Tensor) -> tuple[Tensor, ...]:
    value = loss(x, head, targets)
    return (value.detach(), *torch.autograd.grad(value, (x, head.weight)))


def reference(x: Tensor, head: nn.Linear, targets: Tensor) -> tuple[Tensor, ...]:
    wide = nn.Linear(*head.weight.shape[::-1], bias=False, device="cuda")
    with torch.no_grad():
        wide.weight.copy_(head.weight)
    return gradients(plain, x.detach().float().requires_grad_(), wide, targets)


def errors(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> list[float]:
    return [((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]


def timed(step: Callable[[], object]) -> tuple[float, float]:
    """Return milliseconds a call, and the peak in GiB above what was held before."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - held) / 2**30
    return statistics.median(begin.elapsed_time(end) for begin, end in times), peak


def compared() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for width in WIDTHS:
        torch.compiler.reset()
        inputs = operands(width)
        exact = reference(*inputs)
        for name, loss in cases().items():
            found = errors(gradients(loss, *inputs), exact)
            milliseconds, gib = timed(lambda loss=loss, inputs=inputs: gradients(loss, *inputs))
            rate = 6 * ROWS * COLUMNS * width / milliseconds / 1e9
            rows.append(
                {
                    "width": width,
                    "how": name,
                    "ms": round(milliseconds, 2),
                    "TFLOP/s": round(rate),
                    "peak GiB": round(gib, 2),
                    "error of loss": f"{found[0]:.1e}",
                    "of grad_hidden": f"{found[1]:.1e}",
                    "of grad_weight": f"{found[2]:.1e}",
                }
            )
        del inputs, exact
        torch.cuda.empty_cache()
    return rows


def swept() -> list[dict[str, object]]:
    """Time the kernel alone over its block sizes and warps; 4 bytes a logit is the floor."""
    from narrowcast.kernels.cross_entropy import _rows_kernel

    rows: list[dict[str, object]] = []
    logits = torch.randn(4096, COLUMNS, device="cuda").bfloat16()
    targets = torch.randint(0, COLUMNS, (4096,), device="cuda")
    losses = torch.empty(4096, device="cuda")
    for block in (2048, 4096, 8192, 16384, 32768):
        for warps in (4, 8, 16, 32):
            if not 8 <= block // (32 * warps) <= 64:
                continue

            def launch(block: int = block, warps: int = warps) -> None:
                _rows_kernel[(4096,)](
                    logits, targets, losses, losses, COLUMNS, -100, 0.0, 0.0, 1.0,
                    GRADIENT=True, FACTORS=False, SMOOTH=False, COLUMNS=COLUMNS,
                    BLOCK=block, num_warps=warps,
                )  # fmt: skip

            milliseconds, _ = timed(launch)
            rate = 4 * logits.numel() / milliseconds / 1e9
            rows.append(
                {
                    "block": block,
                    "warps": warps,
                    "ms": round(milliseconds, 3),
                    "TB/s of 4 bytes a logit": round(rate, 2),
                }
            )
    return rows


def show(rows: list[dict[str, object]]) -> None:
    print("| " + " | ".join(rows[0]) + " |\n" + "|---" * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--sweep", action="store_true", help="time the kernel's block sizes too")
    options = parser.parse_args()
    kernel = swept() if options.sweep else []
    if kernel:
        show(kernel)
    rows = compared()
    show(rows)
    if options.json:
        figures = {"environment": describe_machine(), "rows": rows, "kernel": kernel}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
