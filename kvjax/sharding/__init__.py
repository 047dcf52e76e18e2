"""Several devices: how a cache is split over a mesh by rows, heads and tokens."""
