"""One user, many candidates: the scores of ``score_candidates`` are those of one row per candidate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ctr_pe import model_zoo
from ctr_pe.models.candidates import PAIRS
from tests.support.models import ENCODINGS, PARAMS, SMALL, VARIANTS, batch, build, feature_map, randomised, some_pairs

COUNTS = [0, 1, 5, 6, 9, 3]  # empty, one item, more than the slots of the feature map


def candidates(rows: int, count: int) -> dict[str, Tensor]:
    """Random targets (rows, count)."""
    draw = torch.Generator().manual_seed(7)
    items = torch.randint(1, 40, (rows, count), generator=draw)
    return {"item_id": items, "cate_id": items % 8 + 1}


def one_by_one(model: Any, rows: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    count = targets["item_id"].shape[1]
    scores = [model.forward(rows | {field: x[:, k] for field, x in targets.items()})["y_pred"] for k in range(count)]
    return torch.cat(scores, 1)


@some_pairs(SMALL, ENCODINGS, 0, of=3)
def test_every_backbone_and_encoding(name: str, encoding: str, tmp_path: Path) -> None:
    """Histories padded on the left, and others on the right."""
    model = randomised(build(name, tmp_path, position_encoding=encoding))
    left, right = batch(COUNTS[:4], slots=10, left=True), batch(COUNTS[2:], seed=1, slots=10)
    rows = {field: torch.cat([left[field], right[field]]) for field in left}
    targets = candidates(len(rows["item_id"]), 4)
    with torch.inference_mode():
        found = model.score_candidates(model.encode(rows), targets)
        torch.testing.assert_close(found, one_by_one(model, rows, targets), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("encoding", ["dif", "cape_oracle"])
@pytest.mark.parametrize("name", SMALL)
def test_a_field_of_the_item_with_one_value_for_all_targets(name: str, encoding: str, tmp_path: Path) -> None:
    """Such as candidates of one category."""
    model = randomised(build(name, tmp_path, position_encoding=encoding))
    rows, targets = batch(COUNTS, slots=10), candidates(len(COUNTS), 3)
    category = targets["cate_id"][:, 0]
    with torch.inference_mode():
        encoded = model.encode(rows)
        found = model.score_candidates(encoded, targets | {"cate_id": category})
        each = model.score_candidates(encoded, targets | {"cate_id": category.unsqueeze(1).expand(-1, 3)})
        torch.testing.assert_close(found, each, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("encoding", ["none", "cape", "naive"])
def test_every_form_of_a_backbone(variant: str, encoding: str, tmp_path: Path) -> None:
    name, options = VARIANTS[variant]
    model = randomised(build(name, tmp_path, position_encoding=encoding, **options))
    rows, targets = batch(COUNTS, slots=10), candidates(len(COUNTS), 3)
    with torch.inference_mode():
        found = model.score_candidates(model.encode(rows), targets)
        torch.testing.assert_close(found, one_by_one(model, rows, targets), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_more_candidates_than_are_scored_at_once(name: str, tmp_path: Path) -> None:
    model = randomised(build(name, tmp_path, position_encoding="cape"))
    rows, targets = batch([6, 2]), candidates(2, PAIRS // 14 + 3)
    with torch.inference_mode():
        encoded = model.encode(rows)
        found = model.score_candidates(encoded, targets)
        few = {field: x[:, -5:] for field, x in targets.items()}
        torch.testing.assert_close(found[:, -5:], model.score_candidates(encoded, few), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[:, -5:], one_by_one(model, rows, few), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["DIN", "SASRec"])
def test_fields_of_the_request_and_two_histories(name: str, tmp_path: Path) -> None:
    """A field with one value for all targets of a user, and one with a value for each."""
    spec = {"type": "categorical", "padding_idx": 0, "vocab_size": 5, "source": "request"}
    features = feature_map(tmp_path, hour=spec, offer=spec, price={"type": "numeric", "source": "item"})
    torch.manual_seed(0)
    groups = {"target_field": [["item_id"], ["cate_id"]], "sequence_field": [["item_history"], ["cate_history"]]}
    model = getattr(model_zoo, name)(
        features, gpu=-1, model_root=str(tmp_path), position_encoding=["cape", "time_bias"],
        **(PARAMS | SMALL[name] | groups | {"age_field": ["age_history", "age_history"]})
    )  # fmt: skip
    randomised(model)
    rows, targets = batch(COUNTS, slots=10), candidates(len(COUNTS), 4)
    rows["hour"] = torch.tensor([1, 2, 3, 4, 0, 1])
    targets["offer"] = torch.randint(5, (len(COUNTS), 4))
    targets["price"] = torch.rand(len(COUNTS), 4)
    with torch.inference_mode():
        found = model.score_candidates(model.encode(rows), rows | targets)
        torch.testing.assert_close(found, one_by_one(model, rows, targets), rtol=1e-5, atol=1e-5)


def test_a_history_is_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What DIEN's first GRU and SASRec's blocks make of the items does not depend on the targets."""
    for name, unit in (("DIEN", "extractors"), ("SASRec", "transformers")):
        model = randomised(build(name, tmp_path, position_encoding="cape"))
        rows, encoded = batch([4, 2]), model.encode(batch([4, 2]))
        for part in getattr(model, unit):
            monkeypatch.setattr(part, "forward", lambda *_: pytest.fail("encoded again"))
        assert model.score_candidates(encoded, candidates(len(rows["item_id"]), 3)).shape == (2, 3)
