"""Triton kernels of the convolutions; each has a plain-torch twin."""
