"""The recipes in a folder of them, and what each says of itself."""

from __future__ import annotations

from pathlib import Path

from narrowcast.config.yaml_text import parse


def recipes_in(folder: Path | None) -> dict[str, Path]:
    """Return the file of every recipe in `folder` by its path in it, without the ending."""
    if folder is None:
        return {}
    matches = sorted(folder.rglob("*.yaml"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in matches}


def read_description(path: Path) -> str:
    """Return the line by which a recipe says what it is."""
    value = parse(path.read_text(encoding="utf-8")).value
    return str(value.get("description", "")) if isinstance(value, dict) else ""
