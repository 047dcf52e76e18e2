"""Estimates of q.k by 1-bit keys, by bounding boxes of pages, and by 4-bit codes."""
