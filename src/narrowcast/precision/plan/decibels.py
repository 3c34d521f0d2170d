"""How a range of signal to noise is written in plans and in reports; the latter need no torch."""

from collections.abc import Sequence


def decibel_range(matches: Sequence[float]) -> str:
    """Write from the least to the most; nothing where there is none."""
    if not matches:
        return ""
    low, high = f"{min(matches):.1f}", f"{max(matches):.1f}"
    return f"{low} dB" if low == high else f"{low}–{high} dB"
