"""The table that comes last, and the cases that did not hold, with how to run each alone."""

from typing import Any

from attacks.oracle import BAD, GOOD, Verdict
from attacks.schedule import Result

COLUMNS = (*GOOD, *BAD)


def rows_of(results: list[Result], kinds: list[str]) -> list[dict[str, Any]]:
    """Count verdicts by kind, with all of them together last."""
    rows = []
    for kind in [*kinds, "all"]:
        own = [each for each in results if kind in (each.kind, "all")]
        row: dict[str, Any] = {"kind": kind, "tried": len(own)}
        row["seconds"] = round(sum(each.seconds for each in own), 1)
        for verdict in (*COLUMNS, Verdict.NOT_HERE):
            row[verdict] = sum(each.verdict == verdict for each in own)
        rows.append(row)
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"| kind | tried | {' | '.join(COLUMNS)} |")
    print("|---" * (len(COLUMNS) + 2) + "|")
    for row in rows:
        print(f"| {row['kind']} | {row['tried']} | {' | '.join(str(row[c]) for c in COLUMNS)} |")
    for row in rows[:-1]:
        if row[Verdict.NOT_HERE]:
            print(f"\n{row['kind']}: {row[Verdict.NOT_HERE]} of them are not possible here")


def print_failure(result: Result) -> None:
    print(f"{result.verdict}: {result.kind}, seed {result.seed}: {result.told}")
    print(f"    {result.found}")
    print(
        f'    python benchmarks/campaign.py --only "{result.kind}" --seed {result.seed}', flush=True
    )


def failures(results: list[Result]) -> list[Result]:
    return [each for each in results if each.verdict in BAD]


def kills_resumed(results: list[Result]) -> int:
    """Count runs that were killed, resumed, and became the run that nothing happened to."""
    return sum("killed" in each.kind and each.verdict == Verdict.EQUAL for each in results)
