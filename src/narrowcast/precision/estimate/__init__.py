"""Memory and time of a step before it runs, from a dry run on tensors without memory."""
