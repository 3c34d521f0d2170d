"""Published checkpoints: ESM-2, Nucleotide Transformer, DNABERT-2, HyenaDNA."""
