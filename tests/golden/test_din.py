"""DIN without encoding equals FuxiCTR's own DIN; the values of the reference are in din.json (see make_din.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ctr_pe.model_zoo import DIN
from tests.support.golden_model import HISTORY, PARAMS, TARGET, batch, feature_map, set_weights

GOLDEN = json.loads(Path(__file__).with_name("din.json").read_text())


def build(folder: Path, **params: Any) -> DIN:
    model = DIN(feature_map(folder), din_target_field=[TARGET], din_sequence_field=[HISTORY], **PARAMS | params)
    set_weights(model, {"attentions.": "attention_layers.", ".score.": ".attention_layer."})
    return model


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: "-".join(str(v) for v in list(c.values())[:3]))
def test_same_output_as_fuxictr(case: dict[str, Any], tmp_path: Path) -> None:
    model = build(tmp_path, din_use_softmax=case["softmax"], attention_hidden_activations=case["activation"])
    y_pred = model.eval()(batch(case["padded"]))["y_pred"].view(-1)
    assert torch.allclose(y_pred, torch.tensor(case["y_pred"]), rtol=0, atol=2e-7)


def test_golden_values_tell_rows_and_cases_apart() -> None:
    values = [value for case in GOLDEN["cases"] for value in case["y_pred"]]
    assert max(values) - min(values) > 0.02
    softmax, raw = (next(c for c in GOLDEN["cases"] if c["softmax"] is on)["y_pred"] for on in (True, False))
    assert max(abs(a - b) for a, b in zip(softmax, raw, strict=True)) > 1e-3
