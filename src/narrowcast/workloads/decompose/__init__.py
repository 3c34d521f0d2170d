"""Decompose: stochastic parameter decomposition of trained networks."""
