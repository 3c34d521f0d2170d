"""How long a command is silent when it is piped, and how long it takes: the best of several runs.

Run: python benchmarks/startup.py [--json PATH] [--times N]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from narrowcast.runs import describe_machine

COMMANDS = {
    "--help": ["--help"],
    "a misspelt setting": ["train", "quickstart", "stesp=3"],
    "doctor": ["doctor"],
    "plan quickstart": ["plan", "quickstart"],
    "train tutorial steps=1": ["train", "tutorial", "steps=1"],
}


@dataclass(frozen=True)
class Timed:
    command: str
    first_line_seconds: float
    seconds: float


def timed(command: str, folder: str) -> Timed:
    """Run a command as a pipe sees it: both streams in one, until the first line and the end."""
    words = [sys.executable, "-m", "narrowcast", *COMMANDS[command]]
    began = time.perf_counter()
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        first = time.perf_counter() - began
        process.stdout.read()
    return Timed(command, first, time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--times", type=int, default=5)
    asked = parser.parse_args()
    best: list[Timed] = []
    print("| command | first line, s | all, s |")
    print("|---|---|---|")
    for command in COMMANDS:
        with tempfile.TemporaryDirectory() as folder:
            runs = [timed(command, folder) for _ in range(asked.times)]
        least = min(runs, key=lambda run: run.seconds)
        best.append(least)
        print(f"| `{command}` | {least.first_line_seconds:.2f} | {least.seconds:.2f} |", flush=True)
    if asked.json:
        found = {"environment": describe_machine(), "timed": [asdict(each) for each in best]}
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
