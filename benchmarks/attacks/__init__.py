"""Attacks on the command line, by kind, and what they are made of; `campaign.py` runs them."""
