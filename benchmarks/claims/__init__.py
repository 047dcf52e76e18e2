"""Claims of papers, measured on live queries of a model: `python -m benchmarks.claims --help`."""
