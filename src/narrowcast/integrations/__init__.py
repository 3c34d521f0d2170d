"""Other people's trainers: callbacks that watch a model while they train it."""
