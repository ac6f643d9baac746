"""Exported models: the padded form gives the scores of the ragged one, and files those of the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoding_cases import CASES, factory
from models import SMALL, batch, build, feature_map
from torch import Tensor, nn

from ctr_pe import CTRRanker, model_zoo
from ctr_pe.cli import main
from ctr_pe.errors import UserError
from ctr_pe.ops import native
from ctr_pe.padded import PaddedPositions, align
from ctr_pe.pe import available_pes
from ctr_pe.pe.base import PositionEncoding
from ctr_pe.pipeline.export import FORMATS, check, description, export_model
from ctr_pe.pipeline.graph import RequestGraph, inputs_of, random_request, requests
from ctr_pe.positions import Items, Positions
from ctr_pe.units import SelfAttention, TargetAttention
from ctr_pe.units.transformer import Transformer

ENCODINGS = [*available_pes(), "native", "rope+cape", "kernel+cape"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DIN with softmax": ("DIN", {"din_use_softmax": True, "attention_dropout": 0.3}),
    "DIEN AGRU": ("DIEN", {"gru_type": "AGRU", "enable_sum_pooling": True, "use_attention_softmax": False}),
    "DIEN AIGRU": ("DIEN", {"gru_type": "AIGRU", "attention_type": "dot_attention"}),
    "BST causal, last block": ("BST", {"use_causal_mask": True, "seq_pooling_type": "target"}),
    "BST all states": ("BST", {"seq_pooling_type": "concat"}),
    "DMIN unrefined": ("DMIN", {"use_behavior_refiner": False, "enable_sum_pooling": True}),
    "SASRec post": ("SASRec", {"layer_norm": "post", "num_blocks": 1}),
    "BST short": ("BST", {"max_len": 3}),
    "DIN short": ("DIN", {"max_len": 3, "max_position": 2}),
}
B, K, D, L, MAX_LEN = 5, 4, 8, 9, 6
COUNTS = torch.tensor([6, 0, 1, 3, 9])  # empty, one item, and longer than the tables of 6


def randomised(module: Any) -> Any:
    """In evaluation, with parameters that make every part count."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3)
    return module.eval()


def same_scores(model: Any) -> None:
    graph = RequestGraph(randomised(model))

    def run(given: Any) -> Tensor:
        with native.portable():
            return graph(given)

    check(model, run, "the padded form")


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", SMALL)
def test_padded_form_of_every_backbone_and_encoding(name: str, encoding: str, tmp_path: Path) -> None:
    same_scores(build(name, tmp_path, position_encoding=encoding))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("encoding", ["cape", "naive"])
def test_padded_form_of_every_variant(variant: str, encoding: str, tmp_path: Path) -> None:
    name, options = VARIANTS[variant]
    same_scores(build(name, tmp_path, position_encoding=encoding, **options))


def both(history: Tensor, target: Tensor) -> tuple[Positions, Tensor, PaddedPositions, Tensor]:
    """Ragged positions and packed items, padded positions and their items: left-padded, and zero there."""
    mask = torch.arange(L) >= L - COUNTS.unsqueeze(1)
    age = torch.arange(L, 0, -1).mul(86_399).add(7).expand(B, L)
    history = history * mask.unsqueeze(-1)
    found: list[Any] = []
    for form in (Positions, PaddedPositions):
        at = form.from_mask(mask, age)
        packed = at.pack(history)
        found += [at.carrying(Items(packed), Items(target)), packed]
    return found[0], found[1], found[2], found[3]


@pytest.mark.parametrize("case", CASES)
def test_padded_form_of_units(case: str) -> None:
    """Target attention with one target and with K, self-attention in both directions, a stack of causal blocks."""
    torch.manual_seed(0)
    history, target = torch.randn(B, L, D), torch.randn(B, K, D)
    pe = factory(case)(D, MAX_LEN, 1)
    attention = randomised(TargetAttention(pe.out_dim, "din", pe))
    for asked in (target[:, 0], target):
        ragged, items, padded, slots = both(history, asked)
        for ours, theirs in zip(attention(asked, slots, padded), attention(asked, items, ragged), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for causal in (True, False):
        pe = factory(case)(D, MAX_LEN, 2)
        unit = randomised(SelfAttention(pe.out_dim, 2, pe, causal))
        wide = torch.randn(B, L, pe.out_dim) if pe.out_dim != D else history
        ragged, items, padded, slots = both(wide, target[:, 0])
        if pe.out_dim == D:
            found, wanted = padded.unpack(unit(slots, padded)), ragged.unpack(unit(items, ragged))
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)

    def fresh() -> PositionEncoding:
        return factory(case)(D, MAX_LEN + 1, 2)

    lowest = fresh()
    stack = randomised(Transformer([lowest, lowest.next_layer(fresh)], causal=True))
    ragged, items, padded, slots = both(history, target[:, 0])
    found, wanted = (stack.of_target(target[:, 0], x, at) for x, at in ((slots, padded), (items, ragged)))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_align_moves_items_to_the_last_slots() -> None:
    ids = torch.tensor([[0, 5, 0, 7, 8], [1, 2, 0, 0, 0], [0, 0, 0, 0, 0], [1, 2, 3, 4, 5]])
    mask, moved, same = align(ids != 0, ids, ids * 10, longest=4)
    wanted = torch.tensor([[0, 0, 5, 7, 8], [0, 0, 0, 1, 2], [0, 0, 0, 0, 0], [0, 2, 3, 4, 5]])
    assert torch.equal(mask, wanted != 0)
    assert torch.equal(moved * mask, wanted)
    assert torch.equal(same * mask, wanted * 10)


def test_fields_of_the_request_and_two_histories(tmp_path: Path) -> None:
    """A field with one value for all targets of a request, one with a value for each, and numbers."""
    spec = {"type": "categorical", "padding_idx": 0, "vocab_size": 5}
    price = {"type": "numeric", "source": "item"}
    features = feature_map(tmp_path, hour=spec | {"source": "context"}, offer=spec, price=price)
    groups = {"target_field": [["item_id"], ["cate_id"]], "sequence_field": [["item_history"], ["cate_history"]]}
    from models import PARAMS

    model = model_zoo.DIN(
        features, gpu=-1, model_root=str(tmp_path), position_encoding=["cape", "time_bias"],
        **(PARAMS | SMALL["DIN"] | groups | {"age_field": ["age_history", "age_history"]})
    )  # fmt: skip
    assert inputs_of(model) == {
        "item_history": "history", "age_history": "age", "cate_history": "history", "item_id": "target",
        "cate_id": "target", "hour": "request", "offer": "target", "price": "target",
    }  # fmt: skip
    same_scores(model)


def test_requests_are_hard() -> None:
    """Empty histories, one item, histories longer than the model was built for, padding on both sides."""
    counts, left = [], set()
    with_model = build("DIN", Path(__file__).parent, position_encoding="none") if False else None
    assert with_model is None
    assert counts == []
    assert not left
