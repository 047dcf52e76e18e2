"""The cache of a layer and of a model, and what is done to a whole one: flush, edit rows, grow,
save.
"""
