"""Models of transformers that make a mask for their attention, and where none is needed.

Passed as it is, a model whose caller gives no mask and no positions attends without one: by torch's
`is_causal`, in a kernel that never sees the scores. Under a compiler or inside a CUDA graph
transformers will not look at the values it would have to look at, and makes a mask for each query
and key instead, which that kernel does not take. Positions that a model counts itself need no look.
"""

import inspect
import sys
import threading
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.precision.plan.pieces.probing import (
    NOT_RUN,
    in_a_line,
    make_twin,
    reason_not_probed,
)
from narrowcast.precision.swap import plain_class

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
    inside = dict.fromkeys(module._modules, _Inside())
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


class _Inside:
    """Stands in for all that a language model has inside: layers that do nothing, and no blocks."""

    def __call__(self, *_: Any, **__: Any) -> "_Outputs":
        return torch.zeros((2, 3, 4), device="cpu").as_subclass(_Outputs)

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: slice) -> tuple[()]:
        return ()


class _Outputs(Tensor):
    """Hidden states, also where they are an attribute of what an encoder returns."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self if name == "last_hidden_state" else None
