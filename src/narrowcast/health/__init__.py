"""Numerical health: what tensors lose to their formats, and where a bad number came from."""
