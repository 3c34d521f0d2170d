"""Triton kernels of masked sites and importance functions; each has a twin in plain torch."""
