"""Functional networks: for each component, channels by layer; and checks of arguments."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias, final, get_args

from narrowcast.errors import ConfigError

Site: TypeAlias = Literal["mlp_output", "down_input"]
Channels: TypeAlias = Mapping[int, tuple[int, ...]]
"""Ascending channels by layer."""
_PART = re.compile(r"(?P<one>[0-9]+)|(?P<start>[0-9]*):(?P<stop>[0-9]*)", re.ASCII)


@final
@dataclass(frozen=True, kw_only=True)
class Layout:
    """The analysed channels."""

    layers: tuple[int, ...]
    width: int
    """Channels per layer."""
    depth: int | None = None
    """Layers of the model, if known."""
    site: Site = "mlp_output"

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ConfigError(f"layers must be unique, ascending and 0 or more, got {self.layers}.")
        if self.width < 1:
            raise ConfigError(f"width must be 1 or more, got {self.width}.")
        if self.depth is not None and self.layers[-1] >= self.depth:
            raise ConfigError(f"layers must be below depth={self.depth}, got {self.layers[-1]}.")


@final
@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Origin of networks."""

    name: str = "functional_networks"
    model: str = ""
    data: str = ""
    seed: int | None = None
    dtype: str = ""
    """Storage dtype of the signals."""
    selector: str = ""
    signals: str = ""
    """Skipped tokens and clipping."""
    findings: tuple[str, ...] = ()


@final
@dataclass(frozen=True, kw_only=True)
class Score:
    """Scores of one component."""

    explained: float
    negentropy: float
    stability: float


@final
@dataclass(frozen=True, kw_only=True)
class Match:
    """A network and its nearest match in another set."""

    component: int
    other: int
    iou: float


@final
@dataclass(frozen=True, kw_only=True)
class FunctionalNetworks:
    """Networks by component."""

    networks: Mapping[int, Channels]
    layout: Layout
    provenance: Provenance = Provenance()  # frozen
    scores: Mapping[int, Score] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known, width = set(self.layout.layers), self.layout.width
        for component, network in self.networks.items():
            if component < 0:
                raise ConfigError(f"components must be numbered from 0, got {component}.")
            for layer, channels in network.items():
                if layer not in known:
                    raise ConfigError(
                        f"Component {component} has layer {layer}, but the layout has layers "
                        f"{listed(self.layout.layers)}."
                    )
                ascending = all(a < b for a, b in pairwise(channels))
                if not channels or not ascending or channels[0] < 0 or channels[-1] >= width:
                    raise ConfigError(
                        f"Channels of component {component}, layer {layer} must be unique, "
                        f"ascending and between 0 and {width - 1}. Leave out layers without "
                        "channels."
                    )
        if strangers := sorted(set(self.scores) - set(self.networks)):
            raise ConfigError(f"scores must be for existing components, got {listed(strangers)}.")

    @property
    def components(self) -> tuple[int, ...]:
        return tuple(sorted(self.networks))

    def size(self, component: int) -> int:
        """Return the number of channels of a network."""
        return sum(map(len, self._network(component).values()))

    def channels(
        self, components: Iterable[int] | None = None, *, layers: Sequence[int] | None = None
    ) -> dict[int, tuple[int, ...]]:
        """Return the union of networks, of all or some components and layers."""
        if isinstance(components, int):
            raise ConfigError(f"components must be a list of numbers, got {components}.")
        chosen = self.components if components is None else tuple(components)
        if not chosen:
            raise ConfigError(f"components is empty. Write some of {listed(self.components)}.")
        union: dict[int, set[int]] = {}
        for component in chosen:
            for layer, channels in self._network(component).items():
                if layers is None or layer in layers:
                    union.setdefault(layer, set()).update(channels)
        return {layer: tuple(sorted(union[layer])) for layer in sorted(union)}

    def others(self, channels: Channels) -> dict[int, tuple[int, ...]]:
        """Return all other channels of the layout."""
        rest = {
            layer: tuple(sorted(set(range(self.layout.width)) - set(channels.get(layer, ()))))
            for layer in self.layout.layers
        }
        return {layer: stored for layer, stored in rest.items() if stored}

    def iou(self, component: int, other: "FunctionalNetworks", other_component: int) -> float:
        """Return the intersection over union of two networks; 1 for two empty ones."""
        self._check_layout(other)
        mine, theirs = self._flat(component), other._flat(other_component)
        return len(mine & theirs) / len(mine | theirs) if mine | theirs else 1.0

    def match(
        self, other: "FunctionalNetworks", *, threshold: float = 0.2, top: int = 1
    ) -> list[Match]:
        """Return the best matches of each network in another set, above a threshold."""
        result = []
        for mine in self.components:
            near = [
                Match(component=mine, other=each, iou=self.iou(mine, other, each))
                for each in other.components
            ]
            near = [each for each in near if each.iou > threshold]
            result += sorted(near, key=lambda each: (-each.iou, each.other))[:top]
        return result

    def require_fit(self, *, depth: int, width: int) -> None:
        """Raise if the networks do not fit a model of this shape."""
        layout, made_for = self.layout, self.provenance.model or "another model"
        problems = []
        if width != layout.width:
            problems.append(f"have {layout.width} channels per layer, but this model has {width}")
        if layout.depth is not None and depth != layout.depth:
            problems.append(f"are for {layout.depth} layers, but this model has {depth}")
        if layout.layers[-1] >= depth:
            problems.append(f"have layer {layout.layers[-1]}, but this model has {depth} layers")
        if problems:
            raise ConfigError(
                f"These networks, made for {made_for}, {problems[0]}. Build networks for this "
                "model."
            )

    def _network(self, component: int) -> Channels:
        if component not in self.networks:
            raise ConfigError(
                f"component must be one of {listed(self.components)}, got {component}."
            )
        return self.networks[component]

    def _flat(self, component: int) -> set[tuple[int, int]]:
        network = self._network(component)
        return {(layer, channel) for layer in network for channel in network[layer]}

    def _check_layout(self, other: "FunctionalNetworks") -> None:
        mine, theirs = self.layout, other.layout
        if (mine.width, mine.site) != (theirs.width, theirs.site):
            raise ConfigError(
                f"Networks with {mine.width} {mine.site} channels per layer cannot be compared "
                f"with networks with {theirs.width} {theirs.site} channels. Build both for the "
                "same model."
            )


