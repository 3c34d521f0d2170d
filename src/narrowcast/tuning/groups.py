"""Groups of linear layers that get one choice: layers of blocks of one kind that share an input."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from narrowcast.hardware import Hardware
from narrowcast.precision.modules.siblings import siblings_in
from narrowcast.precision.plan.plan import make_plan
from narrowcast.precision.swap import plain_class

_INDEX = re.compile(r"(^|\.)\d+(?=\.|$)")


@dataclass(frozen=True, kw_only=True)
class LinearLayer:
    """A linear layer, and the shape of its weight."""

    name: str
    inputs: int
    outputs: int


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers that get one choice: units of one kind, each of which reads one tensor."""

    label: str
    units: tuple[tuple[LinearLayer, ...], ...]
    """Layers that share an input, one tuple per block."""
    sensitive: bool = False
    """Whether it was taken out of its kind because it loses much more than the others."""

    @property
    def layers(self) -> tuple[LinearLayer, ...]:
        """Every layer of the group."""
        return tuple(layer for unit in self.units for layer in unit)

    @property
    def names(self) -> frozenset[str]:
        """The names of the layers."""
        return frozenset(layer.name for layer in self.layers)

    def without(self, units: Iterable[tuple[LinearLayer, ...]]) -> "LayerGroup":
        """Return the group without some of its units."""
        left_out = set(units)
        rest = tuple(unit for unit in self.units if unit not in left_out)
        return LayerGroup(label=self.label, units=rest, sensitive=self.sensitive)


def linear_layers(model: nn.Module, policy: str, hardware: Hardware) -> list[str]:
    """Return the names of the linear layers that multiply in the forward format of a policy."""
    plan = make_plan(model, policy, hardware=hardware, skip_slow_fp8=False, fuse="none")
    return [
        each.name
        for each in plan.modules
        if each.kind == "linear"
        and each.policy.forward == plan.policy.forward
        and isinstance(model.get_submodule(each.name), nn.Linear)
        and plain_class(model.get_submodule(each.name)).forward is nn.Linear.forward
    ]


def layer_groups(model: nn.Module, names: Sequence[str]) -> list[LayerGroup]:
    """Group linear layers: those that share an input together, and blocks of one kind together."""
    known = set(names)
    names_by_id = {id(module): name for name, module in model.named_modules() if name in known}
    joined: dict[str, tuple[str, ...]] = {}
    for siblings in siblings_in(model):
        together = tuple(names_by_id[id(each)] for each in siblings if id(each) in names_by_id)
        joined |= dict.fromkeys(together, together)
    kinds: dict[tuple[object, ...], list[tuple[LinearLayer, ...]]] = {}
    seen: set[str] = set()
    for name in names:
        if name in seen:
            continue
        unit = tuple(_layer(model, each) for each in joined.get(name, (name,)))
        seen |= {layer.name for layer in unit}
        kind = tuple((template(each.name), each.inputs, each.outputs) for each in unit)
        kinds.setdefault(kind, []).append(unit)
    return [LayerGroup(label=_label(units), units=tuple(units)) for units in kinds.values()]


def split(group: LayerGroup, sensitive: Sequence[tuple[LinearLayer, ...]]) -> list[LayerGroup]:
    """Return a group without its sensitive units, and each of these as a group of its own."""
    alone = [LayerGroup(label=_label([unit]), units=(unit,), sensitive=True) for unit in sensitive]
    rest = group.without(sensitive)
    return [rest, *alone] if rest.units else alone


def template(name: str) -> str:
    """Return a module's name with `*` for every index."""
    return _INDEX.sub(r"\1*", name)


def globs_for(group: LayerGroup, names: Iterable[str], *, later: Iterable[str] = ()) -> list[str]:
    """Return globs that match the layers of a group and of `names` no other.

    `later` names layers that exceptions further down set again, so a glob may match them.
    """
    allowed = group.names | set(later)
    known = list(names)
    globs: list[str] = []
    for glob in dict.fromkeys(template(layer.name) for layer in group.layers):
        matched = {name for name in known if fnmatchcase(name, glob)}
        own = [layer.name for layer in group.layers if template(layer.name) == glob]
        globs += [glob] if len(own) > 1 and matched <= allowed else own
    return globs


def _layer(model: nn.Module, name: str) -> LinearLayer:
    module = model.get_submodule(name)
    assert isinstance(module, nn.Linear)
    return LinearLayer(name=name, inputs=module.in_features, outputs=module.out_features)


def _label(units: Sequence[tuple[LinearLayer, ...]]) -> str:
    """Return one name for a group: that of its only unit, or the template of the first."""
    first = units[0]
    names = [layer.name if len(units) == 1 else template(layer.name) for layer in first]
    if len(names) == 1:
        return names[0]
    prefix, _, _ = names[0].rpartition(".")
    last = ",".join(name.rpartition(".")[2] for name in names)
    return f"{prefix}.{{{last}}}" if prefix else f"{{{last}}}"
