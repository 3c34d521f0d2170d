"""Weights that lie in one another's memory: tied by a view, and not by being one parameter."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from narrowcast.errors import UnsupportedError
from narrowcast.kernels.launch import PLAIN
from narrowcast.precision.plan.plan import Plan


def refuse_shared_memory(names: Sequence[str], weights: Sequence[nn.Parameter], plan: Plan) -> None:
    """Refuse 16-bit weights that would have memory of their own, where they shared one with others.

    In fp32 nothing is moved, and they stay what they are to torch.
    """
    narrow = {m.name: m.policy.params for m in plan.modules if m.policy.params != "fp32"}
    if not narrow:
        return
    for one, other in _overlapping(dict(zip(names, weights, strict=True))):
        owners = [name.rpartition(".")[0] for name in (one, other)]
        kept = next((narrow[owner] for owner in owners if owner in narrow), None)
        if kept is not None:
            stay = " and ".join(f"`{owner or '*'}: params=fp32`" for owner in owners)
            raise UnsupportedError(
                f"{other} lies in the memory of {one}, and params={kept} gives each memory of its "
                "own, so that they would be tied no more; let both modules have one Parameter, "
                f"multiply by a view of it in forward(), or write {stay} in the policy"
            )


def _overlapping(weights: Mapping[str, nn.Parameter]) -> list[tuple[str, str]]:
    """Return neighbours in memory that share some of it, each pair in the order of the model."""
    places = {name: i for i, name in enumerate(weights)}
    spans = sorted(
        (w.device.type, w.device.index or 0, w.data_ptr(), w.data_ptr() + _extent(w), name)
        for name, w in weights.items()
        if type(w) in PLAIN and w.numel() and w.device.type != "meta"
    )
    found, last = [], None
    for span in spans:
        if last is not None and last[:2] == span[:2] and span[2] < last[3]:
            one, other = sorted((last[4], span[4]), key=places.__getitem__)
            found.append((one, other))
        if last is None or last[:2] != span[:2] or span[3] > last[3]:
            last = span
    return found


def _extent(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()
