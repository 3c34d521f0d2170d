"""Modules that compute in other formats than they were written for, and what makes them so."""
