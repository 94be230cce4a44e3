"""Measurements: what `mzd bench` runs, each on the parts that users get."""
