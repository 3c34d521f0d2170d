"""Which pieces of a model are fused, and why or why not: part of the plan.

A whole model is recognised by one call of its own forward with stand-ins for everything inside it.
For the loss, it must pass the very tensor that its head returns to the loss that transformers has
for causal language models: logits that are capped, scaled or padded are another tensor.

A model called without mask and positions attends by torch's `is_causal`. Under a compiler or in a
CUDA graph transformers cannot read values and would make a mask, which that kernel does not take.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.hardware import Hardware
from narrowcast.kernels.launch import unsupported_reason
from narrowcast.precision.plan.folding import folded, groups_alike
from narrowcast.precision.plan.known_modules import (
    NOT_RUN,
    in_a_line,
    looks_like_a_gated_mlp,
    looks_like_a_gelu_written_out,
    looks_like_a_layer_norm,
    looks_like_a_norm,
    looks_like_turning,
    make_twin,
    match_gated_mlp,
    match_rms_norm,
    match_rotary,
    reason_not_gelu,
    reason_not_layer_norm,
    reason_not_probed,
)
from narrowcast.precision.plan.module_plan import ModulePlan
from narrowcast.precision.plan.policy import Policy, suggestion
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
    """Return the path of a model's output layer; None if it has none."""
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
    """Return why a model's forward cannot be followed to its loss, or nothing."""
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
    """Placeholder for the body of a language model, without its head."""

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
replacing = threading.Lock()
"""Held while functions of transformers are replaced, so that each thread restores the original."""
_CAUSAL = frozenset({"create_causal_mask", "create_sliding_window_causal_mask"})
_BOTH_WAYS = frozenset({"create_bidirectional_mask", "create_bidirectional_sliding_window_mask"})


