"""What this machine can do: which products run natively and which must be emulated."""

from narrowcast.hardware.detect import Hardware, Support, detect_hardware
from narrowcast.hardware.speeds import Speeds, keep_speeds

__all__ = ["Hardware", "Speeds", "Support", "detect_hardware", "keep_speeds"]
