"""Sections that every recipe has, a file each."""
