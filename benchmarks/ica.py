"""Functional networks by ICA: narrowcast and scikit-learn on the same signals, in one run.

Run: python benchmarks/ica.py [--rows N] [--channels N] [--components N] [--threads N]
                              [--device D] [--skip sklearn] [--json PATH]

Planted signals of the shape of GPT-2's MLP outputs (12 layers of 768) lie in a file: sparse
sources with heavy tails, normal factors that reach every channel, noise, and a mean and a scale of
each channel's own. scikit-learn does what the usual pipeline does: it loads the file, standardises,
reduces to 1,000 directions by PCA, and runs FastICA. narrowcast reads the file chunk by chunk, a
few times. Each is a process of its own, so that its largest memory (`ru_maxrss`) is its own; both
times begin before the file is read. What takes seconds is measured three times, before and after
what takes minutes, and the median counts: other work on the machine weighs on it by chance.
`--threads` holds for every library of a process, the BLAS of scikit-learn too. A GPU is started
before the time begins; its libraries are loaded within it, and what a second run in the same
process takes is told beside it.
Networks are the two in a hundred heaviest channels of each component, compared by IoU with the best
match of the other side and with what was planted.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.runs import describe_machine

FASTER, MEMORY_SHARE, AGREEMENT = 3.0, 0.25, 0.95
"""What is asked for on a CPU."""
FASTER_ON_GPU = 50.0
"""On a GPU, where the memory of the host is mostly libraries and is not asked for."""
PERCENTILE = 98.0


def write_signals(path: Path, *, rows: int, channels: int, sources: int, seed: int = 0) -> None:
    """Write planted signals to a file of fp32, and their supports beside it."""
    chance = np.random.default_rng(seed)
    support = round(channels * (100 - PERCENTILE) / 100)
    mixing = np.zeros((sources, channels), np.float32)
    for row in mixing:
        chosen = chance.choice(channels, support, replace=False)
        row[chosen] = chance.choice([-1, 1], support) * chance.uniform(0.5, 2, support)
    strengths = np.linspace(0.05, 0.01, 40)[:, None]
    background = (strengths * chance.normal(size=(40, channels))).astype(np.float32)
    scale = np.exp(chance.normal(size=channels)).astype(np.float32)
    mean = (scale * chance.normal(size=channels) * 2).astype(np.float32)
    np.save(path.with_suffix(".npy"), mixing != 0)
    with path.open("wb") as file:
        for start in range(0, rows, 1000):
            count = min(1000, rows - start)
            chunk = chance.laplace(size=(count, sources)).astype(np.float32) @ mixing
            chunk += chance.standard_normal((count, 40), np.float32) @ background
            chunk += chance.standard_normal((count, channels), np.float32)
            chunk *= scale
            chunk += mean
            chunk.tofile(file)
        # Who reads first would wait for the disk, too.
        file.flush()
        os.fsync(file.fileno())


def by_sklearn(path: Path, *, channels: int, components: int) -> np.ndarray:
    from sklearn.decomposition import PCA, FastICA

    x = np.fromfile(path, np.float32).reshape(-1, channels)
    x -= x.mean(0)
    x /= np.maximum(x.std(0), 1e-8)
    pca = PCA(min(1000, *x.shape), random_state=0)
    reduced = pca.fit_transform(x)
    ica = FastICA(components, random_state=0, max_iter=200, tol=1e-3)
    ica.fit(reduced)
    return np.asarray(pca.components_.T @ ica.mixing_)


def by_narrowcast(
    path: Path, *, channels: int, components: int, device: str, ica_dtype: str | None, store: bool
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return loadings, and what there is to tell; with `store`, signals are kept in `ica_dtype`."""
    import torch

    from narrowcast.workloads.sft.ica import ICA, FileSignals

    source = FileSignals(path=path, channels=channels)
    ica = ICA(components=components, ica_dtype=ica_dtype, device=torch.device(device))
    told: dict[str, Any] = {}
    if store:
        collected = ica.collect(source)
        told["buffer_bytes"] = collected.signals.bytes
        told["stored"] = str(collected.dtype).removeprefix("torch.")
        found = ica.fit(collected)
    else:
        found = ica.fit(source)
    told["findings"] = [str(finding) for finding in found.findings]
    told["stability"] = round(float(found.stability.min()), 4)
    return found.loadings.numpy(), told


