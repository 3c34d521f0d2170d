"""Events of a training loop in any order: is a prepared model the plain one, to the last bit?

Run: python benchmarks/loops.py [--examples N] [--events N] [--seed N] [--json PATH]

Each example is a loop of up to so many events (passes, steps, clipping, bad batches, weights
written by hand, checkpoints loaded, policies changed, models given back and prepared again …) on a
model prepared in fp32 and on a plain one, with an optimizer, a loss scale and clipping drawn by
chance. After every event both are compared bit for bit; an event that narrowcast refuses must have
changed nothing. `tests/loops/machine.py` has the rules, and the tests run a hundred of them. An
example that fails is made as short as it gets and printed.
"""

import argparse
import importlib.util
import json
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from narrowcast.runs import describe_machine

MACHINE = Path(__file__).parents[1] / "tests" / "loops" / "machine.py"


def load_machine() -> ModuleType:
    spec = importlib.util.spec_from_file_location("loop_machine", MACHINE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(rows: list[dict[str, Any]]) -> None:
    print("| event | tried | refused |")
    print("|---|---|---|")
    for row in rows:
        print(f"| {row['event']} | {row['tried']} | {row['refused']} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--events", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = load_machine()
    chosen = settings(
        max_examples=options.examples,
        stateful_step_count=options.events,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    environment = describe_machine()
    began = time.perf_counter()
    run_state_machine_as_test(seed(options.seed)(machine.LoopMachine), settings=chosen)
    seconds = time.perf_counter() - began
    rows = [
        {"event": name, "tried": tried, "refused": refused}
        for name, tried, refused in machine.counts()
    ]
    table(rows)
    events, refused = (sum(row[key] for row in rows) for key in ("tried", "refused"))
    print(f"\n{options.examples} examples, {events} events, {refused} refused, {seconds:.0f} s.")
    print("Refusals:")
    for message, count in machine.MESSAGES.most_common():
        print(f"- {count} × {message}")
    if options.json:
        figures = {
            "environment": environment,
            "examples": options.examples,
            "events": events,
            "seed": options.seed,
            "seconds": round(seconds, 1),
            "rows": rows,
            "refusals": dict(machine.MESSAGES.most_common()),
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
