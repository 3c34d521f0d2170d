"""The fused optimizer: its kernel, the programs and the rounding in it, and its twin in torch."""
