"""Triton kernels: one pass over memory where plain torch makes several; each beside its twin."""
