"""SASRec as CTR ranker against a reference written with loops over rows, items and heads, in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ctr_pe.utils.errors import UserError
from tests.support.models import batch, build


def norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    centred = x - x.mean()
    return centred / (centred.square().mean() + layer.eps).sqrt() * layer.weight + layer.bias


def attend(unit: Any, items: list[Tensor]) -> list[Tensor]:
    width = len(items[0]) // unit.num_heads
    query, key, value = ([x @ p.weight.T + p.bias for x in items] for p in (unit.query, unit.key, unit.value))
    states = []
    for i in range(len(items)):
        heads = []
        for head in range(unit.num_heads):
            own = slice(head * width, (head + 1) * width)
            logits = [query[i][own] @ key[j][own] / math.sqrt(width) for j in range(i + 1)]
            total = sum(logit.exp() for logit in logits)
            heads.append(sum(logits[j].exp() / total * value[j][own] for j in range(i + 1)))
        states.append(torch.cat(heads) @ unit.output.weight.T + unit.output.bias)
    return states


def feed(block: Any, x: Tensor) -> Tensor:
    first, _, second = block.ffn
    return (x @ first.weight.T + first.bias).clamp(min=0) @ second.weight.T + second.bias


def reference(model: Any, rows: dict[str, Tensor], row: int, pre: bool) -> Tensor:
    """Click probability of one row."""
    tables = [model.embedding_layer.embedding_layers[name].weight for name in ("item_id", "cate_id")]
    ids = list(zip(rows["item_history"][row].tolist(), rows["cate_history"][row].tolist(), strict=True))
    target = int(rows["item_id"][row]), int(rows["cate_id"][row])
    sequence = [pair for pair in ids if pair[0] != 0] + [target]
    items = [torch.cat([table[i] for table, i in zip(tables, pair, strict=True)]) for pair in sequence]
    stack = model.transformers[0]
    states = [item + stack.encodings[0].table[len(items) - 1 - index] for index, item in enumerate(items)]
    for block in stack.blocks:
        if pre:
            attended = attend(block.attention, [norm(block.layer_norm1, x) for x in states])
            states = [x + y for x, y in zip(states, attended, strict=True)]
            states = [x + feed(block, norm(block.layer_norm2, x)) for x in states]
        else:
            attended = attend(block.attention, states)
            states = [norm(block.layer_norm1, x + y) for x, y in zip(states, attended, strict=True)]
            states = [norm(block.layer_norm2, x + feed(block, x)) for x in states]
    last = norm(stack.layer_norm, states[-1]) if pre else states[-1]
    hidden, _, out, _ = model.dnn.mlp
    top = (torch.cat([items[-1], last]) @ hidden.weight.T + hidden.bias).clamp(min=0)
    return torch.sigmoid(top @ out.weight.T + out.bias)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(
    ("layer_norm", "blocks", "heads"), [("pre", 1, 1), ("pre", 3, 2), ("post", 1, 2), ("post", 2, 4)]
)
def test_equals_a_reference_with_loops(layer_norm: str, blocks: int, heads: int, left: bool, tmp_path: Path) -> None:
    params = {"num_blocks": blocks, "num_heads": heads, "ffn_dim": 5, "layer_norm": layer_norm}
    model = build("SASRec", tmp_path, position_encoding="native", **params).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    rows = batch([3, 0, 6, 1, 5], slots=7, left=left)
    got = model(rows)["y_pred"]
    want = torch.stack([reference(model, rows, row, layer_norm == "pre") for row in range(5)])
    assert torch.allclose(got, want, rtol=0, atol=1e-12)
    assert (want.amax() - want.amin()) > 0.01


@pytest.mark.parametrize("layer_norm", ["pre", "post"])
def test_sixteen_blocks_train(layer_norm: str, tmp_path: Path) -> None:
    model = build("SASRec", tmp_path, num_blocks=16, layer_norm=layer_norm, position_encoding="cape").train()
    model._max_gradient_norm = 10.0
    for step in range(3):
        assert model.train_step(batch([3, 0, 6, 1, 5], seed=step)).isfinite()
    assert len({id(block.attention.pe.table) for block in model.transformers[0].blocks}) == 16
    first = model.transformers[0].blocks[0].attention.query.weight
    assert first.grad.abs().max() > 0


def test_native_is_a_position_vector_added_once(tmp_path: Path) -> None:
    model = build("SASRec", tmp_path, position_encoding="native")
    names = [name for name, _ in model.named_parameters() if "pe." in name]
    assert names == ["transformers.0.blocks.0.attention.pe.table"]


def test_dropout_acts_in_training_only(tmp_path: Path) -> None:
    rows = batch([3, 0, 6])
    for key in ("hidden_dropout", "attention_dropout"):
        model = build("SASRec", tmp_path, **{key: 0.5})
        assert not torch.equal(model.train()(rows)["y_pred"], model(rows)["y_pred"])
        assert torch.equal(model.eval()(rows)["y_pred"], build("SASRec", tmp_path).eval()(rows)["y_pred"])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"num_heads": 3},
            r"SASRec: num_heads=3 does not divide 8, the item dim of \['item_id', 'cate_id'\]: take one of 1, 2, 4, 8",
        ),
        ({"num_heads": 0}, "num_heads must be a positive integer, got 0"),
        ({"num_blocks": 0}, "num_blocks must be a positive integer, got 0"),
        ({"layer_norm": "prenorm"}, "layer_norm 'prenorm' is unknown: did you mean 'pre'"),
        ({"ffn_activation": "rellu"}, "activation 'rellu' is unknown"),
        ({"block_dropout": 0.1}, "key 'block_dropout' is unknown"),
    ],
)
def test_mistakes_are_one_line(params: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as error:
        build("SASRec", tmp_path, **params)
    assert "\n" not in str(error.value)
