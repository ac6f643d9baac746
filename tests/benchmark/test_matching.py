"""benchmark/matching.py: attention that starts as a likeness of items, everything else as without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmark.matching import GAIN, MatchingBST, MatchingSASRec
from ctr_pe.data.dataset import open_dataset
from ctr_pe.data.synthetic.context import generate
from ctr_pe.models.rank_model import RankModel
from ctr_pe.training import Run, build_model
from ctr_pe.units import SelfAttention


@pytest.mark.parametrize(("cls", "base"), [(MatchingBST, "BST"), (MatchingSASRec, "SASRec")])
def test_only_queries_and_keys_start_otherwise(cls: type[RankModel], base: str, tmp_path: Path) -> None:
    folder = tmp_path / "synthetic_context"
    generate(folder, users=20, valid_users=5, test_users=5)
    params = {"embedding_dim": 8, "num_heads": 2}
    ours, theirs = (
        build_model(Run(model, folder, "cape", 0, params=params), open_dataset(str(folder)), tmp_path)
        for model in (cls, base)
    )
    other = theirs.state_dict()
    projected = [name for name in other if name.endswith(("query.weight", "key.weight"))]
    assert projected
    for name, weights in ours.state_dict().items():
        assert torch.equal(weights, other[name]) == (name not in projected), name
    for unit in [unit for unit in ours.modules() if isinstance(unit, SelfAttention)]:
        assert torch.equal(unit.query.weight, unit.key.weight)
        assert torch.equal(unit.query.bias, unit.key.bias)
        products = unit.query.weight @ unit.query.weight.T
        torch.testing.assert_close(products, GAIN**2 * torch.eye(len(products)))
