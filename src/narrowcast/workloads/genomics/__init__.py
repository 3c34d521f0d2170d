"""Genomics: sequences of DNA, RNA and protein."""
