"""Triton kernels of the long and short convolutions; each has a twin in plain torch beside it."""
