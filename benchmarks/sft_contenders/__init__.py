"""Who fine-tunes in `benchmarks/sft_step.py`, each in a process of its own."""
