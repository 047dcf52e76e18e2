"""Rows of arrays in pinned host memory: read and appended by kernels."""
