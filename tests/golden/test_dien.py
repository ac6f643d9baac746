"""DIEN against FuxiCTR's own with the same weights: equal on full and right-padded histories. FuxiCTR reads left-padded
ones from the wrong end and crashes where ``make_dien.crashes`` says; ours does neither. See docs/differences.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ctr_pe.model_zoo import DIEN
from tests.golden.make_dien import NEGATIVE, PADDINGS, crashes, params, with_negatives
from tests.support.golden_model import feature_map, formula

GOLDEN = json.loads(Path(__file__).with_name("dien.json").read_text())
CASES = GOLDEN["cases"]
NAMES = {
    "extractors.": "extraction_modules.",
    "attentions.0.score.mlp": "attention_modules.0.attn_mlp.mlp",
    "attentions.0.score.weight": "attention_modules.0.W_kernel",
    "evolutions.0.weight_ih": "evolving_modules.0.gru_cell.x2h.weight",
    "evolutions.0.weight_hh": "evolving_modules.0.gru_cell.h2h.weight",
    "evolutions.0.bias_ih": "evolving_modules.0.gru_cell.x2h.bias",
    "evolutions.0.bias_hh": "evolving_modules.0.gru_cell.h2h.bias",
}


@torch.no_grad()
def set_weights(model: DIEN) -> None:
    """The formula of FuxiCTR's names and shapes; its tower reads the interest first, its AGRU has an unused gate."""
    for name, tensor in model.state_dict().items():
        theirs = name
        for mine, other in NAMES.items():
            theirs = theirs.replace(mine, other)
        if name.startswith("evolutions.") and model.evolutions[0].gate == "AGRU":
            unit = len(tensor) // 2
            values = formula(theirs, (3 * unit, *tensor.shape[1:]), 2)[unit:]
        else:
            values = formula(theirs, tensor.shape, 2)
        if name == "dnn.mlp.0.weight":
            values = torch.cat([values[:, -8:], values[:, :-8]], dim=1)  # target fields, interest
        if tensor.is_floating_point():
            tensor.copy_(values)


def ours(case: dict[str, Any], folder: Path) -> Tensor:
    settings = {key: case[key] for key in ("gate", "attention", "softmax", "pooling")}
    model = DIEN(feature_map(folder), **params(**settings))
    set_weights(model)
    output: Tensor = model.eval()(PADDINGS[case["padding"]])["y_pred"].view(-1)
    return output


def of_padding(*names: str) -> pytest.MarkDecorator:
    def label(case: dict[str, Any]) -> str:
        return "-".join(str(value) for value in list(case.values())[:5])

    return pytest.mark.parametrize("case", [case for case in CASES if case["padding"] in names], ids=label)


@of_padding("none", "right")
def test_same_output_as_fuxictr(case: dict[str, Any], tmp_path: Path) -> None:
    assert torch.allclose(ours(case, tmp_path), torch.tensor(case["y_pred"]), rtol=0, atol=5e-7)


@of_padding("left")
def test_left_padding_is_right_padding_here_and_not_in_fuxictr(case: dict[str, Any], tmp_path: Path) -> None:
    right = next(c for c in CASES if c == case | {"padding": "right", "y_pred": c["y_pred"]})
    mine = ours(case, tmp_path)
    assert torch.allclose(mine, torch.tensor(right["y_pred"]), rtol=0, atol=5e-7)
    difference = (mine - torch.tensor(case["y_pred"])).abs()
    assert difference[0] < 5e-7  # a full history has no padding
    assert difference[1:].max() > 1e-4


@pytest.mark.parametrize("name", crashes())
def test_what_fuxictr_cannot_do_works(name: str, tmp_path: Path) -> None:
    assert GOLDEN["crashes"][name]
    settings, rows = crashes()[name]
    fields = feature_map(tmp_path)
    model = DIEN(with_negatives(fields) if NEGATIVE[0] in rows else fields, **settings)
    set_weights(model)
    model.train(len(rows["label"]) > 1)  # batch norm of one row has no variance
    loss = model.compute_loss(model(rows), model.get_labels(rows))
    loss.backward()
    assert loss.shape == ()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_golden_values_tell_rows_and_cases_apart() -> None:
    for padding in PADDINGS:
        values = torch.tensor([case["y_pred"] for case in CASES if case["padding"] == padding])
        assert (values.amax(1) - values.amin(1)).min() > 1e-3
        distances = torch.pdist(values.double(), p=float("inf"))
        assert distances.min() > 1e-5
