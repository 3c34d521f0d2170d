"""Where a recipe comes from: the name of a shipped one, or a file."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from narrowcast.config.limits import LARGEST_FILE
from narrowcast.config.problems import closest, shown_path
from narrowcast.errors import ConfigError
from narrowcast.plain_files import expand_path, read_pipe, read_plain, stat_or_none

SILENCE_SECONDS = 5
"""Time without data after which a pipe counts as abandoned."""


@dataclass(frozen=True)
class RecipeSource:
    """The text of a recipe, and what to call it."""

    name: str
    """What the run is called unless the recipe says otherwise."""
    origin: str
    """What `resolved.json` calls it."""
    shown: str
    """What error messages call it."""
    text: str


def read_source(source: str | Path, shipped: Mapping[str, Path]) -> RecipeSource:
    """Read the file called `source` or the one of that name in `shipped`, or raise ConfigError."""
    if isinstance(source, str) and source in shipped:
        origin = f"{source}.yaml"
        return RecipeSource(source, origin, origin, shipped[source].read_text(encoding="utf-8"))
    path = expand_path(source)
    try:
        if str(source).strip() and (result := stat_or_none(path)) is not None:
            shown = shown_path(source)
            if stat.S_ISFIFO(result.st_mode):  # `<(…)`, or /dev/stdin: a number, no name
                piped = read_pipe(path, most=LARGEST_FILE, seconds=SILENCE_SECONDS)
                return RecipeSource("piped", "pipe", shown, _text(path, piped))
            return RecipeSource(path.stem, path.name, shown, _read(path))
    except OSError as error:
        raise ConfigError(
            f"cannot read the recipe {shown_path(path)}: {error.strerror}. Name a YAML file"
        ) from error
    raise ConfigError(_missing_source(str(source), path, list(shipped)))


def _read(path: Path) -> str:
    if path.is_dir():
        inside = sorted(file.name for file in path.glob("*.yaml"))
        example = path / inside[0] if inside else path / "recipe.yaml"
        raise ConfigError(f"a recipe must be a file, got the folder {path}. Name e.g. {example}")
    return _text(path, read_plain(path, most=LARGEST_FILE))


def _text(path: Path, content: bytes | bytearray) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ConfigError(f"a recipe must be UTF-8 text, which {path} is not. Name a YAML file")
    return text


def _missing_source(source: str, path: Path, names: list[str]) -> str:
    """Return that nothing is called `source`, and what is called something like it."""
    looks_like_a_file = path.suffix in (".yaml", ".yml")
    bare = source.removesuffix(path.suffix) if looks_like_a_file else source
    residuals = (
        {str(file) for file in path.parent.glob("*.yaml")} if path.parent.is_dir() else set()
    )
    guess = bare if bare in names else closest(source, residuals) or closest(bare, names)
    last_names = {name.rpartition("/")[2]: name for name in names}
    guess = guess or last_names.get(bare)
    what = "file" if looks_like_a_file else "recipe"
    hint = f"Did you mean {guess}? " if guess else ""
    shipped = ", ".join(names) or "none"
    requested = shown_path(source) or "(nothing)"
    return f"{requested}: no such {what}. {hint}Name a YAML file or a shipped recipe: {shipped}"
