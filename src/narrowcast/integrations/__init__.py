"""Callbacks that let other people's trainers be watched."""
