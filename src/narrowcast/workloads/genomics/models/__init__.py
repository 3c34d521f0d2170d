"""Sequence models: Hyena, attention and CNN backbones over letters or patches."""
