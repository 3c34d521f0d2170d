"""Evaluation of a decomposition: against known components, and by the loss of masks."""
