"""Are the numbers of a step the same before and after a change? One hash per policy and device.

Trains quickstart for 60 steps under each of the cases below, through the command line, so that it
runs on any version of the code. What is compared: the bits of every exported weight, and each
step's loss, loss scale and outcome. On one machine with one version of torch, a refactoring leaves
all of it as it was.

    python benchmarks/identity.py --json before.json
    ... change something ...
    python benchmarks/identity.py --against before.json
"""

import argparse
import hashlib
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

STEPS = 60
DIGITS = 12
"""Of each hash: enough to tell any two runs apart, few enough to read."""
SPLIT = "params=bf16, master=split"
PHASES = (
    "[{policy: fp32, until: 20}, "
    f'{{policy: "fp8-delayed, {SPLIT}", until: 40}}, {{policy: bf16}}]'
)
CASES: dict[str, list[str]] = {
    "fp32": ["precision.policy=fp32"],
    "bf16": ["precision.policy=bf16"],
    "fp16": ["precision.policy=fp16"],
    "fp8-tensor": ["precision.policy=fp8-tensor"],
    "fp8-delayed, split": [f"precision.policy=fp8-delayed, {SPLIT}"],
    "schedule fp32, fp8, bf16": [f"precision.schedule={PHASES}"],
    # Beyond what is always asked: skipped steps, several micro-batches, averages, scale groups,
    # faults that are looked into, formats that adapt, master weights of the other kinds.
    "fp16, skipping": [
        "precision.policy=fp16",
        "precision.loss_scale.max_scale=1e30",
        "precision.loss_scale.init_scale=1e20",
    ],
    "fp8-row, accumulated": [
        "precision.policy=fp8-row",
        "gradient_accumulation_steps=2",
        "batch_size=4",
    ],
    "fp8-block, head fp32": ["precision.policy=fp8-block, head=fp32", "batch_size=4"],
    "bf16, kahan, averaged": ["precision.policy=bf16, params=bf16, master=kahan", "ema.decay=0.9"],
    "bf16, stochastic": ["precision.policy=bf16, params=bf16, master=stochastic"],
    "fp16 params, groups": [
        "precision.policy=fp16, params=fp16, master=fp32",
        'precision.loss_scale.scale_groups=["blocks.0", "blocks.1"]',
    ],
    "adapting to a fault": [
        "precision.policy=fp8-delayed",
        "precision.adapt.enabled=true",
        "precision.adapt.cooldown=5",
        "health.every=5",
        "fault_injection=[{step: 30, module: blocks.1.mlp.up, role: output, value: inf}]",
    ],
}


def trained(words: list[str], *, steps: int, device: str) -> dict[str, Any]:
    """Train once; return the hash of the weights and of what every step told."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "narrowcast", "train", "quickstart", f"steps={steps}"]
        command += [f"device={device}", *words, "--out", str(out), "--quiet"]
        if device != "cpu":  # layers this small gain nothing from fp8 on a GPU, and are to have it
            command += ["deterministic=true", "precision.skip_slow_fp8=false"]
        subprocess.run(command, check=True)
        weights = hashlib.sha256()
        for name, tensor in sorted(load_file(out / "model.safetensors").items()):
            weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            weights.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        lines = [json.loads(line) for line in (out / "records.jsonl").open()]
    told = [
        [r["step"], r["loss"], r["loss_scale"], r["applied"], r["grad_norm"], r["lr"]]
        for r in lines
        if r["kind"] == "step"
    ]
    return {
        "weights": weights.hexdigest()[:DIGITS],
        "steps": hashlib.sha256(json.dumps(told).encode()).hexdigest()[:DIGITS],
        "skipped": sum(not applied for _, _, _, applied, *_ in told),
        "last_loss": told[-1][1],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the hashes here")
    parser.add_argument("--against", type=Path, help="compare with hashes written before")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", action="append", help="a case to run, and no other")
    given = parser.parse_args()
    before = json.loads(given.against.read_text())["cases"] if given.against else {}
    cases: dict[str, Any] = {}
    different = []
    print(f"{'case':26} {'weights':12} {'steps':12} {'skipped':>7} {'last loss':>10}")
    for name, words in CASES.items():
        if (given.only and name not in given.only) or (given.against and name not in before):
            continue
        found = cases[name] = trained(words, steps=given.steps, device=given.device)
        verdict = ""
        if given.against:
            same = all(before[name][key] == found[key] for key in ("weights", "steps"))
            verdict = "as before" if same else "DIFFERENT"
            different += [] if same else [name]
        print(
            f"{name:26} {found['weights']} {found['steps']} {found['skipped']:7} "
            f"{found['last_loss']:10.6f} {verdict}",
            flush=True,
        )
    if given.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
        machine = {"torch": torch.__version__, "python": platform.python_version()}
        content = {"commit": commit.stdout.strip(), "environment": machine, "cases": cases}
        given.json.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
