"""Metrics of a click model and differences between trained runs. Needs NumPy and SciPy only."""

from ctr_pe.evaluation.metrics import evaluate

__all__ = ["evaluate"]
