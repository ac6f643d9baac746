"""Metrics of a click model and paired statistics over seeded runs. Needs numpy only."""

from ctr_pe.evaluation.metrics import evaluate

__all__ = ["evaluate"]
