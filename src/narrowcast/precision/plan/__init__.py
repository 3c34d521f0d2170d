"""The plan: from a policy, a model and a machine to the formats of every module."""
