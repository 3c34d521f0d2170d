"""`ica_dtype`: what signals are stored in, and why that is apart from what is computed in.

| stage | dtype | why |
|---|---|---|
| storage | by `ica_dtype` | it is what costs memory; half of it selects the same channels |
| products | float32; float64 for signals in float64 | rounding what is stored is worse |
| sums over chunks | float64 | a million rows must not lose the small ones |
| solver | float32, float64 where that fails | as small as rows × components |
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

import torch

from narrowcast.workloads.sft.ica.findings import Finding

_log = logging.getLogger(__name__)

ICA_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
)
NARROW = (torch.float16, torch.bfloat16)


@final
@dataclass(frozen=True, kw_only=True)
class Storage:
    """The dtype that signals are stored in, and what there is to say of the choice."""

    dtype: torch.dtype
    findings: tuple[Finding, ...] = ()


def storage_for(
    ica_dtype: str | torch.dtype | None, model_dtype: torch.dtype | None = None
) -> Storage:
    """Return what `ica_dtype` means for a model of this dtype.

    None and float32 are float32; auto is float32 for models of 16 bits and their own dtype for
    others; float16 and bfloat16 are what they say; any other is float32, with a warning.
    """
    if ica_dtype is None:
        return Storage(dtype=torch.float32)
    if isinstance(ica_dtype, torch.dtype):
        ica_dtype = dtype_name(ica_dtype)
    if ica_dtype == "auto":
        wide = model_dtype in (torch.float32, torch.float64)
        return Storage(dtype=model_dtype if wide and model_dtype else torch.float32)
    if ica_dtype in ICA_DTYPES:
        return Storage(dtype=ICA_DTYPES[ica_dtype])
    result = Finding(
        kind="dtype",
        what=f"ica_dtype must be auto, {', '.join(ICA_DTYPES)}, got {ica_dtype!r}",
        answer="Using float32",
    )
    _log.warning("%s", result)
    return Storage(dtype=torch.float32, findings=(result,))


def working_dtype(stored: torch.dtype) -> torch.dtype:
    """Return what products of signals stored in a dtype are computed in."""
    return torch.float64 if stored == torch.float64 else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as settings write it."""
    return str(dtype).removeprefix("torch.")
