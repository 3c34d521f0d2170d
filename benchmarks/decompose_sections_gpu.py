"""What each way of making a decomposition fast is worth on a GPU: a row for each, in one run.

Run: python benchmarks/decompose_sections_gpu.py [--only NAME ...] [--rounds N] [--json PATH]
                                                 [--quick]

Names are those of the sections of docs/workloads/decompose.md that a GPU can answer: `transfers`,
`layerwise`, `graphs`, `precision`, `memory`, `compilation`, `aside` and `loading`. Whole runs, one
setting apart, take turns, --rounds times each, and the median counts; the toy is TMS 5-2 with
4,096 samples, the language model is that of benchmarks/decompose.py (4 layers of 128, 24 sites,
64 × 512 tokens). What needs no GPU is in decompose_sections.py. `--quick` is to see that all of it
runs, on a CPU too; its times mean nothing.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decompose_reference import measuring
from decompose_reference.cases import SMALL, Case, Size, language_case, toy_cases
from narrowcast.runs import describe_machine
from narrowcast.workloads.decompose.targets.language import TokenWindows

Row = dict[str, Any]
Words = tuple[str, ...]


class Bench:
    """The two cases, where they run, and how often."""

    def __init__(self, folder: Path, *, quick: bool, rounds: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.quick, self.rounds = quick, rounds
        self._known: dict[tuple[str, Words], list[measuring.Measured] | str] = {}
        self.size = SMALL if quick else Size()
        self.toy = toy_cases(self.device.type, bf16=False)[0]
        self.language = language_case(folder, self.size, device=self.device)

    def ways(self, case: Case, ways: Mapping[str, Words], *, about: str) -> list[Row]:
        """Time runs that differ in some settings, in turns; one that is known is not run again."""
        for _ in range(self.rounds):
            for words in ways.values():
                known = self._known.setdefault((case.name, words), [])
                if not isinstance(known, str) and len(known) < self.rounds:
                    self._known[case.name, words] = self._timed(case, words, known)
        return [
            {"way": about + name, **told(self._known[case.name, words])}
            for name, words in ways.items()
        ]

    def _timed(
        self, case: Case, words: Words, known: list[measuring.Measured]
    ) -> list[measuring.Measured] | str:
        steps = 10 if self.quick else (1000 if case is self.toy else 16)
        try:
            return [*known, measuring.ours(case, device=self.device, steps=steps,
                                           warm=max(3, steps // 4), words=words)]  # fmt: skip
        except Exception as error:  # noqa: BLE001  # a way that fails is told beside the others
            return f"{type(error).__name__}: {str(error)[:300]}"


def told(found: list[measuring.Measured] | str) -> Row:
    """Return what turns of a way come to."""
    if isinstance(found, str):
        return {"failed": found}
    middle = measuring.median(found)
    return {
        "milliseconds": round(1e3 / middle.rate, 4),
        "spread": round(measuring.spread(found), 3),
        "peak_bytes": middle.peak_bytes,
    }


def loading(bench: Bench) -> list[Row]:
    """A batch of tokens, cut from text, beside the step that it is for."""
    windows = TokenWindows(np.zeros(bench.size.tokens, dtype=np.int32), bench.size.length)
    drawn = np.random.default_rng(0).integers(len(windows), size=(20, bench.size.batch)).tolist()
    least = min(clocked(lambda: [windows.__getitems__(each) for each in drawn]) for _ in range(9))
    return [
        {"way": "cut a batch", "milliseconds": round(1e3 * least / 20, 4)},
        *bench.ways(bench.language, {"as the recipe is": (), "data.workers=2": ("data.workers=2",)},
                    about="a step, "),
    ]  # fmt: skip


def graphs(bench: Bench) -> list[Row]:
    """Launched one by one, and captured as a graph."""
    ways: dict[str, Words] = {"as the recipe is": (), "launched": ("cuda_graph=false",)}
    return [
        *bench.ways(bench.toy, ways, about="TMS 5-2, "),
        *bench.ways(bench.language, ways, about="LM, "),
    ]


def compilation(bench: Bench) -> list[Row]:
    """Compiled besides."""
    ways: dict[str, Words] = {"as the recipe is": (), "compiled": ("compile=true",)}
    return [
        *bench.ways(bench.toy, ways, about="TMS 5-2, "),
        *bench.ways(bench.language, ways, about="LM, "),
    ]


def transfers(bench: Bench) -> list[Row]:
    """A batch copied to the device: waited for, queued, and the step beside."""
    size = (bench.size.batch, bench.size.length)
    plain = torch.zeros(size, dtype=torch.long)
    pinned = plain.pin_memory() if bench.device.type == "cuda" else plain

    def waited() -> None:
        plain.to(bench.device)
        if bench.device.type == "cuda":
            torch.cuda.synchronize()

    def queued() -> None:
        pinned.to(bench.device, non_blocking=True)

    rows = []
    for name, call in (("waited for", waited), ("pinned, queued", queued)):
        least = min(clocked(lambda call=call: [call() for _ in range(50)]) for _ in range(5)) / 50
        rows.append({"way": f"copy a batch, {name}", "milliseconds": round(1e3 * least, 4)})
    return rows


def precision(bench: Bench) -> list[Row]:
    """Formats of products, and of weights."""
    plain = "precision.task=null"
    ways: dict[str, Words] = {
        "as the recipe is": (),
        "fp32": (plain, "precision.policy=fp32"),
        "bf16, split master weights": (plain, "precision.policy=bf16, params=bf16, master=split"),
    }
    if bench.device.type == "cuda":
        ways["tf32"] = (plain, "precision.policy=tf32")
    toy: dict[str, Words] = {"as the recipe is": (), "bf16": ("precision.policy=bf16",)}
    return [
        *bench.ways(bench.language, ways, about="LM, "),
        *bench.ways(bench.toy, toy, about="TMS 5-2, "),
    ]


def layerwise(bench: Bench) -> list[Row]:
    """Layerwise terms as one pass of a larger batch, and as one pass a site."""
    term = "losses.stochastic_layerwise.batched"
    ways: dict[str, Words] = {"as the recipe is": (), "one by one": (f"{term}=false",)}
    return bench.ways(bench.toy, ways, about="TMS 5-2, ")


def aside(bench: Bench) -> list[Row]:
    """Checkpoints every fifth step: none, written while training waits, and by a thread."""
    with tempfile.TemporaryDirectory() as scratch:
        return [
            {"way": name, **checkpointed(bench, words, Path(scratch) / name.replace(" ", "-"))}
            for name, words in (
                ("none", ("checkpoint.every=0",)),
                ("waited for", ("checkpoint.every=5", "checkpoint.background=false")),
                ("in the background", ("checkpoint.every=5", "checkpoint.background=true")),
            )
        ]


def checkpointed(bench: Bench, words: Words, folder: Path) -> Row:
    """Return the time of a step of a run that has a folder."""
    import narrowcast as nc
    from narrowcast.runs import StepRecord

    steps, warm = (10, 5) if bench.quick else (30, 10)
    more = [f"steps={warm + steps}", f"device={bench.device}", *measuring.QUIET, *words]
    began = ended = 0.0
    for record in nc.train(bench.language.recipe, [*bench.language.words, *more], out=folder):
        if isinstance(record, StepRecord):
            began = time.perf_counter() if record.step == warm else began
            ended = time.perf_counter() if record.step == warm + steps else ended
    return {"milliseconds": round(1e3 * (ended - began) / steps, 3)}


def memory(bench: Bench) -> list[Row]:
    """Passes kept for the backward pass, and computed again in it."""
    terms = ("stochastic_subset", "pgd_subset")
    ways: dict[str, Words] = {
        "as the recipe is": (),
        "recompute=true": tuple(f"losses.{term}.recompute=true" for term in terms),
    }
    return bench.ways(bench.language, ways, about="LM, ")


SECTIONS: dict[str, Callable[[Bench], list[Row]]] = {
    "transfers": transfers, "layerwise": layerwise, "graphs": graphs, "precision": precision,
    "memory": memory, "compilation": compilation, "aside": aside, "loading": loading,
}  # fmt: skip


def clocked(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    environment = describe_machine()
    figures: dict[str, Any] = {"environment": environment}
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch), quick=options.quick, rounds=options.rounds)
        for name in options.only:
            figures[name] = SECTIONS[name](bench)
            print(f"\n{name}: {(SECTIONS[name].__doc__ or '').splitlines()[0]}", flush=True)
            for row in figures[name]:
                print("  ", "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            if options.json:
                known = json.loads(options.json.read_text()) if options.json.exists() else {}
                text = json.dumps(known | figures, indent=1, ensure_ascii=False)
                options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
