"""What torch says where a layer of 16-bit weights is given fp32, and what to write then."""

import re
from types import TracebackType

import torch
from torch import nn

_OF_DTYPES = re.compile(r"same dtype|scalar type|dtype of the|different dtypes", re.IGNORECASE)
_NARROW = (torch.bfloat16, torch.float16)


def explain_dtypes(error: BaseException | None, model: nn.Module) -> None:
    """Add to an error of torch's about dtypes which weights may stay in fp32, and how.

    Autocast brings inputs to the format of such weights; a model that switches it off for a layer,
    or calls one in a backward pass of its own, does so without it.
    """
    if not isinstance(error, RuntimeError) or not _OF_DTYPES.search(str(error)):
        return
    name = _innermost(error.__traceback__, model)
    if name is None:
        return
    error.add_note(
        f"narrowcast: the weights of {name or 'the model'} are kept in 16 bits, and it was called "
        "where autocast is off, with an input of another dtype; write "
        f"`{name or '*'}: params=fp32` in the policy, or cast its input to its weight's dtype"
    )


def _innermost(traceback: TracebackType | None, model: nn.Module) -> str | None:
    """Return the name of the module with 16-bit weights that was called last; None without one."""
    names = {id(module): name for name, module in model.named_modules()}
    found = None
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if id(module) in names and isinstance(module, nn.Module):
            narrow = any(p.dtype in _NARROW for p in module.parameters(recurse=False))
            found = names[id(module)] if narrow else found
        traceback = traceback.tb_next
    return found
