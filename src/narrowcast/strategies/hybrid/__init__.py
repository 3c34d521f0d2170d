"""Hybrid predictive training: predict where the weights go, and verify it."""
