"""The precision engine: policy, plan, prepare, loss scale, master weights."""
