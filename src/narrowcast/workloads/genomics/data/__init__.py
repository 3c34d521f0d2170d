"""Data of a genomics run: read or synthesize, split, cut, encode, batch."""
