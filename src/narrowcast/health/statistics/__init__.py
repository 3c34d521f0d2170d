"""What tensors lose to their formats, sampled as they pass."""
