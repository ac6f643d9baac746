"""Makes bst.json from FuxiCTR's own BST: python -m tests.golden.make_bst PATH/TO/FuxiCTR (a git checkout or bare)."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.golden_model import HISTORY, PARAMS, TARGET, batch, feature_map, reference, right_padded, set_weights

BLOCKS: list[dict[str, Any]] = [
    {"num_heads": 2, "stacked_transformer_layers": 1},
    {"num_heads": 4, "stacked_transformer_layers": 2, "use_causal_mask": True},
    {"num_heads": 1, "stacked_transformer_layers": 1, "layer_norm": False},
    {"num_heads": 2, "stacked_transformer_layers": 2, "layer_norm": False, "use_residual": False},
]
POOLINGS = ("mean", "sum", "target", "concat")
PADDINGS = {"none": batch(False), "left": batch(True), "right": right_padded(batch(True))}


def params(case: dict[str, Any]) -> dict[str, Any]:
    common = {key: value for key, value in PARAMS.items() if key != "attention_hidden_units"}
    block: dict[str, Any] = case["block"]
    return common | block | {"seq_pooling_type": case["pooling"], "use_position_emb": case["positions"]}


def main(checkout: str) -> None:
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        theirs, about = reference(checkout, "BST", Path(folder))
        for block, pooling, positions in itertools.product(BLOCKS, POOLINGS, (True, False)):
            case = {"block": block, "pooling": pooling, "positions": positions}
            model = theirs(
                feature_map(Path(folder)), bst_target_field=[TARGET], bst_sequence_field=[HISTORY], **params(case)
            )
            set_weights(model, power=2)
            for padding, rows in PADDINGS.items():
                cases.append(case | {"padding": padding, "y_pred": model.eval()(rows)["y_pred"].view(-1).tolist()})
    lines = ",\n  ".join(json.dumps(case) for case in cases)
    Path(__file__).with_name("bst.json").write_text(f'{{"about": {json.dumps(about)},\n "cases": [\n  {lines}\n ]}}\n')


if __name__ == "__main__":
    main(sys.argv[1])
