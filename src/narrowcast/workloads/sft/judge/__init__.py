"""Evaluation of fine-tuned models: perplexity, exact match, samples, forgetting."""
