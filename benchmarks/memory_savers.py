"""What saving memory takes: peak and time of a step, beside plain torch's ways, on one model each.

Run: python benchmarks/memory_savers.py [--models gpt llama] [--steps N] [--only NAME …] [--quick]
                                        [--json PATH]

A GPT of this package and a Llama of transformers with random weights learn random tokens in bf16
with AdamW: in narrowcast (`nc.prepare`, weights of bf16 with the digits beside, its fused AdamW)
with each setting of `memory`, and in plain torch (autocast, fp32 weights, torch's fused AdamW)
without any, with `torch.utils.checkpoint` around each block, and under
`torch.autograd.graph.save_on_cpu(pin_memory=True)`. Each is a process of its own. The peak is the
largest `torch.cuda.max_memory_allocated` of a step after the first two, the time the median of
those steps, with the device waited for. The last loss says whether numbers moved: narrowcast's must
be one and the same, up to sums that a GPU takes in another order each time.
`--quick` takes tiny models on a CPU in seconds: there the bytes are those that the graph holds
after a forward pass, and what is offloaded is refused.
"""

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import narrowcast as nc
from narrowcast.errors import UnsupportedError
from narrowcast.precision.plan.memory import repeated_blocks
from narrowcast.runs import describe_machine

POLICY = "bf16, params=bf16, master=split"
NARROWCAST: dict[str, dict[str, Any]] = {
    "none": {},
    "blocks": {"activation_checkpointing": "blocks"},
    "selective": {"activation_checkpointing": "selective"},
    "optimizer": {"offload": ["optimizer"]},
    "activations": {"offload": ["activations"]},
    "blocks+activations": {"activation_checkpointing": "blocks", "offload": ["activations"]},
    "blocks+optimizer": {"activation_checkpointing": "blocks", "offload": ["optimizer"]},
    "selective+optimizer": {"activation_checkpointing": "selective", "offload": ["optimizer"]},
    "blocks+both": {"activation_checkpointing": "blocks", "offload": ["optimizer", "activations"]},
}
TORCH = ("torch", "torch checkpoint", "torch save_on_cpu")


class Shape(NamedTuple):
    layers: int
    width: int
    heads: int
    vocab: int
    length: int
    rows: int


SHAPES = {
    "gpt": Shape(layers=24, width=2048, heads=16, vocab=32000, length=2048, rows=4),
    "llama": Shape(layers=16, width=2048, heads=16, vocab=32000, length=2048, rows=4),
}
QUICK = Shape(layers=3, width=64, heads=2, vocab=128, length=32, rows=4)


def gpt(shape: Shape, device: torch.device) -> nn.Module:
    from narrowcast.workloads.lm.model import build_gpt
    from narrowcast.workloads.lm.settings import LmModel

    settings = LmModel(layers=shape.layers, width=shape.width, heads=shape.heads)
    return build_gpt(settings, vocab=shape.vocab, length=shape.length, seed=0, device=device)


def llama(shape: Shape, device: torch.device) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.width * 11 // 4,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=shape.length,
        use_cache=False,
    )
    with device:
        return LlamaForCausalLM(config).train()


MODELS = {"gpt": gpt, "llama": llama}


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    answer = model(tokens)
    logits = answer if isinstance(answer, Tensor) else answer.logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Loop(NamedTuple):
    """A way to train: what holds over a forward pass, and what is done with its loss."""

    forward: Callable[[], AbstractContextManager[Any]]
    finish: Callable[[Tensor], None]


