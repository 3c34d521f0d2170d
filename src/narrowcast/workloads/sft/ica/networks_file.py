"""Functional networks as strict JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from narrowcast.errors import ConfigError
from narrowcast.runs.strict_json import NONFINITE
from narrowcast.workloads.sft.ica.networks import Channels, FunctionalNetworks, Layout, Provenance

FORMAT = "narrowcast.functional_networks.1"


def save_networks(networks: FunctionalNetworks, path: Path | str) -> None:
    """Write networks atomically."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(networks_to_json(networks), encoding="utf-8")
    part.replace(path)


def load_networks(path: Path | str) -> FunctionalNetworks:
    """Read a file of `save_networks`, or a template file of FunctionalNetworksSFT."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as networks: {error}.") from None
    try:
        return networks_from_json(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def networks_to_json(networks: FunctionalNetworks) -> str:
    """Return networks as deterministic JSON."""
    value = {
        "format": FORMAT,
        "provenance": asdict(networks.provenance),
        "layout": asdict(networks.layout),
        "networks": {
            str(component): {str(layer): list(c) for layer, c in sorted(network.items())}
            for component, network in sorted(networks.networks.items())
        },
        "scores": {str(c): asdict(score) for c, score in sorted(networks.scores.items())},
    }
    return json.dumps(value, allow_nan=False, ensure_ascii=False) + "\n"


def networks_from_json(text: str) -> FunctionalNetworks:
    """Return the networks of a JSON text."""
    try:
        value = json.loads(text, object_pairs_hook=_once_each, parse_constant=_raise_constant)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(
            f"The file is not JSON: {error}. Use a file written by `narrowcast ica build`."
        ) from None
    if isinstance(value, dict) and "templates" in value:
        top = _keys(value, "the file", {"name", "layout", "templates"})
        layout = _keys(top["layout"], "layout", {"captured_layers_sorted", "hidden_size"})
        return FunctionalNetworks(
            provenance=Provenance(name=read_typed(top["name"], str, "name")),
            layout=Layout(
                layers=read_typed(
                    layout["captured_layers_sorted"], tuple[int, ...], "captured_layers_sorted"
                ),
                width=read_typed(layout["hidden_size"], int, "hidden_size"),
            ),
            networks=read_typed(top["templates"], Mapping[int, Channels], "templates"),
        )
    known = {"format", *FunctionalNetworks.__dataclass_fields__}
    top = _keys(value, "the file", known)
    if (written := top.pop("format")) != FORMAT:
        raise ConfigError(f"format must be {FORMAT}, got {written!r}.")
    networks: FunctionalNetworks = read_typed(top, FunctionalNetworks, "")
    return networks


def read_typed(value: Any, kind: Any, where: str) -> Any:
    """Return parsed JSON as a value of a type, or raise with the path of what does not fit."""
    origin, args = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        parts = _keys(value, where, set(hints))
        prefix = f"{where}." if where else ""
        return kind(**{k: read_typed(parts[k], hint, f"{prefix}{k}") for k, hint in hints.items()})
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list.")
        return tuple(read_typed(each, args[0], where) for each in value)
    if origin is Mapping:
        if not isinstance(value, dict):
            raise ConfigError(f"{where} must be an object.")
        for key in value:
            if not (key.isascii() and key.isdecimal() and str(int(key)) == key):
                raise ConfigError(f"Keys of {where} must be numbers from 0, got {key!r}.")
        return {int(k): read_typed(each, args[1], f"{where}.{k}") for k, each in value.items()}
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{where} must be {' or '.join(args)}, got {value!r}.")
        return value
    if NoneType in args:
        return None if value is None else read_typed(value, args[0], where)
    if kind is float:
        value = NONFINITE.get(value, value) if isinstance(value, str) else value
        value = float(value) if type(value) is int else value
    if type(value) is not kind:
        what = {int: "a whole number", float: "a number", str: "text"}[kind]
        raise ConfigError(f"{where} must be {what}, got {value!r}.")
    return value


def _keys(value: Any, where: str, names: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != names:
        has = ", ".join(sorted(value)) if isinstance(value, dict) else type(value).__name__
        raise ConfigError(f"{where} must have {', '.join(sorted(names))}, got {has or 'nothing'}.")
    return value


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"The key {twice!r} occurs twice in one object. Remove one of them.")
    return made


def _raise_constant(name: str) -> None:
    raise ConfigError(f"{name} is not a JSON number.")
