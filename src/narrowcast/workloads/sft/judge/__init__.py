"""How good a fine-tuned model is: perplexity, answers that are right, samples, what it forgot."""