def loop_of(how: str, model: nn.Module) -> Loop:
    device = next(model.parameters()).device
    if how not in TORCH:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        memory = nc.Memory(**NARROWCAST[how])
        run = nc.prepare(model, optimizer, policy=POLICY, clip_norm=1.0, memory=memory)

        def by_narrowcast(loss: Tensor) -> None:
            run.step(loss)

        return Loop(run.autocast, by_narrowcast)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    if how == "torch checkpoint":
        again = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        for _, block in repeated_blocks(model):
            block.forward = functools.partial(again, block.forward)  # type: ignore[method-assign]

    def forward() -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def by_torch(loss: Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Loop(forward, by_torch)


def work(how: str, name: str, shape: Shape, *, steps: int, device: torch.device) -> dict[str, Any]:
    """Train for some steps in this process; return what they took."""
    model = MODELS[name](shape, device)
    parameters = sum(p.numel() for p in model.parameters())
    try:
        loop = loop_of(how, model)
    except UnsupportedError as error:
        return {"refused": str(error)}
    generator = torch.Generator().manual_seed(1)
    seconds, peaks, loss = [], [], torch.zeros(())
    for step in range(steps + 2):
        tokens = torch.randint(shape.vocab, (shape.rows, shape.length), generator=generator)
        tokens = tokens.to(device)
        gpu = device.type == "cuda"
        if gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        saved = (
            torch.autograd.graph.save_on_cpu(pin_memory=gpu)
            if how == "torch save_on_cpu"
            else nullcontext()
        )
        begun = time.perf_counter()
        held = None if gpu else _Held()
        with saved, held or nullcontext(), loop.forward():
            loss = loss_of(model, tokens)
        kept = 0 if held is None else held.bytes
        loop.finish(loss)
        if gpu:
            torch.cuda.synchronize()
        if step >= 2:
            seconds.append(time.perf_counter() - begun)
            peaks.append(torch.cuda.max_memory_allocated() if gpu else kept)
    return {
        "parameters": parameters,
        "peak_bytes": max(peaks),
        "milliseconds": round(statistics.median(seconds) * 1e3, 2),
        "loss": loss.item(),
    }


class _Held(TorchDispatchMode):
    """Knows which storages were made inside it, on a CPU, and counts those that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    @property
    def bytes(self) -> int:
        return sum(size for made, size in self._made.values() if not made.expired())


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def measured(how: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a way took, in a process of its own where its memory is to be known."""
    if options.quick:
        return work(how, name, QUICK, steps=1, device=torch.device("cpu"))
    words = ["--work", how, "--models", name, "--steps", str(options.steps)]
    command = [sys.executable, str(Path(__file__)), *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["no word of why"])[-1]
        return {"failed": last[:200]}
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def told(how: str, found: dict[str, Any], base: dict[str, Any]) -> str:
    if "peak_bytes" not in found:
        return f"{how:<22}{found.get('refused') or found['failed']}"
    share = found["peak_bytes"] / base["peak_bytes"]
    slower = found["milliseconds"] / base["milliseconds"]
    scale, unit = (2**30, "GiB") if base["peak_bytes"] > 2**30 else (2**20, "MiB")
    return (
        f"{how:<22}{found['peak_bytes'] / scale:>9.2f} {unit}{share:>8.2f}"
        f"{found['milliseconds']:>11.1f}{slower:>8.2f}{found['loss']:>12.6f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--steps", type=int, default=5, help="beyond the first two")
    parser.add_argument("--only", nargs="+", choices=[*NARROWCAST, *TORCH])
    parser.add_argument("--quick", action="store_true", help="tiny models, on a CPU")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--work", choices=[*NARROWCAST, *TORCH], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        (name,) = options.models
        device = torch.device("cuda")
        print(
            json.dumps(work(options.work, name, SHAPES[name], steps=options.steps, device=device))
        )
        return
    environment = describe_machine()
    figures: dict[str, Any] = {"environment": environment, "policy": POLICY}
    for name in options.models:
        shape = QUICK if options.quick else SHAPES[name]
        print(f"\n{name}: {shape}")
        print(f"{'':<22}{'peak':>13}{'of none':>8}{'ms a step':>11}{'of none':>8}{'last loss':>12}")
        rows: dict[str, Any] = {}
        for how in options.only or [*NARROWCAST, *TORCH]:
            rows[how] = measured(how, name, options)
            base = next((row for row in rows.values() if "peak_bytes" in row), rows[how])
            print(told(how, rows[how], base), flush=True)
            figures[name] = {"shape": shape._asdict(), "rows": rows}
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