def work(options: argparse.Namespace) -> None:
    """Solve in this process, and print what it took as a line of JSON."""
    import torch

    torch.set_num_threads(options.threads)
    if options.device != "cpu":
        torch.zeros(1, device=options.device)  # who starts a GPU waits for it once
    imported = peak_bytes()
    shape = {"channels": options.channels, "components": options.components}

    def solve() -> tuple[np.ndarray, dict[str, Any]]:
        if options.work == "sklearn":
            return by_sklearn(options.file, **shape), {}
        return by_narrowcast(
            options.file,
            **shape,
            device=options.device,
            ica_dtype=options.ica_dtype,
            store=options.work == "stored",
        )

    began, began_on_processor = time.perf_counter(), time.process_time()
    loadings, told = solve()
    seconds = time.perf_counter() - began
    on_processor = time.process_time() - began_on_processor
    if options.device != "cpu":
        began = time.perf_counter()
        solve()
        told["again_seconds"] = round(time.perf_counter() - began, 3)
    np.save(options.out, loadings)
    told |= {"seconds": round(seconds, 3), "processor_seconds": round(on_processor, 2)}
    told |= {"peak_bytes": peak_bytes(), "import_bytes": imported}
    print(json.dumps(told))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(work: str, file: Path, options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Run one way in a process of its own; return what it took and its networks."""
    out = file.with_name(f"loadings-{work}.npy")
    words = {"work": work, "file": file, "out": out, **more}
    for name in ("channels", "components", "threads"):
        words[name] = getattr(options, name)
    command = [sys.executable, str(Path(__file__))]
    for name, value in words.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    libraries = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    limits = dict.fromkeys(libraries, str(options.threads))
    ran = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **limits}
    )
    return {**json.loads(ran.stdout.splitlines()[-1]), "networks": networks_of(np.load(out))}


def networks_of(loadings: np.ndarray) -> list[set[int]]:
    sizes = np.abs(loadings)
    thresholds = np.percentile(sizes, PERCENTILE, axis=0)
    return [
        set(np.nonzero(column >= threshold)[0].tolist())
        for column, threshold in zip(sizes.T, thresholds, strict=True)
    ]


def agreement(one: list[set[int]], other: list[set[int]]) -> float:
    """Return the IoU of each network with the best match of another set, on average."""
    best = [max(len(a & b) / len(a | b) for b in other) for a in one]
    return sum(best) / len(best)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--channels", type=int, default=9_216)
    parser.add_argument("--components", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="where narrowcast computes as well")
    parser.add_argument("--skip", choices=["sklearn"], help="leave the reference out")
    # A process that measures one way is told which.
    parser.add_argument("--work", choices=["sklearn", "streamed", "stored"], help=argparse.SUPPRESS)
    for name in ("--file", "--out"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ica-dtype", help=argparse.SUPPRESS)
    return parser


def table(rows: list[dict[str, Any]]) -> None:
    print("| way | seconds | on the processor | peak MiB | of it, imports | IoU with planted |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        peak, imports = (row[key] / 2**20 for key in ("peak_bytes", "import_bytes"))
        print(
            f"| {row['way']} | {row['seconds']:.2f} | {row['processor_seconds']:.1f} | "
            f"{peak:.0f} | {imports:.0f} | {row['iou_planted']:.3f} |"
        )


def main() -> None:
    options = arguments().parse_args()
    if options.work:
        work(options)
        return
    environment = describe_machine()
    ways = {"narrowcast, streamed": ("streamed", {"device": "cpu"})}
    if options.device != "cpu":
        # Where passes cost nothing, reading the file again would be all there is to measure.
        ways[f"narrowcast, {options.device}"] = ("stored", {"device": options.device})
    if options.skip != "sklearn":
        ways["scikit-learn"] = ("sklearn", {})
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "signals"
        shape = {"rows": options.rows, "channels": options.channels}
        write_signals(file, **shape, sources=options.components)
        planted = [set(np.nonzero(row)[0].tolist()) for row in np.load(file.with_suffix(".npy"))]
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for turn in range(3):
            for way, (what, more) in ways.items():
                if turn == 0 or what != "sklearn":
                    found[way].append(measure(what, file, options, **more))
    for way, measured in found.items():
        ordered = sorted(measured, key=lambda each: each["seconds"])
        row = {"way": way, **ordered[len(ordered) // 2]}
        row["all_seconds"] = [each["seconds"] for each in measured]
        row["iou_planted"] = round(agreement(planted, row["networks"]), 4)
        rows.append(row)
    table(rows)
    figures = {"environment": environment, **shape, "components": options.components}
    figures |= {"threads": options.threads, "rows_measured": rows}
    if options.skip != "sklearn":
        figures["compared"] = compared(rows)
    for row in rows:
        row.pop("networks")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Say how each way stands to the reference, which is the last."""
    *ours, reference = rows
    told = []
    for row in ours:
        faster = reference["seconds"] / row["seconds"]
        share = row["peak_bytes"] / reference["peak_bytes"]
        same = agreement(reference["networks"], row["networks"])
        on_gpu = "again_seconds" in row
        asked = FASTER_ON_GPU if on_gpu else FASTER
        print(
            f"\n{row['way']}: {faster:.1f} × faster (asked: {asked:g}), {share:.1%} of the memory"
            f"{'' if on_gpu else f' ({MEMORY_SHARE:.0%})'}, IoU {same:.4f} ({AGREEMENT})."
        )
        met = faster >= asked and same >= AGREEMENT and (on_gpu or share <= MEMORY_SHARE)
        figures = {"faster": faster, "memory_share": share, "iou": same}
        if on_gpu:
            figures["faster_again"] = reference["seconds"] / row["again_seconds"]
            print(f"A second run in its process: {figures['faster_again']:.1f} × faster.")
        rounded = {name: round(value, 4) for name, value in figures.items()}
        told.append({"way": row["way"], **rounded, "met": met})
    return told


if __name__ == "__main__":
    main()
