"""Solvers: rotations of white signals that make them independent."""
