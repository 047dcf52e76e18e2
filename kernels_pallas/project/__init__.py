"""Products of one token's row with weights, of which a decode step of a model has a few in each layer."""
