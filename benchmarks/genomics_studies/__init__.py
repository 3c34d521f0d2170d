"""The studies of benchmarks/genomics.py: their data, their settings, and what they stand beside."""
