"""What one optimizer step costs on a GPU: norm, update in each moments format, and both together.

Beside it torch's way to the same end (GradScaler.unscale_, clip_grad_norm_, fused AdamW on fp32
weights, a bf16 working copy) and a plain device copy, whose bandwidth is the floor. Times are of
the device alone, by events, with the host far ahead; medians over interleaved rounds.

`--peers` adds AdamW of optimi, bitsandbytes and torchao over bf16 weights, as far as installed.

    python benchmarks/optimizer_kernel.py [--json FILE] [--sweep] [--peers] [--rounds 7]
"""

import argparse
import functools
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import narrowcast as nc
from device_time import queued_seconds
from narrowcast.kernels.adamw.kernel import AdamKernel, Tiling
from narrowcast.kernels.grad_norm import NormKernel
from narrowcast.precision.gradients.check import clip_factor
from narrowcast.runs import describe_machine

DEVICE = torch.device("cuda")
VOCABULARY = 50304
MODELS = {"500M": (1024, 32), "1.4G": (2048, 24)}
MOMENTS = ("fp32", "bf16", "int8")
COPY_BYTES = 2**31


def gpt(width: int, layers: int) -> nn.Module:
    """The weights of a GPT with an untied head; it is never called."""

    def layer() -> nn.Module:
        linears = [
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        ]
        return nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width), *linears])

    with DEVICE:
        parts = [nn.Embedding(VOCABULARY, width), *(layer() for _ in range(layers))]
        head = nn.Linear(width, VOCABULARY, bias=False)
        return nn.ModuleList([*parts, nn.LayerNorm(width), head])


def device_ms(action: Callable[[], Any]) -> tuple[float, float]:
    """Return the milliseconds an action takes on the device, and those the host takes to ask."""
    (device,), (host,) = queued_seconds(action, 1, device=DEVICE)
    return 1e3 * device, 1e3 * host


def medians(cases: dict[str, Callable[[], Any]], rounds: int) -> dict[str, tuple[float, float]]:
    """Time every case once a round; return the medians on device and host."""
    for action in cases.values():
        action()
        action()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, action in cases.items():
            times[name].append(device_ms(action))
    return {
        name: (
            statistics.median(device for device, _ in found),
            statistics.median(host for _, host in found),
        )
        for name, found in times.items()
    }


class Ours:
    """A prepared model with gradients that stay, and the parts of its step."""

    def __init__(self, width: int, layers: int, moments: str) -> None:
        model = gpt(width, layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.run = nc.prepare(
            model,
            optimizer,
            policy=f"bf16, params=bf16, master=split, moments={moments}",
            clip_norm=1.0,
            fused_optimizer=True,
        )
        self.weights = self.run.engine.weights
        self.gradients = [torch.randn_like(p) * 1e-3 for p in self.weights.all]
        self.present = list(range(len(self.gradients)))
        self.scale = torch.tensor(1 / 65536, device=DEVICE)
        self.finite = torch.tensor(True, device=DEVICE)
        self.give_gradients()
        self.whole()

    def give_gradients(self) -> None:
        for p, gradient in zip(self.weights.all, self.gradients, strict=True):
            p.grad = gradient

    def norm(self) -> Tensor:
        assert self.weights.fused is not None
        return self.weights.fused.norms(self.gradients)

    def update(self, *, metered: bool = False) -> None:
        self.weights.update(self.present, factor=self.scale, finite=self.finite, metered=metered)

    def whole(self) -> None:
        checked = self.weights.check_gradients(self.present, self.scale)
        factor = clip_factor(checked.norm, 1.0) * self.scale
        self.weights.update(self.present, factor=factor, finite=checked.finite, metered=False)

    def step(self) -> None:
        self.give_gradients()
        self.run.step()

    @property
    def kernel(self) -> AdamKernel:
        assert self.weights.fused is not None
        kernel = self.weights.fused._adam
        assert isinstance(kernel, AdamKernel)
        return kernel

    def update_bytes(self) -> int:
        moved = sum(g.nbytes for g in self.gradients)
        for w in self.kernel.weights:
            scales = [s for s in (w.first_scale, w.second_scale) if s is not None]
            moved += 2 * sum(t.nbytes for t in (*w.tensors, *scales))
        return moved

    def norm_bytes(self) -> int:
        return sum(g.nbytes for g in self.gradients)


def torchs_way(width: int, layers: int) -> Callable[[], None]:
    """fp32 weights and gradients, unscaled, clipped, updated and cast, as GradScaler's users do."""
    model = gpt(width, layers)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=1.0)
    scaler.scale(torch.ones((), device=DEVICE))
    copies = [p.detach().bfloat16() for p in weights]
    for p in weights:
        p.grad = torch.randn_like(p) * 1e-3

    def step() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        torch._foreach_copy_(copies, [p.detach() for p in weights])

    return step


def peer_steps(width: int, layers: int) -> dict[str, Callable[[], None]]:
    """Return clipping and AdamW over bf16 weights for each installed library."""
    makers: dict[str, Callable[..., Any]] = {}
    if importlib.util.find_spec("optimi"):
        optimi = importlib.import_module("optimi")
        makers["optimi, kahan"] = functools.partial(optimi.AdamW, kahan_sum=True)
    if importlib.util.find_spec("bitsandbytes"):
        makers["bitsandbytes 8-bit"] = importlib.import_module("bitsandbytes").optim.AdamW8bit
    if importlib.util.find_spec("torchao"):
        torchao = importlib.import_module("torchao.optim")
        for name in ("AdamW8bit", "AdamWFp8", "_AdamW"):
            make = functools.partial(getattr(torchao, name), bf16_stochastic_round=True)
            makers[f"torchao {name}"] = make
    return {name: _peer_step(gpt(width, layers).bfloat16(), make) for name, make in makers.items()}


