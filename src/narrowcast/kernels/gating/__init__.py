"""Gated activations between fp8 products: what is between them is never written in 16 bits."""
