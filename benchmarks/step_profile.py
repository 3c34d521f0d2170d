"""What a training step spends its time on: kernels by name, for one policy after the other.

Times of kernels, not of the host; captured steps are replayed as in training.

    python benchmarks/step_profile.py [RECIPE] [--policies 'P | Q'] [--json FILE]
"""

import argparse
import json
from collections import Counter
from pathlib import Path

import torch
from torch.autograd import DeviceType

from narrowcast.bench.model import set_up
from narrowcast.bench.peers.ours import build
from narrowcast.runs import describe_machine
from narrowcast.workloads import load_recipe

POLICIES = "bf16, params=bf16, master=split | fp16, params=fp16, master=fp32"
WARM_UP, STEPS, SHOWN = 15, 5, 25
KINDS = {
    "products": ("nvjet", "gemm", "cutlass", "splitk", "aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("cudnn", "flash", "fmha", "sdpa", "scaled_dot_product"),
}
"""Words in the names of kernels; all other kernels are `other`."""


def kind_of(name: str) -> str:
    """Return what a kernel is for."""
    small = name.lower()
    return next((k for k, words in KINDS.items() if any(w in small for w in words)), "other")


def profiled(recipe: str, policy: str) -> Counter[str]:
    """Return the milliseconds a step spends in each kernel; on a CPU, in each operation."""
    bench = set_up(load_recipe(recipe, []).recipe)
    step = build(bench, policy=policy).cases["step"].open()
    on_gpu = bench.device.type == "cuda"
    for _ in range(WARM_UP if on_gpu else 1):
        step()
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as found:
        for _ in range(STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    for event in found.events():
        if on_gpu and event.device_type == DeviceType.CUDA:
            spent[event.name] += event.device_time_total / STEPS / 1e3
        elif not on_gpu:
            spent[event.name] += event.self_cpu_time_total / STEPS / 1e3
    return spent


def main() -> None:
    """Profile each policy, and print a table of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="?", default="lm/gpt-350m")
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kept: dict[str, dict[str, float]] = {}
    for policy in map(str.strip, options.policies.split("|")):
        spent = profiled(options.recipe, policy)
        kinds: Counter[str] = Counter()
        for name, milliseconds in spent.items():
            kinds[kind_of(name)] += milliseconds
        total = ", ".join(f"{kind} {ms:.2f}" for kind, ms in kinds.most_common())
        print(f"\n{policy}: {sum(spent.values()):.2f} ms of {total}")
        for name, milliseconds in spent.most_common(SHOWN):
            print(f"{milliseconds:9.3f}  {name[:100]}")
        kept[policy] = dict(spent.most_common())
    if options.json:
        figures = {"environment": describe_machine(), "milliseconds": kept}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
