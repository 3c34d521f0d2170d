"""Settings as Python keywords: short names and plain values, for classes that run a recipe."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from narrowcast.config.section import Section
from narrowcast.errors import ConfigError


def full_name(name: str, sections: Mapping[str, type[Section]]) -> str:
    """Return the dotted name of a setting that only one of the sections has."""
    if "." in name:
        return name
    homes = [section for section, kind in sections.items() if name in kind.model_fields]
    if len(homes) > 1:
        terms = " or ".join(f"{section}.{name}" for section in homes)
        raise ConfigError(f"{name} is a setting of several sections. Write {terms}.")
    return f"{homes[0]}.{name}" if homes else name


def as_arguments(settings: Mapping[str, Any], sections: Mapping[str, type[Section]]) -> list[str]:
    """Return settings as KEY=VALUE arguments of the command line."""
    return [f"{full_name(name, sections)}={_text(value)}" for name, value in settings.items()]


def _text(value: Any) -> str:
    """Return a value as the command line takes it: text as it is, all else as JSON."""
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, Iterable) and not isinstance(value, Mapping):
        value = list(value)
    return json.dumps(value, default=str)
