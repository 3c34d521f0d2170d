"""What each way of making a decomposition fast is worth on a CPU: a row for each, in one run.

Run: python benchmarks/decompose_sections.py [--only NAME ...] [--rounds N] [--json PATH]

Names are those of the sections of docs/workloads/decompose.md that a CPU can answer: `loading`,
`hooks`, `delta`, `layerwise`, `aside`, `memory`, `profiling`. Ways of one section take turns,
--rounds times each, and the least counts, in seconds on the processor: others may use the machine.
`peak` is by how much a step's tensors outgrow what was there before it, as torch's own profiler
counts allocations. What needs a GPU (graphs, transfers, bf16) is not here.
"""

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from decompose_reference.cases import Case, Size, language_case
from decompose_reference.measuring import QUIET
from narrowcast.runs import StepRecord, describe_machine
from narrowcast.workloads.decompose.components.decomposition import Decomposition
from narrowcast.workloads.decompose.components.masked import SiteMask, masked_output
from narrowcast.workloads.decompose.components.sites import find_sites
from narrowcast.workloads.decompose.targets.language import TokenWindows

SIZE = Size(
    layers=4, width=64, mlp=172, vocabulary=500, components=256, hidden=128, batch=8, length=128,
    tokens=2**16, pretraining=20,
)  # fmt: skip
"""Of the language model: that of 260,000 weights which people publish stories of, less a layer."""
ROWS, D_IN, D_OUT, COMPONENTS = 2048, 256, 1024, 512
"""Of a site by itself: a matrix of an MLP."""
Row = dict[str, Any]


def loading(case: Case, rounds: int) -> list[Row]:
    """A batch of tokens beside the step that it is for."""
    windows = TokenWindows(np.zeros(SIZE.tokens, dtype=np.int32), SIZE.length)
    drawn = np.random.default_rng(0).integers(len(windows), size=(20, SIZE.batch)).tolist()
    cut = least({"a batch": lambda: [windows.__getitems__(each) for each in drawn]}, rounds, per=20)
    step = min(trained(case.recipe, case.words, steps=6, warm=2) for _ in range(rounds))
    return [row("cut a batch", cut["a batch"]), row("a step", step)]


