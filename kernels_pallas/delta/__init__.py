"""Kernels of gated delta nets."""
