"""`ica_dtype`: the same networks from half the memory? Real ICA at each dtype.

Run: python benchmarks/ica_dtype.py [--rows N] [--channels N] [--components N] [--threads N]
                                    [--json PATH]

Signals as in `benchmarks/ica.py`, stored in memory as `ica_dtype` says, each in a process of its
own: what it takes, what the buffers take, and how far the networks are those of float32. `float16,
loud` are signals of which one channel is ten thousand times louder, which float16 cannot hold: the
finding says what was done.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ica import agreement, arguments, measure, write_signals
from narrowcast.runs import describe_machine

BUFFERS, AGREEMENT = 0.55, 0.98
"""What is asked for of half precision."""


def make_loud(file: Path, *, channels: int) -> Path:
    """Return a copy of signals, one channel of which is too loud for float16."""
    loud = file.with_name("loud")
    with file.open("rb") as source, loud.open("wb") as target:
        while len(chunk := np.fromfile(source, np.float32, 1000 * channels)):
            rows = chunk.reshape(-1, channels)
            rows[:, 0] *= 1e4
            rows.tofile(target)
    return loud


def table(rows: list[dict[str, Any]]) -> None:
    print("| ica_dtype | stored | seconds | buffers MiB | peak MiB | imports | IoU | findings |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        sizes = (row[key] / 2**20 for key in ("buffer_bytes", "peak_bytes", "import_bytes"))
        buffers, peak, imports = (f"{size:.0f}" for size in sizes)
        print(
            f"| {row['ica_dtype']} | {row['stored']} | {row['seconds']:.1f} | {buffers} | {peak} | "
            f"{imports} | {row['iou']:.4f} | {'; '.join(row['findings']) or 'none'} |"
        )


def main() -> None:
    parser = arguments()
    parser.description = (__doc__ or "").splitlines()[0]
    options: argparse.Namespace = parser.parse_args()
    environment = describe_machine()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "signals"
        shape = {"rows": options.rows, "channels": options.channels}
        write_signals(file, **shape, sources=options.components)
        for name in ("float32", "bfloat16", "float16", "float16, loud"):
            dtype, *loud = name.split(", ")
            signals = make_loud(file, channels=options.channels) if loud else file
            row = measure("stored", signals, options, ica_dtype=dtype)
            rows.append({"ica_dtype": name, **row})
    wide = rows[0]
    for row in rows:
        row["iou"] = round(agreement(wide["networks"], row["networks"]), 4)
        row["buffer_share"] = round(row["buffer_bytes"] / wide["buffer_bytes"], 4)
    table(rows)
    half = [row for row in rows if row["stored"] != "float32"]
    met = all(row["buffer_share"] <= BUFFERS and row["iou"] >= AGREEMENT for row in half)
    print(f"\nhalf the buffers ({BUFFERS:.0%}) and IoU {AGREEMENT}: {'met' if met else 'not met'}")
    for row in rows:
        row.pop("networks")
    if options.json:
        figures = {"environment": environment, **shape, "components": options.components}
        figures |= {"threads": options.threads, "met": met, "dtypes": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
