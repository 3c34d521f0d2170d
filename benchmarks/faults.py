"""A campaign of faults: what narrowcast makes of numbers that are put where they do not belong.

Run: python benchmarks/faults.py [--json PATH] [--faults N] [--seed N]

Each fault is a run of its own: a value (inf, nan, large, bit-flip) in a role (input, weight,
output, grad_output, grad_weight) of a module of one of three models, at a step, in a policy. In
front of its step the same passes are made aside, and plain torch looks at what comes of them: a
fault is *visible* where the loss, or the gradient of any weight, is not finite or too large to be
squared in fp32. One that is not (an infinity behind a ReLU that is off, an outlier that a norm
divides away, a flipped bit that makes a number tiny) is told apart, with how many of those made the
loss or the norm of the gradients ten times what it was.

Bars: 100 % of the visible ones detected, no weight contaminated, 95 % named to module and role.
"""

import argparse
import contextlib
import json
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from narrowcast.config.sections import DataSection, FaultSection, Recipe, Section
from narrowcast.errors import DivergedError
from narrowcast.hardware import detect_hardware
from narrowcast.health.faults.faults import Fault, Faults
from narrowcast.precision.plan.module_plan import ROLES
from narrowcast.precision.plan.plan import make_plan
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import FindingRecord, Record, StepRecord, describe_machine
from narrowcast.training.data import Order
from narrowcast.training.setup import prepare_recipe
from narrowcast.training.task import Task
from narrowcast.training.train_loop import train_loop
from narrowcast.workloads import build_task, load_recipe

POLICIES = ("fp32", "bf16", "fp16", "fp8-tensor")
VALUES = ("inf", "nan", "large", "bit-flip")
MODELS = ("gpt", "cnn", "lstm")
AFTERWARDS = 5
"""Steps after the fault that must be applied, with a finite loss."""
SPIKE = 10.0
"""Times the median of the calm steps: what anybody would call a spike."""
TOO_LARGE = 2.0**64
"""Its square is beyond fp32."""


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.relu = nn.ReLU()
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.wide = nn.Linear(512, 64)
        self.head = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.first(x[:, None])))
        x = self.pool(self.second(x))
        logits: Tensor = self.head(torch.tanh(self.wide(x.flatten(1))))
        return logits


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.lstm = nn.LSTM(32, 48, batch_first=True)
        self.norm = nn.LayerNorm(48)
        self.mlp = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.up(x))
        logits: Tensor = self.mlp(self.norm(states[:, -1]))
        return logits