def _peer_step(model: nn.Module, make: Callable[..., Any]) -> Callable[[], None]:
    weights = list(model.parameters())
    optimizer = make(weights, lr=1e-4)
    for p in weights:
        p.grad = torch.randn_like(p) * 1e-3

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
        optimizer.step()

    return step


def copy_bandwidth(rounds: int) -> float:
    """Bytes a second that a device copy reads and writes."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    found = medians({"copy": lambda: target.copy_(source)}, rounds)
    return 2 * COPY_BYTES / (found["copy"][0] / 1e3)


def measure(size: str, *, rounds: int, bandwidth: float, peers: bool) -> list[dict[str, Any]]:
    """Return one row per case for a model size."""
    width, layers = MODELS[size]
    cases: dict[str, Callable[[], Any]] = {
        "torch: unscale+clip+AdamW+cast": torchs_way(width, layers)
    }
    if peers:
        cases |= peer_steps(width, layers)
    moved: dict[str, int] = {}
    ours = {moments: Ours(width, layers, moments) for moments in MOMENTS}
    cases["norm"] = ours["fp32"].norm
    moved["norm"] = ours["fp32"].norm_bytes()
    for moments, each in ours.items():
        cases[f"update, {moments}"] = each.update
        cases[f"norm+clip+update, {moments}"] = each.whole
        moved[f"update, {moments}"] = each.update_bytes()
        moved[f"norm+clip+update, {moments}"] = each.update_bytes() + each.norm_bytes()
    cases["update, fp32, metered"] = lambda: ours["fp32"].update(metered=True)
    moved["update, fp32, metered"] = moved["update, fp32"]
    parameters = sum(g.numel() for g in ours["fp32"].gradients)
    print(f"{size}: {parameters:,} parameters in {len(ours['fp32'].gradients)} tensors")
    print(f"  {ours['fp32'].run.update_path}; launches {len(ours['fp32'].kernel._launches)}")
    rows = []
    for name, (device, host) in medians(cases, rounds).items():
        floor = moved.get(name, 0) / bandwidth * 1e3
        rows.append(
            {
                "size": size,
                "case": name,
                "ms": device,
                "host_ms": host,
                "bytes": moved.get(name),
                "over_floor": device / floor if floor else None,
            }
        )
    rows.append({"size": size, "case": "run.step() wall", "ms": wall_ms(ours["fp32"].step)})
    return rows


def wall_ms(step: Callable[[], None]) -> float:
    """Return the milliseconds between steps that are taken one after the other."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 100


def sweep(rounds: int) -> None:
    """Print the times of other chunk sizes and numbers of warps."""
    factor, finite = torch.tensor(1e-5, device=DEVICE), torch.tensor(True, device=DEVICE)
    for moments in MOMENTS:
        ours = Ours(*MODELS["500M"], moments)
        cases: dict[str, Callable[[], Any]] = {}
        for chunk in (256, 512, 1024, 2048, 4096):
            for warps in (1, 2, 4, 8):
                if not 8 <= chunk / warps / 32 <= 32:
                    continue
                tiling = Tiling(chunk=chunk, warps=warps)
                kernel = AdamKernel(ours.kernel.weights, device=DEVICE, groups=1, tiling=tiling)
                kernel.write_hyper([nc_hyper(group) for group in ours.run.optimizer.param_groups])
                step = functools.partial(kernel.step, factor=factor, finite=finite, metered=False)
                cases[f"{chunk} by {warps}"] = functools.partial(step, ours.gradients)
        found = medians(cases, rounds)
        best = sorted(found.items(), key=lambda item: item[1][0])
        print(f"update {moments}:", ", ".join(f"{name} {ms[0]:.3f}" for name, ms in best))
    cases = {
        f"{chunk} by {warps}": functools.partial(
            NormKernel(DEVICE, chunk=chunk, warps=warps), ours.gradients
        )
        for chunk in (2048, 4096, 8192, 16384, 32768)
        for warps in (4, 8, 16)
    }
    best = sorted(medians(cases, rounds).items(), key=lambda item: item[1][0])
    print("norm:", ", ".join(f"{name} {ms[0]:.3f}" for name, ms in best))


def nc_hyper(group: dict[str, Any]) -> Any:
    from narrowcast.kernels.adamw.twin import Hyper

    return Hyper(
        lr=group["lr"],
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=True,
    )


def main() -> None:
    """Measure, and print a table last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", nargs="+", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    bandwidth = copy_bandwidth(options.rounds)
    if options.sweep:
        sweep(options.rounds)
        return
    rows = []
    for size in options.sizes:
        rows += measure(size, rounds=options.rounds, bandwidth=bandwidth, peers=options.peers)
        torch.cuda.empty_cache()
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}; ", end="")
    print(f"device copy {bandwidth / 1e12:.2f} TB/s")
    print(f"{'size':5} {'case':33} {'ms':>8} {'GB':>7} {'x floor':>8} {'host ms':>8}")
    for row in rows:
        moved = f"{row['bytes'] / 1e9:7.2f}" if row.get("bytes") else " " * 7
        over = f"{row['over_floor']:8.3f}" if row.get("over_floor") else " " * 8
        host = f"{row['host_ms']:8.2f}" if row.get("host_ms") else " " * 8
        print(f"{row['size']:5} {row['case']:33} {row['ms']:8.3f} {moved} {over} {host}")
    if options.json:
        report = {"environment": describe_machine(), "copy_bytes_per_second": bandwidth}
        options.json.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
