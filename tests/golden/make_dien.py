"""Makes dien.json from FuxiCTR's own DIEN: python -m tests.golden.make_dien PATH/TO/FuxiCTR (git checkout or bare)."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from fuxictr.features import FeatureMap
from torch import Tensor

from tests.support.golden_model import HISTORY, PARAMS, TARGET, batch, feature_map, reference, right_padded, set_weights

GATES = ("AGRU", "AUGRU")
ATTENTIONS = ("dot_attention", "bilinear_attention", "din_attention")
PADDINGS = {"none": batch(False), "right": right_padded(batch(True)), "left": batch(True)}
NEGATIVE = ("item_other", "cate_other")
FIELDS = {"dien_target_field": [TARGET], "dien_sequence_field": [HISTORY], "dien_neg_seq_field": []}


def params(gate: str, attention: str, softmax: bool = True, pooling: bool = False) -> dict[str, Any]:
    own = {"gru_type": gate, "attention_type": attention, "batch_norm": True}
    return PARAMS | FIELDS | own | {"use_attention_softmax": softmax, "enable_sum_pooling": pooling}


def with_negatives(fields: FeatureMap) -> FeatureMap:
    for name, other in zip(HISTORY, NEGATIVE, strict=True):
        fields.features[other] = dict(fields.features[name])
    return fields


def crashes() -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """What FuxiCTR's cannot do: params and a batch of each."""
    rows, usual = PADDINGS["none"], params("AUGRU", "bilinear_attention")
    others = {other: rows[name].roll(1, 0) for name, other in zip(HISTORY, NEGATIVE, strict=True)}
    return {
        "AIGRU": (params("AIGRU", "bilinear_attention"), rows),
        "one row": (usual, {name: values[:1] for name, values in rows.items()}),
        "only empty histories": (usual, rows | {name: torch.zeros_like(rows[name]) for name in HISTORY}),
        "auxiliary loss": (usual | {"aux_loss_alpha": 1.0, "dien_neg_seq_field": [NEGATIVE]}, rows | others),
    }


def main(checkout: str) -> None:
    cases: list[dict[str, Any]] = []
    messages = {}
    with tempfile.TemporaryDirectory() as folder:
        theirs, about = reference(checkout, "DIEN", Path(folder))
        for gate, attention, softmax, pooling in itertools.product(GATES, ATTENTIONS, (True, False), (True, False)):
            case: dict[str, Any] = {"gate": gate, "attention": attention, "softmax": softmax, "pooling": pooling}
            model = theirs(feature_map(Path(folder)), **params(**case))
            set_weights(model, power=2)
            for padding, rows in PADDINGS.items():
                cases.append(case | {"padding": padding, "y_pred": model.eval()(rows)["y_pred"].view(-1).tolist()})
        for name, (settings, rows) in crashes().items():
            fields = feature_map(Path(folder))
            model = theirs(with_negatives(fields) if NEGATIVE[0] in rows else fields, **settings)
            try:
                model.eval().compute_loss(model(rows), model.get_labels(rows)).backward()
            except RuntimeError as error:
                messages[name] = str(error).splitlines()[0]
    lines = ",\n  ".join(json.dumps(case) for case in cases)
    Path(__file__).with_name("dien.json").write_text(
        f'{{"about": {json.dumps(about)},\n "crashes": {json.dumps(messages)},\n "cases": [\n  {lines}\n ]}}\n'
    )


if __name__ == "__main__":
    main(sys.argv[1])
