"""Functional networks as strict JSON: what is not understood is refused, nothing is guessed."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, get_args

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica.networks import (
    Channels,
    FunctionalNetworks,
    Layout,
    Provenance,
    Score,
    Site,
)

FORMAT = "narrowcast.functional_networks.1"
_Item = TypeVar("_Item")


def save_networks(networks: FunctionalNetworks, path: Path | str) -> None:
    """Write networks; a file of that name is replaced only once all is written."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(networks_to_json(networks), encoding="utf-8")
    part.replace(path)


def load_networks(path: Path | str) -> FunctionalNetworks:
    """Read what `save_networks` wrote, or a template file with `templates` and no provenance."""
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
    """Return networks as JSON; the same networks, the same text."""
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
        return _from_templates(value)
    top = _keys(value, "the file", {"format", "provenance", "layout", "networks", "scores"})
    if top["format"] != FORMAT:
        raise ConfigError(f"format must be {FORMAT}, got {top['format']!r}.")
    return FunctionalNetworks(
        provenance=_provenance(top["provenance"]),
        layout=_layout(top["layout"]),
        networks=_numbered(top["networks"], "networks", _network),
        scores=_numbered(top["scores"], "scores", _score),
    )


def _from_templates(value: Mapping[str, Any]) -> FunctionalNetworks:
    """Read the files of FunctionalNetworksSFT: a name, a layout and templates."""
    top = _keys(value, "the file", {"name", "layout", "templates"})
    layout = _keys(top["layout"], "layout", {"captured_layers_sorted", "hidden_size"})
    return FunctionalNetworks(
        provenance=Provenance(name=_text(top["name"], "name")),
        layout=Layout(
            layers=_numbers(layout["captured_layers_sorted"], "captured_layers_sorted"),
            width=_number(layout["hidden_size"], "hidden_size"),
        ),
        networks=_numbered(top["templates"], "templates", _network),
    )


def _provenance(value: Any) -> Provenance:
    got = _keys(value, "provenance", set(Provenance.__dataclass_fields__))
    findings = got["findings"]
    if not isinstance(findings, list):
        raise ConfigError("provenance.findings must be a list of strings.")
    return Provenance(
        name=_text(got["name"], "provenance.name"),
        model=_text(got["model"], "provenance.model"),
        data=_text(got["data"], "provenance.data"),
        seed=None if got["seed"] is None else _number(got["seed"], "provenance.seed"),
        dtype=_text(got["dtype"], "provenance.dtype"),
        selector=_text(got["selector"], "provenance.selector"),
        signals=_text(got["signals"], "provenance.signals"),
        findings=tuple(_text(each, "provenance.findings") for each in findings),
    )


def _layout(value: Any) -> Layout:
    got = _keys(value, "layout", {"layers", "width", "depth", "site"})
    if got["site"] not in get_args(Site):
        raise ConfigError(
            f"layout.site must be {' or '.join(get_args(Site))}, got {got['site']!r}."
        )
    return Layout(
        layers=_numbers(got["layers"], "layout.layers"),
        width=_number(got["width"], "layout.width"),
        depth=None if got["depth"] is None else _number(got["depth"], "layout.depth"),
        site=got["site"],
    )


def _network(value: Any, where: str) -> Channels:
    return _numbered(value, where, _numbers)


def _score(value: Any, where: str) -> Score:
    got = _keys(value, where, set(Score.__dataclass_fields__))
    for name, number in got.items():
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ConfigError(f"{where}.{name} must be a number, got {number!r}.")
    return Score(**{name: float(number) for name, number in got.items()})


def _numbered(value: Any, where: str, item: Callable[[Any, str], _Item]) -> dict[int, _Item]:
    """Return an object whose keys are numbers as people write them: no 01, no -1."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be an object.")
    for key in value:
        if not (key.isascii() and key.isdecimal() and str(int(key)) == key):
            raise ConfigError(f"Keys of {where} must be numbers from 0, got {key!r}.")
    return {int(key): item(each, f"{where}.{key}") for key, each in value.items()}


def _numbers(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{where} must be a list of numbers.")
    return tuple(_number(each, where) for each in value)


def _number(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{where} must have whole numbers, got {value!r}.")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where} must be text, got {value!r}.")
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
