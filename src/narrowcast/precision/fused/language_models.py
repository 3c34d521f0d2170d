"""The loss of a causal language model of transformers, taken from its hidden states.

The model's own forward runs unchanged. Only its head returns its input, and the loss function takes
hidden states instead of logits. While a model attends without a mask, three functions with which
transformers makes masks return other values for it, and for no other model.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.precision.fused.linear_cross_entropy import linear_cross_entropy
from narrowcast.precision.plan.fusing import MASKING, PACKED, replacing, standard_loss
from narrowcast.precision.swap import Mixin, has_own_forward, is_watched, plain_class, swap

_here = threading.local()
"""The model in this thread whose head passes its input through."""


def fuse_loss(module: nn.Module, head: str, *, chunk_rows: int | None) -> None:
    """Make a causal language model compute its training loss without logits."""
    plain: Any = plain_class(module)
    names = list(inspect.signature(plain.forward).parameters)
    swap(
        module,
        _mixin_for(head),
        nc_name=f"{id(module):x}",
        nc_head=head,
        nc_labels_at=names.index("labels") - 1,
        nc_own_loss=plain.loss_function.fget,
        nc_loss=standard_loss(),
        nc_loss_type=vars(module).get("loss_type"),
        nc_cap=_logit_softcap(module),
        nc_chunk_rows=chunk_rows,
    )


class CausalLoss(Mixin):
    """A causal language model that returns its loss without logits while it trains."""

    nc_name: str
    nc_head: str
    nc_labels_at: int
    """Where the labels are among positional arguments."""
    nc_own_loss: Any
    """What the plain class has for `loss_function`: a compiler cannot trace one of `super()`."""
    nc_loss: Any
    """The loss function in whose place one stands that takes hidden states; another is let be."""
    nc_loss_type: Any
    """What transformers called that loss here; asked for another, it is let be as well."""
    nc_cap: Any
    """What its config capped logits at."""
    nc_chunk_rows: int | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; with labels, in training, its logits are never made."""
        if not self._nc_takes_loss(args, kwargs):
            return super().forward(*args, **kwargs)
        around = getattr(_here, "name", None), getattr(_here, "hidden", None)
        _here.name = self.nc_name
        try:
            result = super().forward(*args, **kwargs)
        finally:
            _here.name, _here.hidden = around
        return _without_logits(result)

    @property
    def loss_function(self) -> Any:
        """The model's own; while its head hands on hidden states, one that takes these."""
        if getattr(_here, "name", None) != self.nc_name:
            return self.nc_own_loss(self)
        return self._nc_loss

    @loss_function.setter
    def loss_function(self, value: Any) -> None:
        self._loss_function = value

    def _nc_takes_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        at = self.nc_labels_at
        labels = args[at] if len(args) > at else kwargs.get("labels")
        # Not by asking for it: transformers may have a warning to give, which no compiler traces.
        own = self.__dict__.get("_loss_function", self.nc_loss)
        if labels is None or not self.training or own is not self.nc_loss:
            return False
        if (
            self.__dict__.get("loss_type") != self.nc_loss_type
            or _logit_softcap(self) != self.nc_cap
        ):
            return False
        head = self._modules[self.nc_head]
        assert head is not None
        return plain_class(head) is nn.Linear and not (is_watched(head) or has_own_forward(head))

    def _nc_loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Return what transformers' own loss is of the logits of these hidden states."""
        hidden, head = logits, self._modules[self.nc_head]
        assert isinstance(head, nn.Linear)
        if not torch.compiler.is_compiling() and _is_another(hidden, _here.hidden):
            raise ConfigError(
                f"{plain_class(self).__name__} changes its logits in a way it did not when "
                "prepared, but the fused loss never computes logits. Make that change before "
                "prepare(), or leave `loss` out of fuse."
            )
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        _here.name = None  # the loss may call the head
        loss = linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            head,
            shift_labels.reshape(-1).to(hidden.device),
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            chunk_rows=self.nc_chunk_rows,
        )
        if num_items_in_batch is None:
            return loss
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch


