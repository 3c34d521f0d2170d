"""Language models: a GPT, its tokenizers and its text."""
