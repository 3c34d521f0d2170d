"""What this machine can do: which products run natively and which must be emulated."""

from narrowcast.hardware.probe import Hardware, Support, probe

__all__ = ["Hardware", "Support", "probe"]
