"""What `narrowcast ica` is asked for, checked before anything takes long."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowcast.errors import ConfigError
from narrowcast.plain_files import expand_path
from narrowcast.runs.writing import explain_write_error, replace_file

if TYPE_CHECKING:
    from narrowcast.workloads.sft.ica.selection import Selector


def device_named(name: str) -> str:
    """Return the device that is meant; one that is not there is refused."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        text = str(error).splitlines()[0]
        raise ConfigError(
            f"--device {name} is not available: {text}. Write auto, cpu or cuda."
        ) from None
    return name


def make_selector(options: Mapping[str, Any]) -> "Selector":
    """Return how channels are selected: by one of --percentile, --zscore and --top-k."""
    from narrowcast.workloads.sft.ica.selection import Percentile, TopK, ZScore

    named = [name for name in ("percentile", "zscore", "top_k") if options[name] is not None]
    if len(named) > 1:
        terms = " and ".join(f"--{name.replace('_', '-')}" for name in named)
        raise ConfigError(f"{terms} cannot be combined. Keep one.")
    if options["two_sided"] and options["zscore"] is None:
        raise ConfigError("--two-sided needs --zscore. Add --zscore, or leave --two-sided out.")
    if options["zscore"] is not None:
        return ZScore(options["zscore"], two_sided=options["two_sided"])
    if options["top_k"] is not None:
        return TopK(options["top_k"])
    return Percentile(98.0 if options["percentile"] is None else options["percentile"])


def numbers_in(text: str | None) -> list[int] | None:
    """Return the components that are named; none where all are meant."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--components must be numbers separated by commas, such as 0,2, got {text}."
        ) from None


def output_path(name: str) -> Path:
    """Return where to write; refuse at once what could not be written in the end."""
    path = expand_path(name)
    if path.is_dir() or not path.parent.is_dir():
        why = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(f"{name} cannot be written: {why}. Write a file in an existing folder.")
    return path


def write(path: Path, text: str) -> None:
    """Write a file, or say why it cannot be."""
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {explain_write_error(error)}.") from None