@dataclass(frozen=True)
class Digits:
    """The handwritten digits that come with scikit-learn."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        return self.images[indices], self.labels[indices]


def digits_task(model: Callable[[], nn.Module], *, seed: int) -> Task:
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32) / 16
    torch.manual_seed(seed)
    return Task(
        model=model(),
        train_data=Digits(images, torch.tensor(found.target)),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]).float(), batch[1]),
        evaluate=lambda model: {"loss": 0.0},
        items=lambda batch: len(batch[0]),
        gemm_rows=16,
    )


def task_of(name: str, *, seed: int) -> Task:
    match name:
        case "cnn":
            return digits_task(Cnn, seed=seed)
        case "lstm":
            return digits_task(Lstm, seed=seed)
        case _:
            words = ["model.layers=2", "model.width=64", "model.heads=2", "data.length=32"]
            recipe = load_recipe("quickstart", [*words, f"seed={seed}"]).recipe
            return build_task(recipe, device=torch.device("cpu"))


def modules_of(model: nn.Module, role: str) -> list[str]:
    """Return every module that is called and has such a tensor."""
    lists = (nn.ModuleList, nn.ModuleDict)
    named = [(n, m) for n, m in model.named_modules() if n and not isinstance(m, lists)]
    if role in ("weight", "grad_weight"):
        return [n for n, m in named if any(True for _ in m.parameters(recurse=False))]
    return [n for n, m in named if not (role == "input" and isinstance(m, nn.Embedding))]


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    policy: str
    fault: Fault
    accumulate: int
    seed: int


def cases(count: int, *, seed: int, tasks: dict[str, Task]) -> Iterator[Case]:
    """Draw faults; every policy, value, role and model comes equally often, as far as it goes."""
    draw = random.Random(seed)
    for number in range(count):
        model = MODELS[number % 3]
        role = ROLES[number % 5]
        accumulate = draw.choice([1, 2])
        fault = Fault(
            step=draw.randint(2, 6),
            module=draw.choice(modules_of(tasks[model].model, role)),
            role=role,  # type: ignore[arg-type]
            value=VALUES[number // 5 % 4],
            micro_batch=draw.randint(1, accumulate),
        )
        policy = POLICIES[number % 4]
        yield Case(model=model, policy=policy, fault=fault, accumulate=accumulate, seed=number)


@dataclass(kw_only=True)
class Result:
    case: Case
    visible: bool = False
    spiked: bool = False
    detected: bool = False
    named: str = ""
    right: bool = False
    contaminated: bool = False
    goes_on: bool = False

    def to_json(self) -> dict[str, object]:
        fault = self.case.fault
        return {
            "model": self.case.model,
            "policy": self.case.policy,
            "fault": str(fault),
            "step": fault.step,
            **{k: v for k, v in vars(self).items() if k != "case"},
        }


def recipe_of(case: Case) -> Recipe:
    fault = case.fault
    return Recipe(
        workload="lm",
        steps=fault.step + AFTERWARDS,
        batch_size=16,
        gradient_accumulation_steps=case.accumulate,
        seed=case.seed,
        data=DataSection(),
        model=Section(),
        optimizer={"lr": 1e-3},
        # Low enough for no step to overflow by itself.
        precision={"policy": case.policy, "loss_scale": {"init_scale": 1024.0}},
        fault_injection=(FaultSection(**vars(fault)),),
    )


def tried(case: Case) -> Result:
    task, recipe = task_of(case.model, seed=case.seed), recipe_of(case)
    planned = make_plan(task.model, case.policy, hardware=detect_hardware("cpu"))
    prepared = prepare_recipe(recipe, task, plan=planned)
    records: list[Record] = []
    result = Result(case=case)
    before = after = weights(prepared)
    with contextlib.suppress(DivergedError):  # which the records show too
        for record in train_loop(prepared, task, recipe):
            records.append(record)
            if not isinstance(record, StepRecord):
                continue
            if record.step == case.fault.step - 1:
                before = weights(prepared)
                result.visible = is_visible(case, task, prepared)
            elif record.step == case.fault.step:
                after = weights(prepared)
    judge(result, records, before, after)
    return result


def weights(prepared: Prepared) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in prepared.fp32_state_dict().items()}


def is_visible(case: Case, task: Task, prepared: Prepared) -> bool:
    """Make the passes of the faulty step aside, and let plain torch look at what comes of them."""
    order = Order(samples=len(task.train_data), batch_size=16, seed=case.seed)
    first = (case.fault.step - 1) * case.accumulate
    faults = Faults(prepared.model, [case.fault], seed=case.seed).at(case.fault.step)
    assert faults is not None
    found = []
    with prepared.engine.isolated():
        for number in range(1, case.accumulate + 1):
            batch = task.train_data.__getitems__(order.indices(first + number - 1))
            with faults.during(number):
                with prepared.autocast():
                    loss = task.loss(prepared.model, batch)
                prepared.backward(loss / case.accumulate)
            found.append(loss.detach())
        found += [p.grad for p in prepared.model.parameters() if p.grad is not None]
    return any(not (t.abs().max() < TOO_LARGE) for t in found)


def judge(
    result: Result, records: Sequence[Record], before: dict[str, Tensor], after: dict[str, Tensor]
) -> None:
    fault = result.case.fault
    steps = {r.step: r for r in records if isinstance(r, StepRecord)}
    faulty = steps[fault.step]
    calm = [r for r in steps.values() if r.step < fault.step]
    result.spiked = any(
        not getattr(faulty, name) < SPIKE * statistics.median(getattr(r, name) for r in calm)
        for name in ("loss", "grad_norm")
    )
    result.detected = not faulty.applied or not math.isfinite(faulty.loss)
    told = [r for r in records if isinstance(r, FindingRecord) and r.what != "fault injected"]
    at_fault = [r for r in told if r.step == fault.step]
    result.named = ", ".join(f"{r.module} {r.role}" for r in at_fault)
    result.right = any((r.module, r.role) == (fault.module, fault.role) for r in at_fault)
    bad = any(not value.isfinite().all() for value in after.values())
    moved = any(not torch.equal(before[name], after[name]) for name in before)
    result.contaminated = bad or (result.visible and moved)
    later = [steps[fault.step + n] for n in range(1, AFTERWARDS + 1)]
    result.goes_on = all(r.applied and math.isfinite(r.loss) for r in later)


def share(results: Sequence[Result], of: Callable[[Result], bool]) -> str:
    return f"{sum(map(of, results))} of {len(results)}"


def table(results: Sequence[Result]) -> None:
    heads = ["visible", "detected", "named right", "contaminated", "goes on"]
    print("| | faults | " + " | ".join(heads) + " | not visible | of these spiked |")
    print("|---" * (len(heads) + 4) + "|")
    groups: dict[str, list[Result]] = {}
    for result in results:
        case = result.case
        for key in (case.policy, case.model, case.fault.value, case.fault.role, "all"):
            groups.setdefault(key, []).append(result)
    for key in (*POLICIES, *MODELS, *VALUES, *ROLES, "all"):
        found = groups.get(key, [])
        seen = [r for r in found if r.visible]
        hidden = [r for r in found if not r.visible]
        cells = [
            len(found),
            len(seen),
            share(seen, lambda r: r.detected),
            share(seen, lambda r: r.right),
            sum(r.contaminated for r in found),
            share(found, lambda r: r.goes_on),
            len(hidden),
            sum(r.spiked for r in hidden),
        ]
        print(f"| {key} | " + " | ".join(map(str, cells)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tasks = {name: task_of(name, seed=0) for name in MODELS}
    began = time.perf_counter()
    results = [tried(case) for case in cases(options.faults, seed=options.seed, tasks=tasks)]
    seconds = time.perf_counter() - began
    table(results)
    wrong = [r for r in results if r.visible and not (r.detected and r.right and r.goes_on)]
    print(f"\n{seconds:.0f} s. Not as they should be:" if wrong else f"\n{seconds:.0f} s.")
    for result in wrong:
        case = result.case
        print(f"- {case.model}, {case.policy}: {case.fault}: named {result.named or 'nothing'}")
    hidden = Counter(f"{r.case.fault.value}" for r in results if not r.visible)
    print("Not visible, by value:", dict(hidden))
    if options.json:
        figures: dict[str, Any] = {
            "environment": describe_machine(),
            "seconds": round(seconds, 1),
            "rows": [result.to_json() for result in results],
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
