"""Sequences: alphabets, tokenizers, operations and readers, without torch."""
