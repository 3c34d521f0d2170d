"""Which case is next, in processes of their own, until the time is over."""

import contextlib
import json
import os
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from attacks.case import Case
from attacks.forks import die_with_parent
from attacks.kinds import KINDS
from attacks.oracle import Found, Verdict

CASE_SECONDS = 180.0
"""More than the commands of a case together may take; beyond it the case itself hangs."""
GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Result:
    """What came of one case."""

    kind: str
    seed: int
    verdict: str
    told: str
    """What the case did."""
    found: str
    """What does not hold; empty for a good verdict."""
    seconds: float


@dataclass
class _Running:
    kind: str
    seed: int
    folder: Path
    began: float


def campaign(
    kinds: list[str],
    *,
    seed: int,
    seconds: float,
    cases: int | None,
    workers: int,
    scratch: Path,
    keep: bool = False,
) -> Iterator[Result]:
    """Run cases of `kinds` side by side, and yield what comes of each.

    The kind that is furthest behind its share of the time is next; each kind has at most `cases`,
    with the seeds that follow `seed`. No case begins after `seconds`.
    """
    shared = scratch / "shared"
    shared.mkdir()
    end = time.monotonic() + seconds
    begun: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    running: dict[int, _Running] = {}
    try:
        while True:
            while len(running) < workers and time.monotonic() < end:
                left = [kind for kind in kinds if cases is None or begun[kind] < cases]
                if not left:
                    break
                kind = min(left, key=lambda name: _progress(name, begun, spent, running))
                each = _Running(
                    kind, seed + begun[kind], scratch / f"case-{sum(begun.values())}", 0
                )
                begun[kind] += 1
                running[_begin(each, shared)] = each
            if not running:
                return
            done = _first_ended(running)
            each = running.pop(done)
            result = _result_of(each)
            spent[each.kind] += result.seconds
            if not keep:
                shutil.rmtree(each.folder, ignore_errors=True)
            yield result
    finally:
        for pid in running:
            _stop(pid)


def _progress(
    kind: str, begun: Counter[str], spent: Counter[str], running: dict[int, _Running]
) -> tuple[bool, float, int]:
    """Order kinds by time spent for their share, one that has not begun before all others."""
    now = time.monotonic()
    going = sum(now - each.began for each in running.values() if each.kind == kind)
    return begun[kind] > 0, (spent[kind] + going) / KINDS[kind].share, begun[kind]


def _begin(each: _Running, shared: Path) -> int:
    each.folder.mkdir()
    each.began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            die_with_parent()
            _be_the_case(each, shared)
            code = 0
        except BaseException:  # noqa: BLE001  a fork must not go on as its parent
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def _be_the_case(each: _Running, shared: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(SystemExit(1)))
    case = Case(each.kind, each.seed, each.folder, shared)
    found = ""
    try:
        verdict = KINDS[each.kind].attack(case)
    except Found as error:
        verdict, found = error.verdict, error.what
    finally:
        case.end()
    seconds = round(time.monotonic() - each.began, 3)
    result = Result(each.kind, each.seed, verdict, "; ".join(case.told), found, seconds)
    (each.folder / "result.json").write_text(json.dumps(asdict(result)))


def _first_ended(running: dict[int, _Running]) -> int:
    while True:
        for pid, each in running.items():
            if os.waitpid(pid, os.WNOHANG)[0]:
                return pid
            if time.monotonic() > each.began + CASE_SECONDS:
                _stop(pid)
                return pid
        time.sleep(0.003)


def _result_of(each: _Running) -> Result:
    file = each.folder / "result.json"
    if file.exists():
        return Result(**json.loads(file.read_text()))
    why = "the case itself failed, see above: a fault of the campaign, or a command without end"
    return Result(each.kind, each.seed, Verdict.HANG, "", why, time.monotonic() - each.began)


def _stop(pid: int) -> None:
    """End a case, which then ends its commands; they end with it in any case."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < until:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
