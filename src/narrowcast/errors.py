"""What can go wrong that a user can put right; each error knows the exit code it ends with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


class NarrowcastError(Exception):
    """Say what was asked, why it cannot be, and what to write instead."""

    exit_code: ClassVar[int] = 2


class ConfigError(NarrowcastError, ValueError):
    """A recipe, an override, a policy or a file it names is not usable as written."""


class UnsupportedError(NarrowcastError, NotImplementedError):
    """What was asked is meaningful, but not on this machine or in this version."""

    exit_code = 3


class Interrupted(NarrowcastError):  # noqa: N818  # an event, not a mistake
    """A signal asked for an early end; what there was is saved."""

    exit_code = 130


class DivergedError(NarrowcastError):
    """Training cannot go on: every further step would overflow."""

    exit_code = 4

    def __init__(self, fact: str, advice: str = "") -> None:
        """Say what happened, and apart from it what to look at."""
        super().__init__(f"{fact}. {advice}" if advice else fact)
        self.fact = fact


class CheckpointError(NarrowcastError):
    """A checkpoint or run folder is missing, damaged, or of something else."""


@contextmanager
def blamed_on(what: str) -> Iterator[None]:
    """Let an exception of somebody else's code say whose it was; whatever it is, it goes on."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This was {what}.")
        raise
