"""Attention of a decode step: over a span, over selected slots, over zones, over quantised keys
and values.
"""
