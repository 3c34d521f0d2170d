"""Fine-tuning data: rows to conversations to tokens."""
