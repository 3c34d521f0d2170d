"""What a bench is: its peers, what it compares by default on which device, what it takes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from narrowcast.bench.contenders import Contender, chosen, ours, policies_from, unlike
from narrowcast.bench.coordinator import Result
from narrowcast.bench.measure.results import timed_figures
from narrowcast.config.sections import Recipe

ByDevice: TypeAlias = Callable[[str], str]
"""From the type of a device to what is taken there by default."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One verb under `bench`."""

    peers: Mapping[str, Contender]
    default_peers: ByDevice
    default_policies: ByDevice
    bytes_of: Callable[[Recipe, Mapping[str, Any]], int]
    """Estimates what one contender takes of the device in its turn."""
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    """Forms in which each policy takes part: what is added to its name, and its options."""
    assemble: Callable[[Sequence[Result], Contender], dict[str, Any]] = timed_figures
    """Makes plain data of what workers told, given the baseline."""
    policies_first: bool = False
    """The reference is a policy, not a peer."""

    def contenders(
        self, *, peers: str | None, policies: str | None, device_type: str
    ) -> tuple[Contender, ...]:
        """Return who takes part; what is not named is the default of the device."""
        named = chosen(self.default_peers(device_type) if peers is None else peers, self.peers)
        texts = self.default_policies(device_type) if policies is None else policies
        mine = [
            replace(c, name=c.name + suffix, options={**c.options, **options})
            for c in ours(policies_from(texts))
            for suffix, options in self.variants.items()
        ]
        return unlike((*mine, *named) if self.policies_first else (*named, *mine))


def by_device(*, cuda: str, elsewhere: str) -> ByDevice:
    """Return one text for GPUs and another for everything else."""
    return lambda device_type: cuda if device_type == "cuda" else elsewhere
