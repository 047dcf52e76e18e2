"""Arithmetic that no policy owns: partial attention, selection, quantisers, rotations and
blocks.
"""
