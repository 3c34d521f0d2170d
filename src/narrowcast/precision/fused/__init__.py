"""Several layers computed as one, where a model has declared what they do."""
