"""Votes for keys by the sign patterns of their subspaces, and the keys with the most votes."""
