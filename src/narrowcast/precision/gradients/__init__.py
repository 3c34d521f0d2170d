"""Gradients: the scale on the loss, the check that no bad one passes, norms."""
