"""Data sets of the Hugging Face Hub, through `datasets`, where it is installed."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from narrowcast.config.problems import shortened
from narrowcast.config.workload import require_modules
from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.workloads.sft.data.rows import INSTALL, Row

VALIDATION = ("validation", "val", "dev", "valid")
"""What splits to validate on are called, the first that is there being taken."""


class HubSplits(NamedTuple):
    """The splits of a data set that are of use."""

    train_name: str
    train: Callable[[], Iterator[Row]]
    validation_name: str
    validation: Callable[[], Iterator[Row]] | None
    note: str
    """What was decided, where it might surprise."""


def hub_splits(name: str, config: str | None, *, key: str) -> HubSplits:
    """Load a data set, from the Hub or from the copy that `datasets` keeps of it."""
    requested = f"data.{key}={name} is not a file; as a dataset of the Hugging Face Hub it"
    require_modules(["datasets"], of=requested, install=INSTALL)
    import datasets

    try:
        loaded = datasets.load_dataset(name, config)
    except (ConnectionError, TimeoutError) as error:
        raise UnsupportedError(
            f"{requested} cannot be downloaded and is not in the local cache: {error}. Write a "
            "local file."
        ) from error
    except Exception as error:  # of what it calls in turn, over the net and on the disk
        raise ConfigError(
            f"{requested} cannot be loaded: {shortened(str(error), 300)}. Write the name of an "
            "existing dataset or file."
        ) from error
    return _chosen(name, dict(loaded))


def _chosen(name: str, splits: dict[str, Any]) -> HubSplits:
    if not splits:
        raise ConfigError(f"Dataset {name} has no splits. Write another dataset.")
    train = "train" if "train" in splits else next(iter(splits))
    held = next((each for each in VALIDATION if each in splits and each != train), "")
    return HubSplits(
        train_name=train,
        train=lambda: _rows(name, train, splits[train]),
        validation_name=held,
        validation=(lambda: _rows(name, held, splits[held])) if held else None,
        note="" if train == "train" else f"{name} has no train split; using split {train}",
    )


def _rows(name: str, split: str, rows: Any) -> Iterator[Row]:
    number = 0
    for number, values in enumerate(rows, 1):
        yield Row(values, f"{name} ({split}), row {number}")
    if not number:
        raise ConfigError(f"Split {split} of dataset {name} has no rows. Write another dataset.")
