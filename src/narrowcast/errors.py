"""What can go wrong that a user can put right; each error knows the exit code it ends with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


class NarrowcastError(Exception):
    """Base class of errors that users can fix. The message says what is wrong and what to do."""

    exit_code: ClassVar[int] = 2


class ConfigError(NarrowcastError, ValueError):
    """An argument, a recipe, an override or a policy is invalid."""


class UnsupportedError(NarrowcastError, NotImplementedError):
    """The request is valid, but this machine or this version does not support it."""

    exit_code = 3


class Interrupted(NarrowcastError):  # noqa: N818  # an event, not a mistake
    """A signal requested an early end. Everything so far is saved."""

    exit_code = 130


class DivergedError(NarrowcastError):
    """Training cannot continue, because every further step would be skipped."""

    exit_code = 4

    def __init__(self, fact: str, advice: str = "") -> None:
        """Join what happened and what to do into one message."""
        super().__init__(f"{fact}. {advice}" if advice else fact)
        self.fact = fact


class RankError(NarrowcastError):
    """Another process of a run on several ranks died, hung or failed."""

    exit_code = 5


class CheckpointError(NarrowcastError):
    """A checkpoint or run folder is missing, damaged, or from another run."""


@contextmanager
def blamed_on(what: str) -> Iterator[None]:
    """Add a note to exceptions of other code that says where they come from."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This was {what}.")
        raise
