"""Which layers: `0`, `0,3,7`, `0:4,9:`; ranges end before their last number."""

import re

from narrowcast.errors import ConfigError

_PART = re.compile(r"(?P<one>[0-9]+)|(?P<start>[0-9]*):(?P<stop>[0-9]*)", re.ASCII)


def parse_layers(spec: str | None, depth: int) -> tuple[int, ...]:
    """Return the layers that a text names, in ascending order; none means all of `depth`."""
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
