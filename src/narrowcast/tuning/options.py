"""What a group of layers can choose from, and the time and memory of each option here."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from narrowcast.hardware import Hardware
from narrowcast.hardware.catalog import find_data_sheet
from narrowcast.precision.fp8.measure import policy_layer_seconds
from narrowcast.precision.plan.gains import Execution
from narrowcast.precision.plan.policy import FP8_FORMATS, PRESETS, PRODUCTS, Policy
from narrowcast.tuning.groups import LayerGroup, LinearLayer

SCALINGS = ("delayed", "tensor", "row", "block")
"""Kinds of fp8 scaling, those with the least work first."""
WIDE = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Option:
    """Formats that a group of layers can have."""

    name: str
    """One word in tables: `bf16`, `fp8-tensor`, or `fp8-tensor/forward` for that product alone."""
    roles: str
    """As an exception of a policy has them."""
    policy: Policy
    """The same, as the policy of a layer."""

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats of the three products, and the scaling."""
        return (*(getattr(self.policy, role) for role in PRODUCTS), self.policy.scaling)

    @property
    def narrow_products(self) -> tuple[str, ...]:
        """The products that are in 8 bits."""
        return tuple(role for role in PRODUCTS if getattr(self.policy, role) in FP8_FORMATS)


def wide_option(name: str) -> Option:
    """Return an option with all products in one format of 16 or 32 bits."""
    return Option(name=name, roles=name, policy=PRESETS[name])


def fp8_options(scaling: str) -> list[Option]:
    """Return the ways in which tensor cores run a layer in fp8: always forward, backward or not.

    The first has the forward product alone in 8 bits, the last all three.
    """
    preset, options = PRESETS[f"fp8-{scaling}"], []
    for narrow in ((), ("grad_input",), ("grad_weight",), ("grad_input", "grad_weight")):
        formats = {role: getattr(preset, role) if role in narrow else "bf16" for role in PRODUCTS}
        formats["forward"] = preset.forward
        whole = len(narrow) == 2
        name = f"fp8-{scaling}" + ("" if whole else f"/{'+'.join(('forward', *narrow))}")
        roles = ", ".join([*(f"{role}={one}" for role, one in formats.items())])
        policy = Policy(
            **formats, scaling=preset.scaling, accumulator=preset.accumulator  # type: ignore[arg-type]
        )  # fmt: skip
        options.append(Option(name=name, roles=f"{roles}, scaling={scaling}", policy=policy))
    return options


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds of a linear layer on the hardware that is tuned for, by option."""

    hardware: Hardware
    rows: int
    """Rows that a layer multiplies at once."""
    execution: Execution
    measured: dict[tuple[tuple[str, ...], int, int], float] = field(default_factory=dict)
    """Seconds by formats and shape, measured on this machine while tuning."""

    @property
    def is_here(self) -> bool:
        """Whether layers can be timed on this machine."""
        device = torch.device(self.hardware.device)
        return (
            device.type == "cuda"
            and torch.cuda.is_available()
            and torch.cuda.get_device_name(device) == self.hardware.name
        )

    @property
    def source(self) -> str:
        """Where the times come from; empty if there are none."""
        speeds = self.hardware.speeds
        if self.is_here:
            return f"measured on this {self.hardware.name}"
        if speeds is not None:
            return f"measured on an {speeds.gpu} ({speeds.date}), interpolated by shape"
        if find_data_sheet(self.hardware) is not None:
            return f"peak rates of the data sheet of {self.hardware.name}"
        return ""

    def scalings(self) -> tuple[str, ...]:
        """Return the kinds of fp8 scaling whose time is known and that the hardware multiplies."""
        speeds = self.hardware.speeds
        if self.hardware.support("e4m3").how != "native":
            return ()
        if speeds is None:
            return SCALINGS[:-1] if self.is_here else ()
        return tuple(one for one in SCALINGS if one in speeds.seconds)

    def seconds(self, layer: LinearLayer, option: Option) -> float | None:
        """Return the time of both passes of a layer; None where nobody knows."""
        if self.is_here:
            return self._measured_seconds(layer, option)
        narrow = option.narrow_products
        if not narrow:
            return self._wide_seconds(layer, option.policy.forward)
        wide = self._wide_seconds(layer, "bf16")
        whole = self._table(layer, option.policy.scaling)
        if wide is None or whole is None:
            return None
        if self._waits_for_host(layer, option):
            return wide
        return wide + (whole - wide) * len(narrow) / len(PRODUCTS)

    def _measured_seconds(self, layer: LinearLayer, option: Option) -> float:
        key = option.formats, layer.inputs, layer.outputs
        if key not in self.measured:
            self.measured[key] = policy_layer_seconds(
                option.policy,
                self.rows,
                layer.inputs,
                layer.outputs,
                device=torch.device(self.hardware.device),
            )
        if option.narrow_products and self._waits_for_host(layer, option):
            return max(self.measured[key], self._measured_seconds(layer, wide_option("bf16")))
        return self.measured[key]

    def _wide_seconds(self, layer: LinearLayer, name: str) -> float | None:
        """Return the time in a wide format: of the table in 16 bits, else by data-sheet rates."""
        sheet = find_data_sheet(self.hardware)
        sixteen = self._table(layer, "bf16")
        if sixteen is not None and name in ("bf16", "fp16"):
            return sixteen
        if sheet is None or name not in sheet.tflops:
            return None
        if sixteen is not None:
            return sixteen * sheet.tflops["bf16"] / sheet.tflops[name]
        return 6 * self.rows * layer.inputs * layer.outputs / (sheet.tflops[name] * 1e12)

    def _table(self, layer: LinearLayer, kind: str) -> float | None:
        speeds = self.hardware.speeds
        if speeds is None:
            return None
        return speeds.layer_seconds(
            kind, tokens=self.rows, inputs=layer.inputs, outputs=layer.outputs
        )

    def _waits_for_host(self, layer: LinearLayer, option: Option) -> bool:
        speeds = self.hardware.speeds
        return speeds is not None and bool(
            speeds.waited_for(
                option.policy.scaling,
                tokens=self.rows,
                inputs=layer.inputs,
                outputs=layer.outputs,
                execution=self.execution,
            )
        )


def option_bytes(group: LayerGroup, option: Option, *, rows: int, params: str) -> int:
    """Return what an option keeps for the backward pass: inputs, and copies of the weights."""
    narrow = option.narrow_products
    item = 4 if option.policy.forward in ("fp32", "tf32") else 2
    saved = 1 if "grad_weight" in narrow else item
    inputs = sum(rows * unit[0].inputs * saved for unit in group.units)
    weights = sum(layer.inputs * layer.outputs for layer in group.layers)
    if narrow:
        return inputs + weights * (1 + ("grad_input" in narrow))
    return inputs + (weights * 2 if item == 2 and params == "fp32" else 0)


def group_seconds(group: LayerGroup, option: Option, rates: Rates) -> float | None:
    """Return the time of all layers of a group; None where that of one is unknown."""
    total = 0.0
    for layer in group.layers:
        seconds = rates.seconds(layer, option)
        if seconds is None:
            return None
        total += seconds
    return total


def faster_options(
    group: LayerGroup, options: Sequence[Option], rates: Rates, *, wide: Option
) -> list[Option]:
    """Return the options of a group that take less time than a wide one."""
    limit = group_seconds(group, wide, rates)
    seconds = [group_seconds(group, option, rates) for option in options]
    return [
        option
        for option, took in zip(options, seconds, strict=True)
        if limit is not None and took is not None and took < limit
    ]
