"""Where a recipe comes from: the name of a shipped one, or a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from narrowcast.config.wording import closest
from narrowcast.errors import RecipeError

LARGEST_FILE = 2**20
"""Bytes a recipe may have; somebody who names a data file should not wait for all of it."""


@dataclass(frozen=True)
class Source:
    """The text of a recipe, and what to call it."""

    name: str
    """What the run is called unless the recipe says otherwise."""
    origin: str
    """What `resolved.json` calls it."""
    shown: str
    """What error messages call it."""
    text: str


def read_source(source: str | Path, shipped: Mapping[str, Path]) -> Source:
    """Read the file called `source` or the one of that name in `shipped`, or raise RecipeError."""
    if isinstance(source, str) and source in shipped:
        origin = f"{source}.yaml"
        return Source(source, origin, origin, _read(shipped[source]))
    path = Path(source).expanduser()
    if not str(source).strip() or not path.exists():
        raise RecipeError(_not_found(str(source), path, list(shipped)))
    return Source(path.stem, path.name, str(source), _read(path))


def _read(path: Path) -> str:
    if path.is_dir():
        inside = sorted(file.name for file in path.glob("*.yaml"))
        example = path / inside[0] if inside else path / "recipe.yaml"
        raise RecipeError(f"{path} is a folder, not a recipe; name a file, e.g. {example}")
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {path}: {error.strerror}") from error
    if len(content) > LARGEST_FILE:
        raise RecipeError(f"{path} is larger than 1 MiB, so it is not a recipe; name a YAML file")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise RecipeError(f"{path} is not UTF-8 text, so it is not a recipe; name a YAML file")
    return text


def _not_found(source: str, path: Path, names: list[str]) -> str:
    """Say that nothing is called `source`, and what is called something like it."""
    looks_like_a_file = path.suffix in (".yaml", ".yml")
    bare = source.removesuffix(path.suffix) if looks_like_a_file else source
    beside = {str(file) for file in path.parent.glob("*.yaml")} if path.parent.is_dir() else set()
    guess = bare if bare in names else closest(source, beside) or closest(bare, names)
    last_names = {name.rpartition("/")[2]: name for name in names}
    guess = guess or last_names.get(bare)
    what = "file" if looks_like_a_file else "recipe"
    hint = f"; did you mean {guess}?" if guess else ";"
    shipped = ", ".join(names) or "none"
    return (
        f"{source or '(nothing)'}: no such {what}{hint} shipped recipes: {shipped}; "
        "or name a YAML file"
    )
