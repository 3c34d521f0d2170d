"""Stochastic parameter decomposition in plain eager torch: what `benchmarks/decompose.py` beats.

Written from the published method for comparison, in the manner that implementations of it had
before anybody made them fast: forward hooks registered and removed on every call, dicts by module
name, einsum, a delta W - (VU)^T that is materialised in fp32 on every step, bf16 autocast, a
forward pass per site for layerwise reconstruction, torch's own AdamW, and `.item()` of every loss
on every step.
"""
