"""Language models of transformers whose loss can be taken from hidden states, without logits.

Which they are is not read off a list of classes. A model's own forward is called once with
stand-ins for everything inside it, and has to hand the very tensor that comes out of its head to
the loss that transformers has for causal language models, and to nothing else: logits that are
capped, scaled or padded in between are another tensor. It takes a millisecond, whatever the size of
the model.
"""

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.precision.plan.pieces.probing import (
    NOT_RUN,
    in_a_line,
    make_twin,
    reason_not_probed,
)
from narrowcast.precision.swap import has_own_forward, plain_class


@dataclass(frozen=True, kw_only=True)
class CausalModel:
    """A model with labels and a head, and why its loss cannot be taken without logits, if so."""

    name: str
    head: str
    """The name of its output layer inside it."""
    why_not: str


def causal_models(model: nn.Module) -> Iterator[CausalModel]:
    """Yield the language models of transformers in a model: itself, or inside an adapter's."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return  # nobody can have made one
    for name, module in model.named_modules():
        if isinstance(module, library.PreTrainedModel) and _takes_labels(module):
            head = _head_name(module)
            if head is not None:
                yield CausalModel(name=name, head=head, why_not=_why_not(module, head))


def standard_loss() -> Any:
    """Return the loss that transformers has for causal language models."""
    return sys.modules["transformers.loss.loss_utils"].ForCausalLMLoss


def _takes_labels(module: nn.Module) -> bool:
    forwards = [
        vars(each)["forward"] for each in plain_class(module).__mro__ if "forward" in vars(each)
    ]
    return any("labels" in inspect.signature(each).parameters for each in forwards)


def _head_name(module: Any) -> str | None:
    """Return the name of a model's output layer, inside it; None where it has none."""
    try:
        head = module.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    matched = (name for name, each in module.named_modules() if each is head and head is not None)
    return next(matched, None)


def _why_not(module: nn.Module, head_name: str) -> str:
    plain: Any = plain_class(module)
    head = module.get_submodule(head_name)
    if why := reason_not_probed(module):
        return why
    if "." in head_name:
        return f"{plain.__name__} has its head inside {head_name.rpartition('.')[0]}"
    if plain_class(head) is not nn.Linear or has_own_forward(head):
        kind = plain_class(head)
        return f"{head_name} is not a plain linear layer but a {kind.__module__}.{kind.__name__}"
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return f"{plain.__name__} is an encoder-decoder, not a causal model"
    if plain.loss_function.fget(module) is not standard_loss():
        return f"{plain.__name__} computes its own loss"
    return _followed(module, head_name)


def _followed(module: nn.Module, head_name: str) -> str:
    """Say what keeps a model's own forward from being followed to its loss; nothing if nothing."""
    plain: Any = plain_class(module)
    seen: dict[str, Any] = {}
    marks = {name: torch.zeros((), device="cpu") for name in ("loss", "num_items_in_batch")}

    def head(hidden: Tensor) -> Tensor:
        seen["hidden"] = hidden
        return hidden

    def loss(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        seen.update(kwargs, logits=logits, labels=labels)
        return marks["loss"]

    inside: dict[str, Any] = dict.fromkeys(module._modules, _Inside())
    inside[head_name] = head
    twin = make_twin(module, _modules=inside, _loss_function=loss, training=True)
    tokens = torch.zeros((2, 3), dtype=torch.int64, device="cpu")
    labels = torch.zeros_like(tokens)
    info = {"num_items_in_batch": marks["num_items_in_batch"]} if _takes_more(plain) else {}
    try:
        with torch.no_grad():
            result = plain.forward(twin, input_ids=tokens, labels=labels, **info)
        hidden = seen["hidden"]
        unchanged = (
            seen["logits"] is hidden
            and result.logits is hidden
            and result.loss is marks["loss"]
            and seen["labels"] is labels
            and all(seen.get(name) is value for name, value in info.items())
            and hidden.shape == (2, 3, _Inside.WIDTH)
        )
    # Anything may go wrong in somebody else's forward that was not made for stand-ins.
    except NOT_RUN as error:
        return f"{plain.__name__} could not be traced to its loss ({in_a_line(error)})"
    return "" if unchanged else f"{plain.__name__} uses its logits for more than the loss"


def _takes_more(plain: type[nn.Module]) -> bool:
    parameters = inspect.signature(plain.forward).parameters.values()
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


class _Inside:
    """Stands in for all that a language model has inside, but for its head."""

    WIDTH = 4

    def __call__(self, *_: Any, **__: Any) -> "_Outputs":
        return _Outputs(torch.zeros((2, 3, self.WIDTH), device="cpu"))


class _Outputs:
    """What a base model returns: hidden states, and nothing of whatever else there may be."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]
