"""The parts of a checkpoint that is whole but not what a run saves: told apart and named.

Its checksums say that a checkpoint is as it was written, not that a run has written it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from narrowcast.errors import CheckpointError
from narrowcast.runs.shape import ANY, LARGEST, misfit, unreadable
from narrowcast.training.checkpoints.checkpoint import checkpoint_step

_COUNTS = ("step", "batches", "evaluated")
_NUMBERS = [(int, float)]
_PLAIN = {
    "schedule": {**dict.fromkeys(("phase", "since", "calm"), int), "losses": _NUMBERS},
    "investigator": {
        **dict.fromkeys(("replays", "row"), int),
        "named": str,
        "explained": bool,
        "overflowed_at": ([str, str], type(None)),
    },
    "observer": {
        "amax": [[str, str, _NUMBERS]],
        "losses": _NUMBERS,
        "active": [[str, str, str, int, int]],
    },
    "adapter": {
        "adaptation": {"overrides": {ANY: str}, "changed": {ANY: int}, "troubled": {ANY: int}},
        "seen": [[int, [[str, str, str]], list]],
    },
    "vital_signs": {
        **dict.fromkeys(("steps", "applied", "skipped_at_end", "evaluated", "bad_from"), int),
        **dict.fromkeys(("headline", "weights"), str),
    },
    "improvement": {
        **dict.fromkeys(("best", "counted"), (int, float)),
        **dict.fromkeys(("best_step", "stalled", "evaluated"), int),
    },
    "best_weights": {"wanted": bool, "step": int, "sha256": str},
}
"""Parts that nobody looks at when they are loaded, but in the steps after."""
_SHAPE = {
    **dict.fromkeys(_COUNTS, int),
    **_PLAIN,
    "shapes": {ANY: [int]},
    "frozen": {ANY: str},
    "random": {ANY: object},
    "hooks": {ANY: dict},
    "data": {"samples": int, "digest": str, "looked_at": str},
    "settings": {ANY: object},
    "records": {"bytes": int, "sha256": str},
}
_ALL_NEEDED = (*_COUNTS, "shapes", "random")


def require_run_state(state: dict[str, Any], path: Path) -> None:
    """Raise if the checkpoint at `path` is not the state of a run at that step."""
    wrong = next((f"it has no {key}" for key in _ALL_NEEDED if key not in state), None)
    wrong = wrong or misfit(state, _SHAPE) or unreadable([state.get(name) for name in _PLAIN])
    if not wrong:
        small = all(0 <= state[name] < LARGEST for name in _COUNTS)
        wrong = None if small else f"no run has counts of {', '.join(_COUNTS)} like these"
    if not wrong and state["step"] != checkpoint_step(path):
        wrong = f"it is of step {state['step']}"
    if wrong:
        raise CheckpointError(
            f"{path} is not the state of a run at that step: {wrong}. Remove it to resume from an "
            "older checkpoint."
        )


@contextmanager
def blamed_on_part(step: int, name: str) -> Iterator[None]:
    """Name the part of the checkpoint in errors raised inside the block."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"Cannot restore the {name} from the checkpoint of step {step}. {error}"
        ) from error
    except torch.OutOfMemoryError:
        raise
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(
            f"Cannot restore the {name} from the checkpoint of step {step} "
            f"({type(error).__name__}: {error}). Remove the checkpoint to resume from an older "
            "one, or use the version that saved it."
        ) from error
