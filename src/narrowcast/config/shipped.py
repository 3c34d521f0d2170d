"""The recipes that come with the package."""

from __future__ import annotations

from pathlib import Path

from narrowcast.config.yaml_text import parse

FOLDER = Path(__file__).parent / "recipes"


def shipped_recipes() -> list[tuple[str, str]]:
    """Return the name and the one-line description of every shipped recipe."""
    return [(name, _description(path)) for name, path in recipe_files().items()]


def recipe_files() -> dict[str, Path]:
    """Return the file of every shipped recipe by name, those without a folder first."""
    files = {
        path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in FOLDER.rglob("*.yaml")
    }
    return dict(sorted(files.items(), key=lambda item: (item[0].count("/"), item[0])))


def _description(path: Path) -> str:
    value = parse(path.read_text(encoding="utf-8")).value
    return str(value.get("description", "")) if isinstance(value, dict) else ""
