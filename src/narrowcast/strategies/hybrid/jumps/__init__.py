"""Jumps: weights moved by a predicted delta, kept only where a verified loss says so."""
