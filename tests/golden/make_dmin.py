"""Makes dmin.json from FuxiCTR's own DMIN: python -m tests.golden.make_dmin PATH/TO/FuxiCTR (a git checkout)."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.golden_model import HISTORY, PARAMS, TARGET, batch, feature_map, reference, right_padded, set_weights

LAYERS: list[dict[str, Any]] = [
    {"num_heads": 2, "batch_norm": False, "attention_activation": "Dice"},
    {"num_heads": 4, "batch_norm": True, "enable_sum_pooling": True},
    {"num_heads": 1, "batch_norm": True, "bn_only_once": True, "layer_norm": False},
]
PADDINGS = {"none": batch(False), "left": batch(True), "right": right_padded(batch(True))}
REFINERS = ("off", "published", "masked")


def params(case: dict[str, Any]) -> dict[str, Any]:
    fields = {"target_field": [TARGET], "sequence_field": [HISTORY]}
    switches = {"use_pos_emb": case["positions"], "use_behavior_refiner": case["refiner"] != "off"}
    block: dict[str, Any] = case["layers"]
    return PARAMS | {"pos_emb_dim": 3} | fields | switches | block


def forbid(refiner: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """FuxiCTR's refiner adds 1 - attn_mask to the logits, +1 where it is False; this makes it -inf there."""
    mask = kwargs["attn_mask"]
    return args, {"attn_mask": torch.ones(mask.shape).masked_fill(~mask, torch.inf)}


def auxiliary_loss(model: Any) -> str:
    """What FuxiCTR's loss of five full histories is, or its error."""
    states = torch.ones(5, 6, 8)
    outputs = {"y_pred": torch.full((5, 1), 0.5), "pad_mask": [torch.ones(5, 6).bool()]}
    outputs |= {key: [states] for key in ("head_emb", "pos_emb", "neg_emb")}
    try:
        loss = model.add_loss(outputs, torch.ones(5, 1))
    except (AttributeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return f"a loss of shape {tuple(loss.shape)}"


def main(checkout: str) -> None:
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        theirs, about = reference(checkout, "DMIN", Path(folder))

        def build(case: dict[str, Any], **changes: Any) -> Any:
            model = theirs(feature_map(Path(folder)), **{"neg_seq_field": None} | params(case) | changes)
            set_weights(model, power=2)
            return model.eval()

        for layers in LAYERS:
            for refiner in REFINERS:
                for positions in (True, False):
                    case = {"layers": layers, "refiner": refiner, "positions": positions}
                    model = build(case)
                    if refiner == "masked":
                        model.behavior_refiner[0].register_forward_pre_hook(forbid, with_kwargs=True)
                    for padding, rows in PADDINGS.items():
                        y_pred = model(rows)["y_pred"].view(-1).tolist()
                        cases.append(case | {"padding": padding, "y_pred": y_pred})
        model = build(cases[0], aux_loss_lambda=1, neg_seq_field=[HISTORY])
        about["auxiliary_loss"] = [auxiliary_loss(model)]
        model.model_dim = 8
        about["auxiliary_loss"].append(auxiliary_loss(model))
    lines = ",\n  ".join(json.dumps(case) for case in cases)
    Path(__file__).with_name("dmin.json").write_text(f'{{"about": {json.dumps(about)},\n "cases": [\n  {lines}\n ]}}\n')


if __name__ == "__main__":
    main(sys.argv[1])
