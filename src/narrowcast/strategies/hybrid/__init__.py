"""Hybrid predictive training: some steps are trained, others are predicted and verified."""
