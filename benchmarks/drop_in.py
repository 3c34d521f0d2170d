"""Steps of other people's models in a loop of one's own: narrowcast's three lines against AMP.

Run on a GPU: python benchmarks/drop_in.py [--json PATH]

ResNet-50 and a Llama of 348M parameters as transformers builds them, eager, fused AdamW, clipping
to 1. Milliseconds of the device, the least of three rounds; ratios within this run.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.runs import describe_environment

WARM_UP, STEPS, ROUNDS = 5, 10, 3
POLICIES = {"resnet-50": ("bf16",), "llama-348m": ("bf16", "bf16, params=bf16, master=split")}
Loss = Callable[[], Tensor]


def resnet() -> tuple[nn.Module, Loss]:
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(num_labels=1000)).cuda()
    model = model.to(memory_format=torch.channels_last)
    images = torch.randn(256, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (256,), device="cuda")
    return model, lambda: model(pixel_values=images, labels=labels).loss


def llama() -> tuple[nn.Module, Loss]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        intermediate_size=2816,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=1024,
    )
    model = LlamaForCausalLM(config).cuda()
    ids = torch.randint(0, 32000, (16, 1024), device="cuda")
    return model, lambda: model(input_ids=ids, labels=ids).loss


def amp_step(model: nn.Module, loss_of: Loss) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def our_step(model: nn.Module, loss_of: Loss, policy: str) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = nc.prepare(model, optimizer, policy=policy, clip_norm=1.0)

    def step() -> None:
        with run.compute():
            loss = loss_of()
        run.step(loss)

    return step


def milliseconds(step: Callable[[], None]) -> float:
    for _ in range(WARM_UP):
        step()
    rounds = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(STEPS):
            step()
        end.record()
        torch.cuda.synchronize()
        rounds.append(begin.elapsed_time(end) / STEPS)
    return min(rounds)


def measured(name: str, build: Callable[[], tuple[nn.Module, Loss]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for policy in ("torch AMP bf16", *POLICIES[name]):
        torch.manual_seed(0)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model, loss_of = build()
        step = amp_step(model, loss_of) if not rows else our_step(model, loss_of, policy)
        ms = milliseconds(step)
        peak = torch.cuda.max_memory_allocated() / 2**30
        ratio = rows[0]["ms"] / ms if rows else 1.0
        rows.append({"model": name, "who": policy, "ms": ms, "speed": ratio, "peak_gib": peak})
        print(f"| {name} | {policy} | {ms:.1f} | {ratio:.3f} × | {peak:.1f} |", flush=True)
        del model, loss_of, step
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    given = parser.parse_args()
    print("| model | who | ms | speed | peak GiB |\n|---|---|---|---|---|")
    rows = [*measured("resnet-50", resnet), *measured("llama-348m", llama)]
    if given.json:
        told = {"environment": describe_environment(), "rows": rows}
        given.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