def makes_masks(module: nn.Module) -> bool:
    """Return whether a model of transformers makes the masks of its attention, by its own code."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or MASKING not in sys.modules:
        return False  # nobody can have made one
    return isinstance(module, library.PreTrainedModel) and bool(
        _called_by(module) & (_CAUSAL | _BOTH_WAYS)
    )


def why_masked(module: nn.Module) -> str:
    """Return why a model must build its attention masks; empty if it need not."""
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
    """Return why positions may not be 0, 1, 2 …, or why there is a mask if none was passed.

    Calls the module's own forward with stand-ins for everything inside it.
    """
    plain: Any = plain_class(module)
    library: Any = sys.modules[MASKING]
    with replacing:
        return _traced_positions(module, plain, library)


def _traced_positions(module: nn.Module, plain: Any, library: Any) -> str:
    """Trace with the mask functions of transformers replaced; one thread at a time."""
    theirs, seen, masks = getattr(library, PACKED), list[Tensor](), list[Any]()
    begun, mine = getattr(library, _BEGUN, None), threading.get_ident()

    def note(position_ids: Tensor) -> Any:
        if threading.get_ident() != mine:  # another thread's call
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
    """Placeholder for the body of a language model: layers that do nothing, and no blocks."""

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


Fuse = str | Sequence[str]
"""What is asked for: `auto`, `none`, or names of pieces."""

AUTO, NONE = "auto", "none"
_EMULATED = "products are emulated one by one"
Known = Callable[[nn.Module, Mapping[str, str]], Iterable[tuple[str, str]]]


def _losses(model: nn.Module, left: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for result in causal_models(model):
        head = f"{result.name}.{result.head}".lstrip(".")
        yield result.name, result.why_not or left.get(head, "")


def _modules(looks: Callable[[nn.Module], bool], known: Callable[[nn.Module], Any]) -> Known:
    """Return a search for candidate modules that tests what each computes."""

    def walk_pieces(model: nn.Module, left: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        for name, module in model.named_modules():
            if looks(module):
                answer = known(module)
                why_not = answer if isinstance(answer, str) else ""
                yield name, why_not or left.get(name, "")

    return walk_pieces


PIECES: Mapping[str, Known] = {
    "loss": _losses,
    "gelu": _modules(looks_like_a_gelu_written_out, reason_not_gelu),
    "layer_norm": _modules(looks_like_a_layer_norm, reason_not_layer_norm),
    "mask": _modules(makes_masks, why_masked),
    "rms_norm": _modules(looks_like_a_norm, match_rms_norm),
    "rotary": _modules(looks_like_turning, match_rotary),
    "swiglu": _modules(looks_like_a_gated_mlp, match_gated_mlp),
}
"""What finds the modules of a piece in a model, of which some are left: names, and why not."""

_MADE = {
    "loss": "computed from hidden states; no logits in training",
    "gelu": "one torch operation in place of several",
    "layer_norm": "one pass over memory",
    "mask": "no mask is built in training if none is passed, also when compiled",
    "rms_norm": "one pass over memory",
    "rotary": "queries and keys rotated in one pass",
    "swiglu": "the gate's activation times the value in one pass",
}
_COMPILED = ", except in compiled code"
_OF_WHOLE_MODELS = ("loss", "mask")
"""Pieces that no compiler knows of, and that need no kernel of ours on a CPU."""
_OF_TORCH = (nn.LayerNorm, nn.RMSNorm)
"""Very common modules: the plan does not mention that they are not fused."""


@dataclass(frozen=True, kw_only=True)
class FusedPiece:
    """Modules that are computed as one piece, or left as they are, for the same reason."""

    piece: str
    modules: tuple[str, ...]
    fused: bool
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "piece": self.piece,
            "fused": self.fused,
            "modules": list(self.modules),
            "reason": self.reason,
        }

    def __str__(self) -> str:
        """Write it in a line, with modules that differ only in an index as one."""
        alike = groups_alike(self.modules, name=str, treatment=lambda _: "")
        names = ", ".join(map(folded, alike))
        return f"{self.piece}: {names}: {self.reason}" if names else f"{self.piece}: {self.reason}"


def piece_lines(pieces: Sequence[FusedPiece]) -> list[tuple[str, str]]:
    """Return what a plan says of its pieces in lines; those left for one reason share a line."""
    fused = [("fused", str(each)) for each in pieces if each.fused]
    left: dict[str, list[FusedPiece]] = {}
    for each in pieces:
        if not each.fused:
            left.setdefault(each.reason, []).append(each)
    for reason, alike in left.items():
        names = ", ".join(each.piece for each in alike)
        fused.append(("unfused", str(alike[0]) if len(alike) == 1 else f"{names}: {reason}"))
    return fused


def requested_pieces(fuse: Fuse) -> tuple[str, ...] | None:
    """Return the pieces that are named; None for `auto`, which names none."""
    named = (fuse,) if isinstance(fuse, str) else tuple(fuse)
    if named == (AUTO,):
        return None
    if named == (NONE,):
        return ()
    for each in named:
        if each not in PIECES:
            known = ", ".join(PIECES)
            raise ConfigError(
                f"fuse must be auto, none, or some of {known}, got "
                f"{each!r}{suggestion(each, list(PIECES))}."
            )
    return tuple(dict.fromkeys(named))


def fused_pieces(
    model: nn.Module,
    fuse: Fuse,
    *,
    policy: Policy,
    hardware: Hardware,
    modules: Sequence[ModulePlan],
    emulated: bool,
) -> tuple[FusedPiece, ...]:
    """Decide what is computed as one; what is named and cannot be is refused."""
    named = requested_pieces(fuse)
    left = {each.name: why for each in modules if (why := _why_left(each))}
    matches: list[FusedPiece] = []
    for piece in PIECES if named is None else named:
        everywhere = _why_nowhere(piece, policy, hardware, named=named is not None)
        everywhere = _EMULATED if emulated else everywhere
        by_reason: dict[tuple[bool, str], list[str]] = {}
        made = _MADE[piece] + (_COMPILED if named is None and piece not in _OF_WHOLE_MODELS else "")
        for name, why_not in PIECES[piece](model, left):
            if everywhere and named is None and isinstance(model.get_submodule(name), _OF_TORCH):
                continue
            reason = why_not or everywhere
            by_reason.setdefault((not reason, reason or made), []).append(name)
        of_piece = [
            FusedPiece(piece=piece, modules=tuple(names), fused=fused, reason=reason)
            for (fused, reason), names in by_reason.items()
        ]
        if named is not None and not any(each.fused for each in of_piece):
            reason = of_piece[0].reason if of_piece else "this model has no matching module"
            raise UnsupportedError(
                f"fuse={piece} cannot be used: {reason}. Leave {piece} out, or write fuse=auto."
            )
        matches += of_piece
    return tuple(matches)


def _why_left(module: ModulePlan) -> str:
    """Return why the plan of a module prevents fusing, or nothing."""
    if module.policy.reduce != "fp32":
        return f"sums are rounded to {module.policy.reduce}"
    return _EMULATED if module.how == "emulated" else ""


def _why_nowhere(piece: str, policy: Policy, hardware: Hardware, *, named: bool) -> str:
    """Return why no module of a piece can be fused on this machine, with this policy."""
    device = torch.device(hardware.device)
    missing = unsupported_reason(device)
    if policy.reduce != "fp32":
        return f"sums are rounded to {policy.reduce}"
    if missing and piece in _OF_WHOLE_MODELS and device.type == "cpu":
        return "" if named else "on CPU only if fuse names it"
    if missing and piece != "gelu":  # which is an operation of torch
        return missing
    if not named and policy.functional not in ("bf16", "fp16"):
        return f"products are {policy.functional}; name the piece in fuse to use it"
    return ""
