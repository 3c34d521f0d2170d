"""Weights that lie in one another's memory: tied by a view, and not by being one parameter."""

from collections.abc import Iterator, Mapping, Set

import torch
from torch import Tensor, nn

from narrowcast.errors import UnsupportedError
from narrowcast.kernels.launch import PLAIN
from narrowcast.kernels.tables import is_dense
from narrowcast.precision.plan.plan import Plan


def check_shared_memory(model: nn.Module, trained: Set[nn.Parameter], plan: Plan) -> None:
    """Refuse 16-bit weights that would have memory of their own, where they shared one with others.

    With weights that are trained or frozen, or with buffers. In fp32 nothing is moved, and they
    stay what they are to torch.
    """
    narrow = {m.name: m.policy.params for m in plan.modules if m.policy.params != "fp32"}
    if not narrow:
        return
    held: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    lowered = {
        n: narrow[_owner(n)] for n, t in held.items() if t in trained and _owner(n) in narrow
    }
    for one, other in _overlapping(held):
        stored = lowered.get(one) or lowered.get(other)
        if stored is not None:
            stay = " and ".join(f"`{_owner(name) or '*'}: params=fp32`" for name in (one, other))
            raise UnsupportedError(
                f"{other} shares memory with {one}, but params={stored} stores them separately, "
                "which would untie them. Use one Parameter in both modules, multiply by a view of "
                f"it in forward(), or write {stay} in the policy."
            )


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _overlapping(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the names of tensors that share an element, in the order of the model."""
    places = {name: i for i, name in enumerate(tensors)}
    begun = sorted(
        (str(t.device), t.data_ptr(), name)
        for name, t in tensors.items()
        if type(t) in (*PLAIN, nn.Buffer) and t.numel() and t.device.type != "meta"
    )
    before: list[tuple[str, int, str]] = []
    for device, begin, name in begun:
        before = [each for each in before if each[0] == device and each[1] > begin]
        for _, _, other in before:
            if _share_an_element(tensors[other], tensors[name]):
                one, two = sorted((other, name), key=places.__getitem__)
                yield one, two
        before.append((device, begin + _extent(tensors[name]), name))


def _extent(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def _share_an_element(first: Tensor, second: Tensor) -> bool:
    """Say so of two whose extents overlap, the first of which begins no later than the second."""
    if is_dense(first) and is_dense(second):
        return True
    # Columns of one matrix, say, lie in between one another.
    begin, size = first.data_ptr(), first.element_size()
    separate = second.data_ptr() - begin
    if size != second.element_size() or separate % size:
        return True  # of other formats, over one another
    length = max(_extent(first), separate + _extent(second)) // size
    touched = torch.zeros(length, dtype=torch.bool)
    touched.as_strided(first.shape, first.stride(), 0).fill_(True)
    return bool(touched.as_strided(second.shape, second.stride(), separate // size).any())
