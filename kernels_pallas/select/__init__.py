"""Selection of the units with the highest scores, by a cluster of blocks per row."""
