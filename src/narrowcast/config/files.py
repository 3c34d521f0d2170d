"""Local files that a recipe names, by path or glob; checked before anything is built."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from narrowcast.config.problems import Problems, shown_path
from narrowcast.config.sections import Recipe
from narrowcast.errors import ConfigError
from narrowcast.plain_files import expand_path, stat_or_none


def check_files(recipe: Recipe) -> None:
    """Raise if a file that the recipe names does not exist."""
    problems = Problems()
    for name, section in {"data": recipe.data, "model": recipe.model, **recipe.further}.items():
        for setting, paths in section.required_files.items():
            for path in missing_files(paths):
                problems.add(f"{name}.{setting}: {shown_path(path)}: no such file")
    if problems:
        where = shown_path(Path.cwd())
        advice = f"Write the path of an existing file. Relative paths are read from {where}."
        raise ConfigError("\n".join([*problems.lines(), advice]))


def missing_files(paths: Iterable[str]) -> list[str]:
    """Return the paths and globs that lead to no file."""
    return [path for path in paths if not _exists(expand_path(path))]


def _exists(path: Path) -> bool:
    """Return whether a path or glob leads to something; reading it says what else is wrong."""
    try:
        return stat_or_none(path) is not None or bool(matching(path))
    except (OSError, ValueError):
        return True


def matching(glob: Path) -> list[Path]:
    """Return the files and folders that a glob matches, sorted."""
    if not re.search(r"[*?[]", str(glob)):
        return [glob] if os.path.lexists(glob) else []
    return sorted(set(Path(glob.anchor).glob(str(glob.relative_to(glob.anchor)))))
