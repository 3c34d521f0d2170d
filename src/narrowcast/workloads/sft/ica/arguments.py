"""Checks of arguments: what has the wrong type raises before it does something else silently."""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, get_args

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica.networks import Site


def check_whole(name: str, value: object, *, least: int) -> None:
    """Raise unless a value is a whole number of `least` or more."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ConfigError(f"{name} must be a whole number of {least} or more, got {value!r}.")


def check_number(name: str, value: object, what: str) -> float:
    """Return a value that is a number; raise if it is none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} must be {what}, got {value!r}.")
    return float(value)


def check_type(name: str, value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Raise unless a value is of a type."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be {what}, got {_shown(value)}.")


def check_site(site: object) -> None:
    """Raise unless a site is one of those there are."""
    if site not in get_args(Site):
        raise ConfigError(f"site must be {' or '.join(get_args(Site))}, got {site!r}.")


def check_channels(channels: object) -> None:
    """Raise unless channels are whole numbers by layer."""
    example = "channels must be whole numbers by layer, such as {0: (1, 5)}"
    if not isinstance(channels, Mapping):
        raise ConfigError(f"{example}, got {_shown(channels)}.")
    for layer, chosen in channels.items():
        if not isinstance(chosen, tuple | list | set | frozenset | range) or not all(
            isinstance(each, Integral) for each in (layer, *chosen)
        ):
            raise ConfigError(f"{example}, got {{{layer!r}: {chosen!r}}}.")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"
