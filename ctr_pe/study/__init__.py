"""Grids of runs, their tables, and the search of hyper-parameters."""