def listed(numbers: Sequence[int]) -> str:
    """Return numbers as text, consecutive ones as a range."""
    ordered = sorted(numbers)
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"{ordered[0]} to {ordered[-1]}"
    return ", ".join(map(str, ordered)) or "none"


def parse_layers(spec: str | None, depth: int) -> tuple[int, ...]:
    """Return the layers of a text such as 0,3,7 or 0:4,9: (ranges exclude their end)."""
    if spec is None:
        return tuple(range(depth))
    if not spec.strip():
        raise ConfigError(f"The layer spec is empty. {_advice(depth)}")
    chosen: set[int] = set()
    for part in spec.split(","):
        chosen.update(_range(part.strip(), spec, depth))
    return tuple(sorted(chosen))


def _range(part: str, spec: str, depth: int) -> range:
    match = _PART.fullmatch(part)
    if match is None:
        what = "a negative number" if part.startswith("-") else f"{part!r}" if part else "nothing"
        raise ConfigError(
            f"layers must be numbers or ranges separated by commas, got {what} in {spec!r}. "
            f"{_advice(depth)}"
        )
    if match["one"]:
        layers = range(int(part), int(part) + 1)
    else:
        layers = range(int(match["start"] or 0), int(match["stop"] or depth))
        if layers.start >= layers.stop:
            raise ConfigError(
                f"layers {spec!r} has an empty range: {part} goes from {layers.start} to before "
                f"{layers.stop}. {_advice(depth)}"
            )
    if layers.stop > depth:
        raise ConfigError(
            f"layers {spec!r} has layer {layers.stop - 1}, but the model has {depth} layers. "
            f"{_advice(depth)}"
        )
    return layers


def _advice(depth: int) -> str:
    return f"Write numbers from 0 to {depth - 1} and ranges, such as 0,2 or 0:{depth}."


def check_whole(name: str, value: object, *, least: int) -> None:
    """Raise unless a value is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ConfigError(f"{name} must be a whole number of {least} or more, got {value!r}.")


def check_number(name: str, value: object, what: str) -> float:
    """Return a real number as float, or raise."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} must be {what}, got {value!r}.")
    return float(value)


def check_type(name: str, value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Raise unless a value has the type."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be {what}, got {_shown(value)}.")


def check_site(site: object) -> None:
    """Raise unless a site exists."""
    if site not in get_args(Site):
        raise ConfigError(f"site must be {' or '.join(get_args(Site))}, got {site!r}.")


def check_channels(channels: object) -> None:
    """Raise unless channels are integers by layer."""
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
