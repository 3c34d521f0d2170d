"""What torch says where a layer of 16-bit weights is given fp32, and what to write then."""

import contextlib
import re
from collections.abc import Iterator
from types import TracebackType

import torch
from torch import nn

_OF_PRODUCTS = re.compile(r"mat1 and mat2|self and mat|batch1|Input type|expected scalar type")
_NARROW = (torch.bfloat16, torch.float16)
_SAYS = "narrowcast: "


@contextlib.contextmanager
def explaining_dtypes(model: nn.Module) -> Iterator[None]:
    """Explain the errors that are raised in the block."""
    try:
        yield
    except RuntimeError as error:
        explain_dtypes(model, error)
        raise


def explain_dtypes(model: nn.Module, error: BaseException) -> None:
    """Add to an error of torch's about dtypes which weights may stay in fp32, and how.

    Autocast brings inputs to the format of such weights; a model that switches it off for a layer,
    or calls one in a backward pass of its own, does so without it.
    """
    if not _is_of_formats(str(error)) or any(map(_is_ours, getattr(error, "__notes__", []))):
        return
    name = _innermost(error.__traceback__, model)
    if name is None:
        return
    error.add_note(
        f"{_SAYS}the weights of {name or 'the model'} are stored in 16 bits and its input was not "
        f"cast to their format, for example because autocast is off. Write `{name or '*'}: "
        "params=fp32` in the policy, or cast the input to the weight's dtype."
    )


def _is_of_formats(said: str) -> bool:
    """Say whether a product was given fp32 and 16 bits, and nothing else."""
    narrow = "BFloat16" in said or "Half" in said
    wide = re.search(r"\b[Ff]loat|FloatT", said) is not None
    whole = re.search(r"Long|Int|Byte|Bool|Char|Short", said) is not None
    return bool(_OF_PRODUCTS.search(said)) and narrow and wide and not whole


def _is_ours(note: str) -> bool:
    return note.startswith(_SAYS)


def _innermost(traceback: TracebackType | None, model: nn.Module) -> str | None:
    """Return the name of the module with 16-bit weights that was called last; None without one."""
    names = {id(module): name for name, module in model.named_modules()}
    result = None
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if id(module) in names and isinstance(module, nn.Module):
            narrow = any(p.dtype in _NARROW for p in module.parameters(recurse=False))
            result = names[id(module)] if narrow else result
        traceback = traceback.tb_next
    return result
