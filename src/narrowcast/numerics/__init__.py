"""Number formats, exact rounding to them, scales, and the measure of what is lost."""

from narrowcast.numerics.compare import CastLoss, cast_counts, cast_loss, snr_db, ulp_distance
from narrowcast.numerics.formats import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    FORMATS,
    FP16,
    FP32,
    MXFP8,
    NVFP4,
    TF32,
    BlockFormat,
    Format,
    format_named,
    plain_format,
)
from narrowcast.numerics.rounding import cast, join, round_blocks, round_stochastic, round_to, split
from narrowcast.numerics.scales import Per, quantize, scale_for

__all__ = [
    "BF16",
    "E2M1",
    "E4M3",
    "E5M2",
    "FORMATS",
    "FP16",
    "FP32",
    "MXFP8",
    "NVFP4",
    "TF32",
    "BlockFormat",
    "CastLoss",
    "Format",
    "Per",
    "cast",
    "cast_counts",
    "cast_loss",
    "format_named",
    "join",
    "plain_format",
    "quantize",
    "round_blocks",
    "round_stochastic",
    "round_to",
    "scale_for",
    "snr_db",
    "split",
    "ulp_distance",
]