@functools.cache
def _mixin_for(head: str) -> type[Mixin]:
    """Return the class for models with a head of this name, which it hides while it is passed."""

    def lookup(self: CausalLoss) -> Any:
        passed = getattr(_here, "name", None) == self.nc_name
        return _as_it_is if passed else self._modules[head]

    return type("CausalLoss", (CausalLoss,), {head: property(lookup)})


def _as_it_is(hidden: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        _here.hidden = hidden
    return hidden


def _is_another(hidden: Tensor, handed_on: Tensor) -> bool:
    """Return whether more than a cast was done to what a head handed on."""
    return hidden is not handed_on and hidden.dtype == handed_on.dtype


def _logit_softcap(module: nn.Module) -> Any:
    """Return what logits are capped at, of models that may cap them."""
    return getattr(module.__dict__.get("config"), "final_logit_softcapping", None)


def _without_logits(result: Any) -> Any:
    """Return a model's result without what its head handed on."""
    if isinstance(result, tuple):
        return (result[0], None, *result[2:])  # the loss comes first, then the logits
    return type(result)(**{name: each for name, each in result.items() if name != "logits"})


_mask_state = threading.local()
"""Whether the model that is being passed in this thread needs no mask of its own."""
_TRACED = ("is_tracing", "is_torchdynamo_exporting")
_CONTENT = frozenset({
    "input_ids", "inputs_embeds", "pixel_values", "labels", "num_items_in_batch",
})  # fmt: skip
"""Inputs of a model that do not affect the attention mask."""
_WORDS = (bool, int, float, str)


def attend_without_mask(module: nn.Module) -> None:
    """Make a model skip its attention mask in training if the caller passes none."""
    library: Any = sys.modules[MASKING]
    _answer(library, PACKED, None, whatever=True)
    for name in _TRACED:
        if hasattr(library, name):
            _answer(library, name, False, whatever=False)
    names = tuple(inspect.signature(plain_class(module).forward).parameters)[1:]
    swap(module, Unmasked, nc_arguments=names, nc_may=True)


def attend_as_ever(module: nn.Module) -> None:
    """Keep the masks of an unknown model, also inside a known one."""
    swap(module, Unmasked, nc_arguments=(), nc_may=False)


class Unmasked(Mixin):
    """A model that makes no mask where nothing but content is given."""

    nc_arguments: tuple[str, ...]
    """What positional arguments are called."""
    nc_may: bool
    """Whether it is known to need none; one that is not may be inside another."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model without fusion."""
        around = getattr(_mask_state, "needs_none", False)
        _mask_state.needs_none = self.nc_may and self.training and self._nc_is_content(args, kwargs)
        try:
            return super().forward(*args, **kwargs)
        finally:
            _mask_state.needs_none = around

    def _nc_is_content(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether no mask, positions or cache are passed, nor anything that may be one."""
        inputs = (*zip(self.nc_arguments, args, strict=False), *kwargs.items())
        return all(
            value is None or name in _CONTENT or isinstance(value, _WORDS) for name, value in inputs
        )


def _answer(library: Any, question: str, answer: Any, *, whatever: bool) -> None:
    """Replace the result of a transformers function for models that need no mask.

    Unless `whatever`, only if all arguments are None: a model's own mask would have to be read.
    """
    with replacing:
        theirs: Callable[..., Any] = getattr(library, question)
        if hasattr(theirs, "nc_theirs"):
            return

        @functools.wraps(theirs)
        def answered(*args: Any, **kwargs: Any) -> Any:
            nothing = all(each is None for each in (*args, *kwargs.values()))
            if getattr(_mask_state, "needs_none", False) and (whatever or nothing):
                return answer
            return theirs(*args, **kwargs)

        answered.nc_theirs = theirs  # type: ignore[attr-defined]
        setattr(library, question, answered)