def hooks(case: Case, rounds: int) -> list[Row]:
    """A masked pass of a decomposition, and the same products in hooks put on for each call."""
    torch.manual_seed(0)
    layers, calls = 24, 20
    target = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(layers)])
    plain = copy.deepcopy(target)
    # This replaces the modules of its target.
    decomposition = Decomposition(target, find_sites(target, {"*": 32}), seeds=1)
    pairs = [(each.V, each.U) for each in decomposition.components.values()]
    mask = SiteMask(torch.rand(1, 64, 32), 0.5, 0.5)
    x = torch.randn(64, 64)

    def replaced() -> Tensor:
        found: Tensor = decomposition(x, masks=[mask] * layers).output
        return found

    def hooked() -> Tensor:
        def products(at: int, module: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
            weight = module.get_parameter("weight").mT[None]
            return masked_output(args[0][None], *pairs[at], weight, None, mask)[0]

        handles = [
            layer.register_forward_hook(partial(products, at)) for at, layer in enumerate(plain)
        ]
        found: Tensor = plain(x)
        for handle in handles:
            handle.remove()
        return found

    torch.testing.assert_close(hooked(), replaced())
    ways = {"replaced": replaced, "hooks on every call": hooked}

    def forward(way: Callable[[], Tensor]) -> None:
        with torch.no_grad():
            for _ in range(calls):
                way()

    def both(way: Callable[[], Tensor]) -> None:
        for _ in range(calls):
            way().sum().backward()

    passes = {"forward": forward, "forward and backward": both}
    calls_of = {
        f"{way}, {name}": partial(run, ways[way]) for name, run in passes.items() for way in ways
    }
    return [row(name, seconds) for name, seconds in least(calls_of, rounds, per=calls).items()]


def delta(case: Case, rounds: int) -> list[Row]:
    """One product of inner size C + d_in, and what components leave of the weight, made first."""
    torch.manual_seed(0)
    x = torch.randn(1, ROWS, D_IN)
    reads = (torch.randn(1, D_IN, COMPONENTS) / D_IN**0.5).requires_grad_()
    writes = (torch.randn(1, COMPONENTS, D_OUT) / COMPONENTS**0.5).requires_grad_()
    weight = torch.randn(D_OUT, D_IN) / D_IN**0.5
    importance = torch.rand(1, ROWS, COMPONENTS).requires_grad_()
    source, left = torch.rand(1, ROWS, COMPONENTS), torch.rand(1, ROWS)

    def folded() -> Tensor:
        mask = SiteMask(importance, source, left)
        return masked_output(x, reads, writes, weight.mT[None], None, mask)

    def materialised() -> Tensor:
        over = weight - (reads[0] @ writes[0]).mT
        kept = importance + (1 - importance) * source
        return ((x @ reads) * kept) @ writes + left[..., None] * (x @ over.mT)

    apart = (folded() - materialised()).abs().max().item()
    ways = {"folded": folded, "materialised": materialised}
    found = least({name: lambda f=f: f().sum().backward() for name, f in ways.items()}, rounds)
    return [
        row(name, found[name], peak=peak_of(lambda f=f: f().sum().backward()), apart=apart)
        for name, f in ways.items()
    ]


def layerwise(case: Case, rounds: int) -> list[Row]:
    """Layerwise terms as one pass of a larger batch, and as one pass a site."""
    rows = []
    for recipe, about in (("tms_5-2", "2 sites of TMS 5-2"), ("tms_5-2-id", "3 sites of TMS-id")):
        words = ("batch_size=1024", "model.pretrain_steps=300")
        ways = {
            name: (*words, f"losses.stochastic_layerwise.batched={name}")
            for name in ("true", "false")
        }
        found = in_turns(f"decompose/{recipe}", ways, rounds, steps=60)
        rows += [row(f"{about}, batched={name}", seconds) for name, seconds in found.items()]
    return rows


def aside(case: Case, rounds: int) -> list[Row]:
    """Checkpoints every fifth step: none, written while training waits, and by a thread."""
    with tempfile.TemporaryDirectory() as scratch:
        ways = {
            "none": ("checkpoint.every=0",),
            "waited for": ("checkpoint.every=5", "checkpoint.background=false"),
            "in the background": ("checkpoint.every=5", "checkpoint.background=true"),
        }
        given = {name: (*case.words, *words) for name, words in ways.items()}
        clock: dict[str, float] = {}
        for turn in range(rounds):
            for name, words in given.items():
                out = Path(scratch) / f"{turn}-{name}"
                wall = trained(case.recipe, words, steps=15, warm=5, out=out, clock=waited)
                clock[name] = min(wall, clock.get(name, wall))
    return [row(name, seconds) for name, seconds in clock.items()]


def memory(case: Case, rounds: int) -> list[Row]:
    """Passes kept for the backward pass, and computed again in it."""
    terms = ("stochastic_subset", "pgd_subset")
    ways = {
        f"recompute={name}": (*case.words, *(f"losses.{term}.recompute={name}" for term in terms))
        for name in ("false", "true")
    }
    found = in_turns(case.recipe, ways, rounds, steps=6)
    return [
        row(name, seconds, peak=trained_peak(case.recipe, ways[name]))
        for name, seconds in found.items()
    ]


def profiling(case: Case, rounds: int) -> list[Row]:
    """What a run leaves of three steps that are profiled."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        words = (*case.words, "profile.steps=3", "profile.first=2")
        trained(case.recipe, words, steps=3, warm=2, out=out)
        trace, table = (out / "profile" / name for name in ("trace.json", "operations.json"))
        events = len(json.loads(trace.read_text())["traceEvents"])
        operations = len(json.loads(table.read_text()))
        return [
            {"way": trace.name, "bytes": trace.stat().st_size, "entries": events},
            {"way": table.name, "bytes": table.stat().st_size, "entries": operations},
        ]


SECTIONS = {
    "loading": loading, "hooks": hooks, "delta": delta, "layerwise": layerwise, "aside": aside,
    "memory": memory, "profiling": profiling,
}  # fmt: skip


def waited() -> float:
    """Seconds by the clock: what training waits for is not all on the processor."""
    return time.perf_counter()


def trained(
    recipe: str,
    words: Sequence[str],
    *,
    steps: int,
    warm: int,
    out: Path | None = None,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """Return the seconds of a step of a run, after some that are not counted."""
    import narrowcast as nc

    last, began, ended = warm + steps, 0.0, 0.0
    given = [*words, f"steps={last}", "device=cpu", *QUIET]
    for record in nc.train(recipe, given, out=out):
        if isinstance(record, StepRecord):
            began = clock() if record.step == warm else began
            ended = clock() if record.step == last else ended
    return (ended - began) / steps


def trained_peak(recipe: str, words: Sequence[str]) -> int:
    """Return by how much the tensors of two steps outgrow what was there before them."""
    import narrowcast as nc

    records = iter(nc.train(recipe, [*words, "steps=6", "device=cpu", *QUIET]))
    for record in records:
        if isinstance(record, StepRecord) and record.step == 3:
            break
    return peak_of(lambda: [next(records) for _ in range(2)])


def peak_of(call: Callable[[], object]) -> int:
    """Return the most that tensors of a call take at once, beyond what was there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [each for each in events if each.get("name") == "[memory]"]
    now = most = 0
    for each in sorted(changes, key=lambda event: float(event["ts"])):
        now += int(each["args"]["Bytes"])
        most = max(most, now)
    return most


def in_turns(
    recipe: str, ways: Mapping[str, Sequence[str]], rounds: int, *, steps: int
) -> dict[str, float]:
    """Return the least seconds of a step of each way."""
    found: dict[str, float] = {}
    for _ in range(rounds):
        for name, words in ways.items():
            took = trained(recipe, words, steps=steps, warm=max(2, steps // 4))
            found[name] = min(took, found.get(name, took))
    return found


def least(
    ways: Mapping[str, Callable[[], object]], rounds: int, *, per: int = 1
) -> dict[str, float]:
    """Return the least seconds on the processor of each way, which take turns."""
    found: dict[str, float] = {}
    for way in ways.values():
        way()
    for _ in range(3 * rounds):
        for name, way in ways.items():
            began = time.process_time()
            way()
            took = (time.process_time() - began) / per
            found[name] = min(took, found.get(name, took))
    return found


def row(way: str, seconds: float, *, peak: int | None = None, **more: float) -> Row:
    """Return a line of a table, for JSON."""
    told = {"way": way, "milliseconds": round(seconds * 1e3, 4)}
    return told | ({} if peak is None else {"peak_bytes": peak}) | more


def print_rows(name: str, about: str, rows: Sequence[Row]) -> None:
    """Print the table of a section."""
    columns = list(dict.fromkeys(key for each in rows for key in each))
    print(f"\n{name}: {about}\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for each in rows:
        print("| " + " | ".join(str(each.get(column, "")) for column in columns) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, Any] = {"environment": describe_machine(), "size": vars(SIZE)}
    with tempfile.TemporaryDirectory() as scratch:
        case = language_case(Path(scratch), SIZE, device=torch.device("cpu"), bf16=False)
        for name in options.only:
            rows = SECTIONS[name](case, options.rounds)
            figures[name] = rows
            print_rows(name, (SECTIONS[name].__doc__ or "").splitlines()[0], rows)
            if options.json:
                known = json.loads(options.json.read_text()) if options.json.exists() else {}
                text = json.dumps(known | figures, indent=1, ensure_ascii=False)
                options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
