"""Signals of a language model: what its MLPs put out, or what their down projections are given.

The model runs without gradients and without dropout; rows of padding are left out; what was added
to listen is gone after every batch.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from narrowcast.errors import RecipeError
from narrowcast.workloads.sft.ica.blocks import find_blocks
from narrowcast.workloads.sft.ica.networks import Layout, Site


@final
class ModelSignals:
    """The channels of chosen layers, side by side, for each token of some batches."""

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Mapping[str, Tensor]],
        *,
        layers: Sequence[int] | None = None,
        site: Site = "mlp_output",
    ) -> None:
        """Take batches that can be gone through again: a list or a data loader, no generator.

        A batch is what the model is called with; `attention_mask`, if there is one, is 0 at
        padding.
        """
        if iter(batches) is batches:
            raise RecipeError(
                "the batches can be gone through once only; give a list or a data loader"
            )
        blocks = find_blocks(model)
        chosen = tuple(range(blocks.depth)) if layers is None else tuple(layers)
        self.layout = Layout(layers=chosen, width=blocks.width(site), depth=blocks.depth, site=site)
        self._model, self._batches = model, batches
        self._blocks = [blocks.blocks[layer] for layer in chosen]

    @property
    def channels(self) -> int:
        """Channels of all chosen layers."""
        return len(self._blocks) * self.layout.width

    @property
    def dtype(self) -> torch.dtype:
        """That of the model, as far as it has one."""
        return next(p.dtype for p in self._model.parameters() if p.is_floating_point())

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self._batches:
            yield self._rows_of(batch)

    def _rows_of(self, batch: Mapping[str, Tensor]) -> Tensor:
        device = next(self._model.parameters()).device
        given = {name: value.to(device) for name, value in batch.items()}
        heard: dict[int, Tensor] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(evaluating(self._model))
            # A compiled model would not notice that somebody listens.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for place, block in enumerate(self._blocks):
                stack.callback(self._listen(block, place, heard).remove)
            self._model(**given)
        if len(heard) < len(self._blocks):
            raise RecipeError(
                f"{len(self._blocks) - len(heard)} of {len(self._blocks)} layers were not run by "
                "the model; name layers that are"
            )
        return _without_padding([heard[i] for i in range(len(heard))], given)

    def _listen(self, block: Any, place: int, heard: dict[int, Tensor]) -> Any:
        if self.layout.site == "mlp_output":
            return block.mlp.register_forward_hook(
                lambda _module, _args, output: _keep(heard, place, output)
            )
        return block.down.module.register_forward_pre_hook(
            lambda _module, args: _keep(heard, place, args[0])
        )


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout and the like off inside the block, and back to what each module had."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _keep(heard: dict[int, Tensor], place: int, value: Tensor) -> None:
    heard[place] = value.detach()


def _without_padding(layers: Sequence[Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    here = layers[0].device  # a model may be spread over several
    rows = torch.cat([layer.to(here) for layer in layers], dim=-1)
    mask = batch.get("attention_mask")
    if mask is not None and mask.dim() == 2:
        return rows[mask.bool().to(here)]
    return rows.flatten(0, -2)
