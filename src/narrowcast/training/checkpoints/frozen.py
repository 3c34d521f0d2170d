"""Frozen weights, of which a checkpoint has only checksums because the task builds them again.

Checksums use integers on the weight's own device, so they are the same on every device. Sharded
weights are gathered one at a time, so all ranks have to compute them together.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from narrowcast.errors import CheckpointError
from narrowcast.precision.dtensor import as_sharded, local_part
from narrowcast.precision.step.prepared import Prepared

CHUNK = 2**18
"""Numbers of 8 bytes per pass, as many as fit in a core's cache."""
_MIX = 0x2545F4914F6CDD1D
"""An odd number with its bits well spread (of the generator xorshift64*)."""


@final
class FrozenWeights:
    """The weights of a model that no optimizer has and that need no gradient."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._made: dict[str, str] | None = None

    def identify(self) -> None:
        """Compute the checksums as the task built the weights, once, before anything changes."""
        if self._made is None:
            self._made = checksums(self._whole())

    def split_frozen(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the state without unchanged frozen weights, and their checksums. Synchronises."""
        assert self._made is not None
        now = checksums(self._whole())
        same = {name: now[name] for name in now if now[name] == self._made.get(name)}
        weights = {name: each for name, each in state["weights"].items() if name not in same}
        return {**state, "weights": weights}, same

    def require_same(self, saved: Mapping[str, str], *, step: int) -> None:
        """Raise if a frozen weight differs from the one that the checkpoint was saved with."""
        assert self._made is not None
        for name, was in saved.items():
            if (here := self._made.get(name, "")) != was:
                before, now = (each.rpartition(" ")[0] for each in (was, here))
                message = f"it was {before} and is now {now or 'trained'}"
                message = message if before != now else "it has other values"
                raise CheckpointError(
                    f"The checkpoint of step {step} does not hold the frozen weight {name}, which "
                    f"the task builds, and {message}. Build the task from the same files and seed "
                    "as when the run started, or start a new run."
                )

    def put_back_into(self, state: dict[str, Any], saved: Mapping[str, str]) -> dict[str, Any]:
        """Return the state with the frozen weights of this model added again."""
        here = self._prepared.model.state_dict()
        weights = {**{name: here[name] for name in saved}, **state["weights"]}
        return {**state, "weights": weights}

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._by_name().items():
            sharded = as_sharded(weight)
            yield name, weight if sharded is None else sharded.full_tensor()

    def _by_name(self) -> dict[str, nn.Parameter]:
        trained = set(self._prepared.engine.weights.all)
        # By the names they are saved under: a wrapper may have others for them.
        stored = self._prepared.model.state_dict(keep_vars=True)
        return {
            name: value
            for name, value in stored.items()
            if isinstance(value, nn.Parameter) and not value.requires_grad and value not in trained
        }


@torch.no_grad()
def checksums(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return dtype, shape and a checksum of every bit of each tensor. Synchronises."""
    results = {name: (_outline(each), _sum(local_part(each).detach())) for name, each in tensors}
    sums = iter(torch.stack([s.cpu() for _, s in results.values()]).tolist() if results else [])
    return {name: f"{outline} {next(sums) % 2**64:016x}" for name, (outline, _) in results.items()}


def _outline(tensor: Tensor) -> str:
    shape = "×".join(map(str, tensor.shape)) or "a number"
    return f"{tensor.dtype} of {shape}".removeprefix("torch.")


def _sum(tensor: Tensor) -> Tensor:
    """Return a weighted sum of a tensor's bits; 135 million bf16 weights take 0.1 s on a core."""
    bits = tensor.contiguous().reshape(-1).view(torch.uint8)
    if bits.numel() % 8 or bits.storage_offset() % 8:
        bits = pad(bits, (0, -bits.numel() % 8))
    numbers = bits.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    places = torch.arange(1, min(CHUNK, len(numbers)) + 1, device=bits.device) * _MIX
    for part in numbers.split(CHUNK):
        # Beyond 64 bits they wrap around, on every device alike.
        total = total * _MIX + (places[: len(part)] * part).sum()
    return total
