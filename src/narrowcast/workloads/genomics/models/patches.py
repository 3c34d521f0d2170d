"""Where a sequence is cut into patches: every few letters, or where the next letter is in doubt.

All of it stays on the device: the number of patches of a row is not known to the host, only the
most there can be. What a row has less is empty.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Patches:
    """How the letters of rows are cut; the lengths of a row's patches sum to its letters."""

    ids: Tensor
    """Which patch each letter is in, (rows, length); `bound` for what only fills a row up."""
    lengths: Tensor
    """Letters of each patch, (rows, bound): 1 or more, then zeros."""

    @property
    def bound(self) -> int:
        """The most patches there can be."""
        return self.lengths.shape[1]

    @property
    def mask(self) -> Tensor:
        """Which patches there are: (rows, bound)."""
        return self.lengths > 0

    def pooled(self, letters: Tensor) -> Tensor:
        """Return the mean of the letters of each patch: (rows, bound, width) of (rows, length, …).

        Nothing, where there is no patch.
        """
        rows, _, width = letters.shape
        sums = letters.new_zeros((rows * (self.bound + 1), width))
        sums = sums.index_add(0, self._slots(), letters.flatten(0, 1))
        means: Tensor = sums.unflatten(0, (rows, -1))[:, :-1]
        return (means / self.lengths.clamp(min=1)[..., None]).to(letters.dtype)

    def spread(self, patches: Tensor, *, shifted: bool) -> Tensor:
        """Give each letter the state of its patch, or with `shifted` of the patch before it.

        Where there is none before, that is nothing.
        """
        nothing = patches.new_zeros((len(patches), 1, patches.shape[2]))
        slots = torch.cat([nothing, patches] if shifted else [patches, nothing], dim=1)
        inputs = slots.flatten(0, 1).index_select(0, self._slots())
        return inputs.reshape(*self.ids.shape, -1)

    def _slots(self) -> Tensor:
        """Number the patches of all rows; each row has one more, for what fills it up."""
        rows = torch.arange(len(self.ids), device=self.ids.device)[:, None]
        return (rows * (self.bound + 1) + self.ids).flatten()


def cut_at(starts: Tensor, mask: Tensor | None, *, bound: int) -> Patches:
    """Cut before each of `starts`, (rows, length), of which a row has at most `bound`."""
    ids = starts.cumsum(1) - 1
    if mask is not None:
        ids = ids.where(mask, bound)
    counted = ids.new_zeros((len(ids), bound + 1)).scatter_add(1, ids, torch.ones_like(ids))
    return Patches(ids, counted[:, :bound])


def every(size: int, tokens: Tensor) -> Tensor:
    """Return starts of patches of `size` letters each: (rows, length)."""
    location = torch.arange(tokens.shape[1], device=tokens.device)
    return (location % size == 0).expand(tokens.shape)


def bounded(wanted: Tensor, *, least: int, most: int) -> Tensor:
    """Return starts of patches of `least` to `most` letters, the last of a row maybe of fewer.

    From one start the next is the first wanted place that is `least` letters on, or the one `most`
    letters on. Every place knows where a patch that began there would end; which of them are
    starts, is found by steps of 1, 2, 4, … patches at once.
    """
    rows, length = wanted.shape
    position = torch.arange(length + 1, device=wanted.device)
    # The first wanted place from each on; the end is one.
    following = torch.where(wanted, position[:-1], length).flip(1).cummin(1).values.flip(1)
    following = torch.nn.functional.pad(following, (0, 1), value=length)
    after_least = following[:, (position + least).clamp(max=length)]
    step = torch.minimum(after_least, (position + most).clamp(max=length))
    starts = (position == 0).expand(rows, -1)
    for _ in range((-(-length // least)).bit_length()):
        reached = torch.zeros_like(step).scatter_add(1, step, starts.long()) > 0
        starts = starts | reached
        step = step.gather(1, step)
    return starts[:, :length]
