"""What a training step spends its time on: kernels by name, for one policy after the other.

Times of kernels, not of the host; captured steps are replayed as in training.

    python benchmarks/step_profile.py [RECIPE] [--policies 'P | Q'] [--json FILE]
"""

import argparse
import json
from collections import Counter
from pathlib import Path

from kernel_times import kernel_times, kind_of
from narrowcast.bench.model import set_up
from narrowcast.bench.peers import build_ours
from narrowcast.runs import describe_machine
from narrowcast.workloads import load_recipe

POLICIES = "bf16, params=bf16, master=split | fp16, params=fp16, master=fp32"
WARM_UP, STEPS, SHOWN = 15, 5, 25


def profiled(recipe: str, policy: str) -> Counter[str]:
    """Return the milliseconds a step spends in each kernel; on a CPU, in each operation."""
    bench = set_up(load_recipe(recipe, []).recipe)
    step = build_ours(bench, policy=policy).step
    on_gpu = bench.device.type == "cuda"
    for _ in range(WARM_UP if on_gpu else 1):
        step()
    return kernel_times(step, steps=STEPS, on_gpu=on_gpu)[0]


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
