"""What papers claim, measured on live queries of a model: `python -m benchmarks.claims --help`."""
