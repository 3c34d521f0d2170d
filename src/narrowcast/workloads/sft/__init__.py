"""Fine-tuning of language models, with functional networks found by independent components."""
