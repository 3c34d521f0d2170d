"""Numerical health: where a number that is not finite came from, and rehearsals of that."""
