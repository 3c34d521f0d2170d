"""Attention over packed rows: the kernel that knows borders, beside what torch has.

Run: python benchmarks/packed_attention.py [--tune] [--json PATH]

The rows of `sft_step.py`. Milliseconds of one layer, forward and forward with backward, by events
of the device, medians; the error is that of outputs and gradients against torch's attention with a
mask in fp32. `causal` knows no borders and is what there is to beat: it computes what nobody sees,
with the fastest kernel there is. `mask` is what transformers makes of positions; `lengths` is
torch's attention over lengths, as far as this torch has one; `flex` is FlexAttention, compiled.
`--tune` tries tiles, one pass at a time.
"""

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from narrowcast.kernels.attention import packed
from narrowcast.kernels.attention.packed import AttentionTiling, packed_attention
from narrowcast.runs import describe_machine
from narrowcast.workloads.sft.attention import conversation_bounds
from sft_contenders.settings import SHAPES, packed_rows

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of heads before tokens, to tokens before heads."""
TILES = [
    AttentionTiling(*each)
    for each in [
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (128, 64, 4, 3),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
        (64, 64, 4, 3),
        (64, 64, 4, 2),
        (64, 128, 8, 3),
        (64, 128, 8, 2),
        (64, 32, 4, 3),
        (32, 64, 4, 3),
        (32, 128, 8, 3),
        (32, 128, 4, 2),
        (128, 32, 4, 3),
    ]
]


def heads_of(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    shape = SHAPES[name]
    chance = torch.Generator(device="cuda").manual_seed(0)

    def drawn(count: int) -> Tensor:
        size = (shape.rows, shape.length, count, shape.width // shape.heads)
        x = torch.randn(size, generator=chance, device="cuda").to(torch.bfloat16).to(dtype)
        return x.transpose(1, 2).requires_grad_()

    return drawn(shape.heads), drawn(shape.key_heads), drawn(shape.key_heads)


def attentions(positions: Tensor) -> Iterator[tuple[str, Attention]]:
    bounds = conversation_bounds(positions)[:, 0]
    yield "narrowcast", lambda q, k, v: packed_attention(q, k, v, bounds)

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2)

    yield "causal", causal
    yield "mask", functools.partial(by_mask, bounds)
    yield "lengths", functools.partial(by_lengths, positions)
    yield "flex", by_flex(bounds)


def by_mask(bounds: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(bounds.shape[-1], device=bounds.device)
    seen = (place >= bounds[:, 0, :, None]) & (place <= place[:, None])
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None]).transpose(1, 2)


def by_lengths(positions: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    flat = positions.reshape(-1)
    end = torch.tensor([flat.numel()], device=flat.device)
    starts = torch.cat([(flat == 0).nonzero().reshape(-1), end]).to(torch.int32)
    longest = int(starts.diff().max())
    # torch 2.11 has no heads that share keys there.
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    q, k, v = (t.transpose(1, 2).flatten(0, 1).contiguous() for t in (q, k, v))
    out: Any = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0))
    attended: Tensor = out.unflatten(0, positions.shape)
    return attended


def by_flex(bounds: Tensor) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    starts = bounds[:, 0].contiguous()

    def sees(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (column <= row) & (column >= starts[b, row])

    length = bounds.shape[-1]
    mask = create_block_mask(sees, len(bounds), None, length, length, device="cuda")
    compiled: Any = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)


def measured(attention: Attention, name: str, exact: list[Tensor] | None) -> dict[str, Any]:
    from triton.testing import do_bench

    heads = heads_of(name)
    grad = torch.randn_like(attention(*heads))

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(*heads), heads, grad)

    told: dict[str, Any] = {
        "forward_ms": do_bench(lambda: attention(*heads), return_mode="median"),
        "both_ms": do_bench(both, return_mode="median"),
    }
    if exact is not None:
        told["error"] = max(
            error(a, b) for a, b in zip(results(attention, heads), exact, strict=True)
        )
    return told


def results(attention: Attention, heads: tuple[Tensor, ...]) -> list[Tensor]:
    out = attention(*heads)
    grad = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, heads, grad)]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def tuned(name: str, attention: Attention) -> list[dict[str, Any]]:
    """Try tiles for each pass with the others as they are; a pass that does not compile is told."""
    usual, width = packed.tilings, SHAPES[name].width // SHAPES[name].heads
    before = usual(width, 2)
    told = []
    for which, choice in itertools.product(range(3), TILES):
        now = tuple(choice if i == which else each for i, each in enumerate(before))
        packed.tilings = lambda *_, now=now: now  # type: ignore[assignment]
        try:
            figures = measured(attention, name, None)
        except Exception as why:  # noqa: BLE001  # too little shared memory, mostly
            told.append({"pass": which, "tiling": choice, "failed": str(why)[:80]})
            continue
        told.append({"pass": which, "tiling": choice, **figures})
    packed.tilings = usual
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tune", action="store_true", help="try tiles")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    environment, rows, tiles = describe_machine(), [], []
    for name in ("smollm2-135m", "llama-1.3b"):
        positions = packed_rows(SHAPES[name], 1)["position_ids"].cuda()
        bounds = conversation_bounds(positions)[:, 0]
        exact = results(functools.partial(by_mask, bounds), heads_of(name, torch.float32))
        for which, attention in attentions(positions):
            row = {"model": name, "attention": which}
            try:
                rows.append(row | measured(attention, name, exact))
            except Exception as why:  # noqa: BLE001  # whoever fails has a row that says so
                rows.append(row | {"failed": str(why).partition("\n")[0][:160]})
            print(rows[-1], flush=True)
        if options.tune:
            found = [t | {"model": name} for t in tuned(name, next(attentions(positions))[1])]
            tiles += found
            for which, key in ((0, "forward_ms"), (1, "both_ms"), (2, "both_ms")):
                ran = [t for t in found if t["pass"] == which and key in t]
                for best in sorted(ran, key=lambda t: t[key])[:4]:
                    print(name, which, best["tiling"], f"{best[key]:.4f}", flush=True)
    print("| model | attention | forward ms | both ms | error |\n|---|---|---|---|---|")
    for row in rows:
        figures = [row.get(k) for k in ("forward_ms", "both_ms", "error")]
        cells = [f"{f:.4g}" if f is not None else row.get("failed", "") for f in figures]
        print(f"| {row['model']} | {row['attention']} | {' | '.join(cells)} |")
    if options.json:
        figures_of_all = {"environment": environment, "rows": rows, "tiles": tiles}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures_of_all, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
