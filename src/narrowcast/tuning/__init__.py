"""The search for the fastest policy under a budget: per group of layers and per product."""
