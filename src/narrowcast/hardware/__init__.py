"""What this machine can do: which products run natively and which must be emulated."""

from narrowcast.hardware.probe import Hardware, Support, probe
from narrowcast.hardware.speeds import Speeds, keep_speeds

__all__ = ["Hardware", "Speeds", "Support", "keep_speeds", "probe"]
