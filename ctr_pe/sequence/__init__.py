"""Histories of different lengths: one jagged batch, and who stands where in it."""
