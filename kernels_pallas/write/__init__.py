"""Writes of tokens into cache zones, in place."""
