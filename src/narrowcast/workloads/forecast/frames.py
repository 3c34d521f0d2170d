"""Frames of pandas and polars, made from columns; both packages are optional."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from narrowcast.errors import UnsupportedError


def same_kind(table: Any) -> str:
    """Return the package whose frame a result for this table is."""
    module = type(table).__module__.partition(".")[0]
    if module in ("pandas", "polars", "pyarrow"):
        return module
    assert isinstance(table, str | Path)
    return next((name for name in ("pandas", "polars") if importlib.util.find_spec(name)), "")


def make_frame(columns: Mapping[str, Any], package: str) -> Any:
    """Return a frame of a package, with one column per entry."""
    if not package:
        raise UnsupportedError(
            "A forecast is returned as a frame, which needs pandas or polars. Run pip install "
            "pandas."
        )
    library = importlib.import_module(package)
    if package == "pandas":
        return library.DataFrame(dict(columns))
    plain = {name: list(each) if each.dtype == object else each for name, each in columns.items()}
    return library.table(plain) if package == "pyarrow" else library.DataFrame(plain)
