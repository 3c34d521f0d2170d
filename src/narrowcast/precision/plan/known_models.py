"""Models of transformers that compute their loss without logits, or attend without a mask.

A model's own forward is called once with stand-ins for everything inside it. For the loss, it must
hand the very tensor that its head returns to the loss that transformers has for causal language
models, and to nothing else: logits that are capped, scaled or padded are another tensor. This takes
a millisecond, whatever the size of the model.

A model whose caller passes no mask and no positions attends without a mask: by torch's `is_causal`,
in a kernel that never sees the scores. Under a compiler or inside a CUDA graph transformers cannot
look at values, and makes a mask for each query and key instead, which that kernel does not take.
Positions that a model counts itself need no look.
"""

import inspect
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.precision.plan.known_modules import (
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

    inside: dict[str, Any] = dict.fromkeys(module._modules, _BaseModel())
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
            and hidden.shape == (2, 3, _BaseModel.WIDTH)
        )
    # Anything may go wrong in somebody else's forward that was not made for stand-ins.
    except NOT_RUN as error:
        return f"{plain.__name__} could not be traced to its loss ({in_a_line(error)})"
    return "" if unchanged else f"{plain.__name__} uses its logits for more than the loss"


def _takes_more(plain: type[nn.Module]) -> bool:
    parameters = inspect.signature(plain.forward).parameters.values()
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


class _BaseModel:
    """Stands in for all that a language model has inside, but for its head."""

    WIDTH = 4

    def __call__(self, *_: Any, **__: Any) -> "_BaseOutputs":
        return _BaseOutputs(torch.zeros((2, 3, self.WIDTH), device="cpu"))


class _BaseOutputs:
    """What a base model returns: hidden states, and nothing of whatever else there may be."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]


MASKING = "transformers.masking_utils"
PACKED = "find_packed_sequence_indices"
"""What transformers calls the function that looks for several sequences in a row of positions."""
_BEGUN = "_preprocess_mask_arguments"
"""And the one that every mask begins with."""
_CAUSAL = frozenset({"create_causal_mask", "create_sliding_window_causal_mask"})
_BOTH_WAYS = frozenset({"create_bidirectional_mask", "create_bidirectional_sliding_window_mask"})


def makes_masks(module: nn.Module) -> bool:
    """Say whether a model of transformers makes the masks of its attention, by its own code."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or MASKING not in sys.modules:
        return False  # nobody can have made one
    return isinstance(module, library.PreTrainedModel) and bool(
        _called_by(module) & (_CAUSAL | _BOTH_WAYS)
    )


def why_masked(module: nn.Module) -> str:
    """Say why a model is left to make its masks; nothing where it needs none of its own."""
    plain: Any = plain_class(module)
    if why := reason_not_probed(module):
        return why
    if not hasattr(sys.modules[MASKING], PACKED):
        return "this version of transformers builds masks in a different way"
    if plain.main_input_name != "input_ids" and not _called_by(module) & _CAUSAL:
        return ""  # pictures: without an order of positions there is nothing to look for in them
    return _why_not_counted(module)


def _called_by(module: nn.Module) -> set[str]:
    """Return the names that the methods of a model's class use."""
    kinds = [each for each in plain_class(module).__mro__ if "transformers.models" in str(each)]
    methods = (inspect.unwrap(each) for kind in kinds for each in vars(kind).values()
               if isinstance(each, FunctionType))  # fmt: skip
    return {name for each in methods for name in each.__code__.co_names}


def _why_not_counted(module: nn.Module) -> str:
    """Say why a model's positions may be others than 0, 1, 2 …, or it has a mask without one given.

    Nothing where neither is so. Its own forward is called with stand-ins for everything inside it,
    and what it would look for several sequences in is looked at.
    """
    plain: Any = plain_class(module)
    library: Any = sys.modules[MASKING]
    theirs, seen, masks = getattr(library, PACKED), list[Tensor](), list[Any]()
    begun, mine = getattr(library, _BEGUN, None), threading.get_ident()

    def note(position_ids: Tensor) -> Any:
        if threading.get_ident() != mine:  # of somebody else, meanwhile
            return theirs(position_ids)
        seen.append(position_ids)
        return None

    def begin(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == mine:
            masks.append(kwargs.get("attention_mask", args[2] if len(args) > 2 else None))
        assert begun is not None
        return begun(*args, **kwargs)

    own = {"_parameters": dict(module._parameters), "_buffers": dict(module._buffers)}
    inside = dict.fromkeys(module._modules, _EmptyLayers())
    twin = make_twin(module, _modules=inside, training=False, **own)
    tokens = torch.zeros((2, 3), dtype=torch.int64, device="cpu")
    setattr(library, PACKED, note)
    if begun is not None:
        setattr(library, _BEGUN, begin)
    try:
        with torch.no_grad():
            plain.forward(twin, input_ids=tokens, use_cache=False)
    # Anything may go wrong in somebody else's forward that was not made for stand-ins.
    except NOT_RUN as error:
        return f"{plain.__name__} could not be traced to its masks ({in_a_line(error)})"
    finally:
        setattr(library, PACKED, theirs)
        if begun is not None:
            setattr(library, _BEGUN, begun)
    if any(each is not None for each in masks):
        return f"{plain.__name__} builds its own mask if none is passed"
    counted = torch.arange(3, device="cpu")
    if all(bool((each == counted).all()) for each in seen):
        return ""
    return f"{plain.__name__} uses its own positions"


class _EmptyLayers:
    """Stands in for all that a language model has inside: layers that do nothing, and no blocks."""

    def __call__(self, *_: Any, **__: Any) -> "_HiddenStates":
        return torch.zeros((2, 3, 4), device="cpu").as_subclass(_HiddenStates)

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: slice) -> tuple[()]:
        return ()


class _HiddenStates(Tensor):
    """Hidden states, also where they are an attribute of what an encoder returns."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self if name == "last_hidden_state" else None
