"""The fast code equals the loop-written reference in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ctr_pe.pe import available_pes, build_pe
from ctr_pe.pe.base import PositionEncoding
from ctr_pe.testing import Batch
from ctr_pe.units import SelfAttention, TargetAttention
from ctr_pe.units.scores import SCORES
from tests.support import reference

# (encoding, options): an encoding with options that change its equations has a line for each
CASES = [(name, {}) for name in reference.METHODS] + [
    ("cape", {"position_dim": 3}),
    ("cape_constant", {"position_span": "between"}),
    ("cape_oracle", {"position_span": "between"}),
    ("cape_cosine", {"position_span": "between"}),
    ("cape_cosine", {"field_dims": (3, 2, 1), "likeness_dim": 4}),
    ("cape_cosine", {"field_dims": (3, 2, 1), "likeness_of": "item"}),
    ("likeness", {"field_dims": (3, 2, 1), "likeness_dim": 4, "position_dim": 3}),
    ("likeness", {"field_dims": (3, 2, 1), "likeness_of": "item"}),
    ("sinusoidal", {"position_index": "rank"}),
    ("sinusoidal", {"on_target": False}),
    ("alibi", {"alibi_slope": 0.0625}),
    ("time_bias", {"time_unit": 60}),
    ("time_rope", {"rope_time": "sum", "rope_base": 50.0, "rope_layout": "interleaved"}),
    ("time_rope", {"shortest_period": 1000.0, "longest_period": 30_000.0}),
    ("cape_time", {"session_gap": 60.0, "position_dim": 3}),
    ("cape_time", {"position_span": "between"}),
    ("dape", {"dape_base": "kerple_log"}),
    ("dape", {"dape_base": "alibi"}),
    ("dif", {"field_dims": (3, 2, 1)}),
    ("dif", {"field_dims": (4, 2), "dif_source_dim": 3, "dif_positions": False}),
    ("dif", {"field_dims": (3, 2, 1), "dif_fusion": "concat", "dif_source_dim": [3, 6], "dif_position_dim": 3}),
    ("dif", {"field_dims": (3, 2, 1), "dif_fusion": "gate"}),
    ("dif", {"dif_fusion": "concat"}),
    ("euler", {"euler_adaptation": "scalar", "euler_frequencies": "learned", "position_index": "rank"}),
    ("euler", {"euler_adaptation": "none", "euler_layout": "interleaved"}),
    ("euler", {"euler_frequencies": "none", "euler_rotary_embedding": False}),
    ("euler", {"euler_planes": "full", "euler_layout": "interleaved"}),
    ("kernel", {"kernel_u": "full", "kernel_l": "toeplitz"}),
    ("kernel", {"kernel_u": "full", "kernel_l": "none", "kernel_anchor": "start", "kernel_band": 3}),
    ("kernel", {"kernel_u": "none", "kernel_anchor": "start"}),
    ("kernel", {"kernel_u": "toeplitz", "kernel_l": "toeplitz", "kernel_band": 2, "kernel_per_head": True}),
    ("kernel", {"kernel_u": "full", "kernel_per_head": True}),
]
COUNTS = [4, 0, 9, 1, 6, 7]  # the table below ends at 6 items
DIM, MAX_LEN = 6, 6


def randomised(module: nn.Module) -> nn.Module:
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.6)
    return module.double().eval()


def random_batch() -> Batch:
    batch = Batch.random(COUNTS, seed=5)
    batch = batch.laid_out("mixed")
    return replace(batch, target=batch.target[:, :DIM], history=batch.history[..., :DIM])


def method(name: str, options: dict[str, Any], pe: PositionEncoding, batch: Batch, b: int) -> reference.Method:
    weights = dict(pe.named_parameters()) | dict(pe.named_buffers())
    mask = batch.mask[b]
    ids = [*batch.ids[b, :-1][mask].tolist(), int(batch.ids[b, -1])]
    return reference.METHODS[name](weights, options, batch.age[b][mask].tolist(), ids)


def test_every_encoding_has_a_reference() -> None:
    assert set(available_pes()) == set(reference.METHODS)


@pytest.mark.parametrize(
    ("name", "options", "score"),
    [
        pytest.param(*case, score, marks=[pytest.mark.slow] * (row % len(SCORES) != column))
        for row, case in enumerate(CASES)
        for column, score in enumerate(SCORES)
    ],
)
@torch.no_grad()
def test_target_attention(name: str, options: dict[str, Any], score: str) -> None:
    """By default each case with one score, in turn."""
    pe = build_pe(name, DIM, MAX_LEN, **options)
    unit = randomised(TargetAttention(DIM, score, pe))
    batch = random_batch()
    positions = batch.positions()
    pairs = positions.target_pairs(*batch.items(positions))
    interest, weights = unit(*pe.embed(batch.target, batch.history, positions), positions, pairs)
    score_of = {
        "dot": lambda: reference.dot,
        "bilinear": lambda: reference.Bilinear(unit.score.weight),
        "din": lambda: reference.din(unit.score.mlp),
    }[score]()
    for b in range(len(COUNTS)):
        items = list(batch.history[b][batch.mask[b]])
        want, want_weights = reference.target_attention(
            method(name, options, pe, batch, b), score_of, batch.target[b], items
        )
        assert torch.allclose(interest[b], want, rtol=0, atol=1e-12)
        assert torch.allclose(weights[b][batch.mask[b]], want_weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "heads", "causal"),
    [
        pytest.param(*case, heads, causal, marks=[pytest.mark.slow] * ((row + (heads == 3) + causal) % 2))
        for row, case in enumerate(CASES)
        for heads in (1, 3)
        for causal in (True, False)
    ],
)
@torch.no_grad()
def test_self_attention(name: str, options: dict[str, Any], heads: int, causal: bool) -> None:
    """By default every two of case, heads and causal."""
    pe = build_pe(name, DIM, MAX_LEN, heads, **options)
    layer = randomised(SelfAttention(DIM, heads, pe, causal))
    batch = random_batch()
    positions = batch.positions()
    _, embedded = pe.embed(None, batch.history, positions)
    states = layer(embedded, positions, positions.item_pairs(causal, batch.items(positions)[0]))
    for b in range(len(COUNTS)):
        items = list(batch.history[b][batch.mask[b]])
        want = reference.self_attention(method(name, options, pe, batch, b), layer, items)
        for got, expected in zip(states[b][batch.mask[b]], want, strict=True):
            assert torch.allclose(got, expected, rtol=0, atol=1e-12)
