"""What a command may do whatever it is given: end in time, in words, with an exit code that is so.

A check that does not hold raises `Found`; a case without one ends with a good verdict.
"""

import re
import signal
from collections.abc import Collection
from enum import StrEnum

from attacks.forks import Ended

DONE, BAD_INPUT, UNSUPPORTED, DIVERGED, INTERRUPTED = 0, 2, 3, 4, 130
REFUSED_CODES = frozenset({BAD_INPUT, UNSUPPORTED, DIVERGED})
ANY_CODE = frozenset({DONE, INTERRUPTED}) | REFUSED_CODES
LONGEST_MESSAGE = 20_000
"""Characters of a refusal; whoever gets more than that reads none of it."""
_BUG = re.compile(
    r"Traceback \(most recent call last\)|Exception ignored|^Fatal Python error", re.M
)
_ERROR = re.compile(r"^[\w.]+(?:Error|Exception|Interrupt|Exit)\b.*", re.M)
_MESSAGE = re.compile(r"^(narrowcast: |Error: )", re.M)


class Verdict(StrEnum):
    """What came of a case."""

    REFUSED = "refused well"
    EQUAL = "resumed equal"
    FINE = "fine"
    TRACEBACK = "tracebacks"
    HANG = "hangs"
    SILENT = "silent"
    LOST = "lost"
    NOT_HERE = "not possible here"


GOOD = (Verdict.REFUSED, Verdict.EQUAL, Verdict.FINE)
BAD = (Verdict.TRACEBACK, Verdict.HANG, Verdict.SILENT, Verdict.LOST)


class Found(Exception):  # noqa: N818  not an error of this program
    """What a case has found, with the verdict it counts as."""

    def __init__(self, verdict: Verdict, what: str) -> None:
        super().__init__(what)
        self.verdict, self.what = verdict, what


def well_ended(ended: Ended, *, codes: Collection[int] = ANY_CODE) -> Ended:
    """Check that a command ended in time, with one of `codes` and without a traceback.

    One that is refused says why, in one message that can be read.
    """
    shown = f"`narrowcast {ended.words[0] if ended.words else ''} …`"
    if ended.code is None:
        raise Found(Verdict.HANG, f"{shown}: {ended.why_stopped}")
    if _BUG.search(ended.said):
        raise Found(Verdict.TRACEBACK, f"{shown}: exit {ended.code}: {_error_in(ended.said)}")
    if ended.code < 0 and ended.code not in codes:
        name = signal.Signals(-ended.code).name
        raise Found(Verdict.TRACEBACK, f"{shown}: ended by {name}: {_last_line(ended.err)}")
    if ended.code in REFUSED_CODES or ended.code == INTERRUPTED:
        _check_message(ended, shown)
    if ended.code not in codes:
        expected = ", ".join(map(str, sorted(codes)))
        raise Found(
            Verdict.SILENT,
            f"{shown}: exit {ended.code} where {expected} is due: {_last_line(ended.said)}",
        )
    return ended


def refused(ended: Ended) -> bool:
    """Say whether a command that ended well was refused."""
    return ended.code in REFUSED_CODES


def _check_message(ended: Ended, shown: str) -> None:
    messages = len(_MESSAGE.findall(ended.err))
    if messages != 1:
        raise Found(Verdict.SILENT, f"{shown}: exit {ended.code} with {messages} messages")
    if len(ended.err) > LONGEST_MESSAGE:
        raise Found(Verdict.SILENT, f"{shown}: a message of {len(ended.err)} characters")


def _error_in(text: str) -> str:
    """Return the line of a traceback that names the error; notes may follow it."""
    named = _ERROR.findall(text)
    return named[-1][:300] if named else _last_line(text)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing said"
