"""What an eager step of somebody else's model launches and waits for: AMP, and ours by the drop-in.

Milliseconds of a step, launches, how long of it the device was busy, and with which kind of kernel.

    python benchmarks/model_profile.py [--models NAME ...] [--ways NAME ...] [--json FILE]
                                       [--label TEXT] [--tiny]

It asks nothing of narrowcast but `prepare` and which commit it is, so `PYTHONPATH` may name the
sources of an older commit and `--label` say so: rows of several calls stand side by side in a file.
"""

import argparse
import importlib
import json
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import narrowcast as nc
from kernel_times import KINDS, kernel_times, kind_of
from narrowcast.runs.environment import describe_environment

WARM_UP, STEPS, SHOWN = 5, 3, 12
SPLIT = "bf16, params=bf16, master=split"
WAYS = {"AMP": "", "bf16": "bf16", "bf16 + split": SPLIT}


def llama(device: torch.device, *, tiny: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the Llama of 348M weights of `narrowcast bench models`, and a batch."""
    width, layers, batch = (64, 2, (2, 32)) if tiny else (1024, 24, (16, 1024))
    config = transformers.LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, intermediate_size=width * 11 // 4,
        num_attention_heads=16, num_key_value_heads=8, vocab_size=32000,
        max_position_embeddings=1024, use_cache=False,
    )  # fmt: skip
    with device:
        model = transformers.LlamaForCausalLM(config)
        ids = torch.randint(config.vocab_size, batch)
    return model, {"input_ids": ids, "labels": ids}


def resnet(device: torch.device, *, tiny: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return ResNet-50, channels last, and a batch."""
    count, size = (2, 64) if tiny else (256, 224)
    config = transformers.ResNetConfig(num_labels=1000)
    with device:
        model = transformers.ResNetForImageClassification(config)
        pictures, labels = torch.randn(count, 3, size, size), torch.randint(1000, (count,))
    last = torch.channels_last
    return model.to(memory_format=last), {
        "pixel_values": pictures.contiguous(memory_format=last),
        "labels": labels,
    }


MODELS = {"resnet-50": resnet, "llama-348m": llama}


def step_of(
    model: nn.Module, batch: dict[str, Tensor], policy: str, device: torch.device
) -> Callable[[], None]:
    """Return a training step: plain mixed precision where there is no policy, else ours."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if policy:
        run = nc.prepare(model, optimizer, policy=policy, clip_norm=1.0)

        def ours() -> None:
            with run.autocast():
                loss = model(**batch).loss
            run.step(loss)

        return ours

    def region() -> AbstractContextManager[Any]:
        on_gpu = device.type == "cuda"
        return torch.autocast("cuda", dtype=torch.bfloat16) if on_gpu else nullcontext()

    def amp() -> None:
        with region():
            loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return amp


def profiled(step: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """Return launches, busy milliseconds and kernels of a step, and how long it took in all."""
    on_gpu = device.type == "cuda"
    for _ in range(WARM_UP if on_gpu else 1):
        step()
    elapsed = elapsed_ms(step) if on_gpu else 0.0  # of a CPU nothing is said
    spent, launched = kernel_times(step, steps=STEPS, on_gpu=on_gpu)
    kinds = Counter[str]()
    for name, milliseconds in spent.items():
        kinds[kind_of(name)] += milliseconds
    return {
        "elapsed_ms": elapsed,
        "busy_ms": sum(spent.values()),
        "launches": sum(launched.values()),
        "kinds_ms": dict(kinds.most_common()),
        "kernels": [
            {"name": name[:120], "ms": milliseconds, "launches": launched[name]}
            for name, milliseconds in spent.most_common(SHOWN)
        ],
    }


def elapsed_ms(step: Callable[[], None]) -> float:
    """Return the milliseconds of a step without a profiler, by events on the device."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    for _ in range(2 * STEPS):
        step()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / (2 * STEPS)


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print all rows of a file as one table."""
    names = [*KINDS, "other"]
    print(f"| model | who | ms | launches | busy ms | {' | '.join(names)} |")
    print(f"|{'---|' * (5 + len(names))}")
    for row in rows:
        cells = [f"{row['kinds_ms'].get(name, 0.0):.1f}" for name in names]
        print(
            f"| {row['model']} | {row['who']} | {row['elapsed_ms']:.1f} | {row['launches']:.0f} | "
            f"{row['busy_ms']:.1f} | {' | '.join(cells)} |"
        )


def main() -> None:
    """Profile each way of each model, add the rows to a file, and print all it has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--label", default="", help="said of our rows, such as: before")
    parser.add_argument("--tiny", action="store_true", help="to see that it runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sources = options.label or describe_environment()["commit"]
    figures: dict[str, Any] = {"environment": machine(), "rows": []}
    if options.json and options.json.exists():
        figures = json.loads(options.json.read_text())
    for model_name in options.models:
        for way in options.ways:
            torch.manual_seed(0)
            model, batch = MODELS[model_name](device, tiny=options.tiny)
            step = step_of(model.train(), batch, WAYS[way], device)
            label = f", {options.label}" if options.label and WAYS[way] else ""
            row = {"model": model_name, "who": f"{way}{label}", "sources": sources}
            row |= profiled(step, device)
            figures["rows"].append(row)
            if options.json:
                options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
            del model, batch, step
    print_rows(figures["rows"])


def machine() -> dict[str, Any]:
    """Return what ran this: an older commit describes itself in other words, or not at all."""
    on_gpu = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "transformers": importlib.import_module("transformers").__version__,
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
    }


if __name__ == "__main__":
    main()
