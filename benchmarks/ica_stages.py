"""Where the time of ICA goes: seconds of each stage, in a fresh process and again in the same.

Run: python benchmarks/ica_stages.py [--rows N] [--channels N] [--components N] [--device D]
                                     [--json PATH]

The signals are those of `ica.py`, in a file. Stages are waited for, so that their sum is a little
more than what `ica.py` measures.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from ica import write_signals
from narrowcast.runs import describe_machine
from narrowcast.workloads.sft.ica import ICA, FileSignals
from narrowcast.workloads.sft.ica.ica import whiten
from narrowcast.workloads.sft.ica.signals import MappedSignals, channel_statistics
from narrowcast.workloads.sft.ica.subspace import Standardised, principal_subspace


class Stages:
    """Seconds by name, each from the end of the one before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, name: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[name] = round(now - self._last, 4)
        self._last = now


def walk(file: Path, options: argparse.Namespace) -> dict[str, float]:
    device = torch.device(options.device)
    ica = ICA(components=options.components, device=device)
    source = FileSignals(path=file, channels=options.channels)
    stages = Stages(device)
    for _ in source:
        pass
    stages.end("read the file (once more)")
    for _ in MappedSignals(source, lambda chunk: chunk.to(device)):
        pass
    stages.end("read and bring to the device (once more)")
    collected = ica.collect(source)
    stages.end("collect: read, bring, look at, store")
    signals = collected.signals
    statistics = channel_statistics(signals)
    stages.end("mean and spread")
    standard = Standardised.of(signals, statistics)
    generator = torch.Generator().manual_seed(0)
    subspace = principal_subspace(standard, options.components, generator=generator)
    stages.end(f"directions ({subspace.passes} passes)")
    projected = standard.projected(subspace.basis)
    stages.end("project")
    white = whiten(projected, subspace.basis, standard.factor)
    stages.end("whiten")
    rotations, _ = ica._solve(white.signals[None])
    stages.end(f"solve ({rotations.iterations} iterations, {ica.restarts} beginnings)")
    return stages.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--channels", type=int, default=9_216)
    parser.add_argument("--components", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    environment = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "signals"
        shape = {"rows": options.rows, "channels": options.channels}
        write_signals(file, **shape, sources=options.components)
        if options.device != "cpu":
            torch.zeros(1, device=options.device)
        first, again = walk(file, options), walk(file, options)
    print("| stage | seconds, first | again |\n|---|---|---|")
    for name, seconds in first.items():
        print(f"| {name} | {seconds:.4f} | {again[name]:.4f} |")
    whole = [sum(list(each.values())[2:]) for each in (first, again)]
    print(f"| all but what was done once more | {whole[0]:.4f} | {whole[1]:.4f} |")
    if options.json:
        figures = {"environment": environment, **shape, "first": first, "again": again}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
