"""DMIN against FuxiCTR's own with the same weights: equal with its refiner off, and with its refiner's mask mended.
What the published mask does, and right padding to its positions, is pinned and explained in docs/differences.md.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ctr_pe.model_zoo import DMIN
from ctr_pe.sequence.positions import Pairs
from tests.golden.make_dmin import PADDINGS, params
from tests.support.golden_model import feature_map, formula

GOLDEN = json.loads(Path(__file__).with_name("dmin.json").read_text())
CASES = GOLDEN["cases"]
EXTRACTOR, UNIT = "multi_interest_extractor.0", r"interests\.0\.units\.(\d)"
NAMES = {  # ours -> FuxiCTR's
    r"interests\.0\.refiner\.output": "behavior_refiner.0.attention.out_proj",
    r"interests\.0\.after_refiner\.norm": "behavior_refiner.0.layer_norm",
    r"interests\.0\.after_refiner": "behavior_refiner.0",
    r"interests\.0\.after_heads\.(\d)\.norm": rf"{EXTRACTOR}.layer_norm.\1",
    r"interests\.0\.after_heads\.(\d)\.ffn": rf"{EXTRACTOR}.ffn.\1",
    rf"{UNIT}\.score": rf"{EXTRACTOR}.target_attention.\1.attn_mlp",
    rf"{UNIT}\.pe\.table": rf"{EXTRACTOR}.target_attention.\1.pos_emb",
    rf"{UNIT}\.pe\.project": rf"{EXTRACTOR}.target_attention.\1.W_proj",
}


def weight(name: str, shape: torch.Size, heads: int, bn_only_once: bool) -> Tensor:
    """Our parameter ``name``, made of the formula of FuxiCTR's names and shapes."""
    part, kind = name.split(".")[-2:]
    if part in ("query", "key", "value"):  # one matrix there, in the extractor without bias
        if "extractor" in name and kind == "bias":
            return torch.zeros(shape)
        stem = f"{EXTRACTOR}.W_qkv." if "extractor" in name else "behavior_refiner.0.attention.in_proj_"
        whole = formula(stem + kind, (3 * shape[0], *shape[1:]), 2)
        return whole.chunk(3)[["query", "key", "value"].index(part)]
    if name.startswith("interests.0.extractor.output"):  # one matrix per head there, without bias
        columns = [formula(f"{EXTRACTOR}.W_o.{h}.weight", (shape[0], shape[0] // heads), 2) for h in range(heads)]
        return torch.zeros(shape) if kind == "bias" else torch.cat(columns, dim=1)
    for ours, theirs in NAMES.items():
        name = re.sub(f"^{ours}(?=\\.|$)", theirs, name)
    values = formula(name, shape, 2)
    if name.startswith("dnn.mlp.0."):  # the other fields (8 wide) come last there
        return values.roll(8, -1) if bn_only_once or kind == "weight" else values
    if name == "dnn.mlp.1.weight" and bn_only_once:
        return values.roll(8, -1)
    return values.flip(0) if name.endswith("pos_emb") else values  # by slot there


def build(case: dict[str, Any], folder: Path) -> DMIN:
    model = DMIN(feature_map(folder), **params(case))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                values = weight(name, tensor.shape, case["layers"]["num_heads"], "bn_only_once" in case["layers"])
                tensor.copy_(values.to(tensor.dtype))
    return model.eval()


def ours(case: dict[str, Any], folder: Path) -> Tensor:
    output: Tensor = build(case, folder)(PADDINGS[case["padding"]])["y_pred"].view(-1)
    return output


def counts_padding(case: dict[str, Any]) -> bool:
    """FuxiCTR's positions are slots: with right padding they count from the oldest item."""
    return bool(case["positions"]) and case["padding"] == "right"


def label(case: dict[str, Any]) -> str:
    positions = "native" if case["positions"] else "none"
    return f"{case['layers']['num_heads']}-{case['refiner']}-{positions}-{case['padding']}"


@pytest.mark.parametrize("case", [c for c in CASES if c["refiner"] != "published" and not counts_padding(c)], ids=label)
def test_same_output_as_fuxictr(case: dict[str, Any], tmp_path: Path) -> None:
    assert torch.allclose(ours(case, tmp_path), torch.tensor(case["y_pred"]), rtol=0, atol=5e-7)


@pytest.mark.parametrize("case", [c for c in CASES if c["refiner"] == "published" and not counts_padding(c)], ids=label)
def test_its_refiner_masks_nothing(case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FuxiCTR adds 1 to the logits that it means to forbid."""
    published = torch.tensor(case["y_pred"])
    assert (ours(case, tmp_path) - published).abs().max() > 1e-4
    if case["padding"] != "none":
        return  # there, padded slots get weight too

    # With the same done to our refiner, outputs are its own: there is no other difference.
    proper, calls = Pairs.softmax, iter(["refiner"])

    def softmax(pairs: Pairs, logits: Tensor) -> Tensor:
        return (logits + ~pairs.allowed).softmax(-1) if next(calls, "others") == "refiner" else proper(pairs, logits)

    monkeypatch.setattr(Pairs, "softmax", softmax)
    assert torch.allclose(ours(case, tmp_path), published, rtol=0, atol=5e-7)


@pytest.mark.parametrize("case", [c for c in CASES if c["refiner"] == "off" and counts_padding(c)], ids=label)
def test_its_positions_count_padding(case: dict[str, Any], tmp_path: Path) -> None:
    """The same items padded on the right get other scores from FuxiCTR; ours are its own of left padding."""
    left = next(c for c in CASES if c == case | {"padding": "left", "y_pred": c["y_pred"]})
    mine, difference = ours(case, tmp_path), torch.tensor(case["y_pred"]) - torch.tensor(left["y_pred"])
    assert torch.allclose(mine, torch.tensor(left["y_pred"]), rtol=0, atol=5e-7)
    assert difference[0] == 0  # full length
    assert difference.abs().max() > 1e-4


def test_golden_values_tell_rows_and_cases_apart() -> None:
    values = torch.tensor([case["y_pred"] for case in CASES])
    assert (values.amax(1) - values.amin(1)).median() > 0.01
    assert len({tuple(case["y_pred"]) for case in CASES if case["padding"] == "left"}) == len(CASES) // 3


def test_its_auxiliary_loss_cannot_be_computed() -> None:
    """First an attribute that it never sets; with that set, a view of the mask that cannot be."""
    assert [error.split(":")[0] for error in GOLDEN["about"]["auxiliary_loss"]] == ["AttributeError", "RuntimeError"]
