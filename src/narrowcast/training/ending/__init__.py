"""How a run ends: when it is over before its last step, and with which weights."""
