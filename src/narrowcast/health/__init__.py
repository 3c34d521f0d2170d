"""Numerical health: what tensors lose to their formats, and what that does to a run."""
