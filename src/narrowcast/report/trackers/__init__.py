"""Trackers that get the records of a run as it goes on: TensorBoard, and W&B without a network."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from narrowcast.errors import UnsupportedError
from narrowcast.report.trackers.tensor_board import TensorBoard
from narrowcast.report.trackers.tracker import Tracker, Trackers
from narrowcast.report.trackers.weights_and_biases import WeightsAndBiases, import_wandb
from narrowcast.runs.records import Record

__all__ = ["Tracker", "Trackers", "open_trackers", "require_trackers"]

NEEDED: dict[str, Callable[[], object]] = {
    "tensorboard": lambda: import_module("torch.utils.tensorboard"),
    "wandb": import_wandb,
}
"""How each tracker's package is imported."""


def require_trackers(names: Sequence[str]) -> None:
    """Refuse trackers whose package is missing or broken. Imports those that are asked for."""
    for name in names:
        try:
            NEEDED[name]()
        except ImportError as error:
            raise UnsupportedError(
                f"trackers={name} needs the package {name}, which cannot be imported ({error}). "
                f"Run `pip install {name}`, or leave {name} out of trackers"
            ) from None


def open_trackers(
    names: Sequence[str],
    *,
    folder: Path,
    earlier: Sequence[Record],
    recipe_text: str,
    settings: Mapping[str, Any],
    tell: Callable[[str], None],
) -> Trackers:
    """Open the trackers called `names` for the run in `folder`.

    `earlier` are the records it goes on from, `settings` its recipe as flat keys; `tell` gets a
    sentence for each tracker that fails.
    """
    openers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(folder, earlier=earlier, recipe_text=recipe_text),
        "wandb": lambda: WeightsAndBiases(
            folder, earlier=earlier, name=str(settings.get("name", "")), settings=settings
        ),
    }
    return Trackers({name: openers[name] for name in dict.fromkeys(names)}, tell=tell)
