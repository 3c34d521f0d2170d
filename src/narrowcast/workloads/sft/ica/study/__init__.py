"""Ablation studies of functional networks."""
