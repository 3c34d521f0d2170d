"""Functional networks: for each component, channels of layers; the templates of one model.

A site says which channels are meant: those of a block's MLP output, or the inputs of its down
projection.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias, final

from narrowcast.errors import ConfigError

Site: TypeAlias = Literal["mlp_output", "down_input"]
Channels: TypeAlias = Mapping[int, tuple[int, ...]]
"""Channels by layer, in ascending order."""


@final
@dataclass(frozen=True, kw_only=True)
class Layout:
    """The channels there were to choose from."""

    layers: tuple[int, ...]
    """Those that were looked at, in ascending order."""
    width: int
    """Channels of each."""
    depth: int | None = None
    """Layers of the model; none where it is not known."""
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
    """Where networks come from; empty where that is not known."""

    name: str = "functional_networks"
    model: str = ""
    data: str = ""
    seed: int | None = None
    dtype: str = ""
    """What signals were stored in."""
    selector: str = ""
    signals: str = ""
    """Which rows were left out, and how channels were clipped."""
    findings: tuple[str, ...] = ()


@final
@dataclass(frozen=True, kw_only=True)
class Score:
    """What is known of one component."""

    explained: float
    negentropy: float
    stability: float


@final
@dataclass(frozen=True, kw_only=True)
class Match:
    """A network, the one of another set that is nearest to it, and how much they share."""

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
                        f"{_listed(self.layout.layers)}."
                    )
                ascending = all(a < b for a, b in pairwise(channels))
                if not channels or not ascending or channels[0] < 0 or channels[-1] >= width:
                    raise ConfigError(
                        f"Channels of component {component}, layer {layer} must be unique, "
                        f"ascending and between 0 and {width - 1}. Leave out layers without "
                        "channels."
                    )
        if strangers := sorted(set(self.scores) - set(self.networks)):
            raise ConfigError(f"scores must be for existing components, got {_listed(strangers)}.")

    @property
    def components(self) -> tuple[int, ...]:
        """The numbers of the components, ascending."""
        return tuple(sorted(self.networks))

    def size(self, component: int) -> int:
        """Return how many channels a network has."""
        return sum(map(len, self._network(component).values()))

    def channels(
        self, components: Iterable[int] | None = None, *, layers: Sequence[int] | None = None
    ) -> dict[int, tuple[int, ...]]:
        """Return the union of networks, of all or some, in all or some layers."""
        if isinstance(components, int):
            raise ConfigError(f"components must be a list of numbers, got {components}.")
        chosen = self.components if components is None else tuple(components)
        if not chosen:
            raise ConfigError(f"components is empty. Write some of {_listed(self.components)}.")
        union: dict[int, set[int]] = {}
        for component in chosen:
            for layer, channels in self._network(component).items():
                if layers is None or layer in layers:
                    union.setdefault(layer, set()).update(channels)
        return {layer: tuple(sorted(union[layer])) for layer in sorted(union)}

    def others(self, channels: Channels) -> dict[int, tuple[int, ...]]:
        """Return all channels of the layout but these."""
        rest = {
            layer: tuple(sorted(set(range(self.layout.width)) - set(channels.get(layer, ()))))
            for layer in self.layout.layers
        }
        return {layer: stored for layer, stored in rest.items() if stored}

    def iou(self, component: int, other: "FunctionalNetworks", other_component: int) -> float:
        """Return how much of two networks is common to both, 0 to 1; two empty ones share all."""
        self._check_layout(other)
        mine, theirs = self._flat(component), other._flat(other_component)
        return len(mine & theirs) / len(mine | theirs) if mine | theirs else 1.0

    def match(
        self, other: "FunctionalNetworks", *, threshold: float = 0.2, top: int = 1
    ) -> list[Match]:
        """Return for each network the nearest of another set, above a threshold, best first."""
        result = []
        for mine in self.components:
            near = [
                Match(component=mine, other=each, iou=self.iou(mine, other, each))
                for each in other.components
            ]
            near = [each for each in near if each.iou > threshold]
            result += sorted(near, key=lambda each: (-each.iou, each.other))[:top]
        return result

    def require_fit(self, *, depth: int, width: int, site: Site | None = None) -> None:
        """Refuse a model of another shape than these networks were made for."""
        made_for = "made for " + (self.provenance.model or "another model")
        again = ". Build networks for this model."
        if site is not None and site != self.layout.site:
            raise ConfigError(
                f"These networks have {self.layout.site} channels, but site={site} was requested. "
                f"Build them with site={site}."
            )
        if width != self.layout.width:
            raise ConfigError(
                f"These networks, {made_for}, have {self.layout.width} channels per layer, but "
                f"this model has {width}{again}"
            )
        if self.layout.depth is not None and depth != self.layout.depth:
            raise ConfigError(
                f"These networks, {made_for}, are for {self.layout.depth} layers, but this model "
                f"has {depth}{again}"
            )
        if self.layout.layers[-1] >= depth:
            raise ConfigError(
                f"These networks, {made_for}, have layer {self.layout.layers[-1]}, but this model "
                f"has {depth} layers{again}"
            )

    def _network(self, component: int) -> Channels:
        if component not in self.networks:
            raise ConfigError(
                f"component must be one of {_listed(self.components)}, got {component}."
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


def _listed(numbers: Sequence[int]) -> str:
    """Write numbers, a run of them as a range."""
    ordered = sorted(numbers)
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"{ordered[0]} to {ordered[-1]}"
    return ", ".join(map(str, ordered)) or "none"
