"""Our models import FuxiCTR without ray and scikit-learn, and what needs them still works."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


HEAVY = "print([name for name in ('ray', 'sklearn', 'pandas', 'torch._dynamo') if name in sys.modules])"


@pytest.mark.slow
def test_models_and_training_need_neither() -> None:
    assert run(f"import sys, ctr_pe.model_zoo.dien, ctr_pe.training; {HEAVY}") == "[]"


@pytest.mark.slow
def test_what_was_put_off_is_there_when_it_is_used() -> None:
    code = """
import ctr_pe.model_zoo.din, numpy as np
from fuxictr.metrics import evaluate_metrics
from fuxictr.pytorch.models import rank_model
print(evaluate_metrics(np.array([0, 1, 1]), np.array([0.1, 0.2, 0.05]), ["AUC"])["AUC"])
print(rank_model.evaluate_metrics(np.array([0, 1]), np.array([0.1, 0.2]), ["AUC"])["AUC"])
from fuxictr.preprocess import FeatureProcessor, build_dataset
import fuxictr.preprocess.tokenizer
print(FeatureProcessor.__module__, callable(build_dataset), fuxictr.preprocess.tokenizer.Tokenizer.__name__)
import fuxictr.metrics
print(fuxictr.metrics.evaluate_metrics.__module__)
try:
    fuxictr.preprocess.nothing
except AttributeError as error:
    print(error)
"""
    assert run(code).splitlines() == [
        "0.5",
        "1.0",
        "fuxictr.preprocess.feature_processor True Tokenizer",
        "fuxictr.metrics",
        "module 'fuxictr.preprocess' has no attribute 'nothing'",
    ]


@pytest.mark.slow
def test_what_was_imported_before_stays() -> None:
    code = """
import fuxictr.preprocess, fuxictr.metrics
kept = fuxictr.preprocess, fuxictr.metrics.evaluate_metrics
import ctr_pe.model_zoo.din
print(kept == (fuxictr.preprocess, fuxictr.metrics.evaluate_metrics))
"""
    assert run(code) == "True"
