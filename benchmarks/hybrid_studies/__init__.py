"""The protocol of benchmarks/hybrid.py: its tasks, its methods, its savings and its tables."""
