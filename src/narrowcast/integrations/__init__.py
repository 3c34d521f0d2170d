"""Callbacks that monitor a model in other trainers."""
