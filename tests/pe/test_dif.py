"""DIF: what fused attention scores are, and what its attribute predictors learn from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ctr_pe.pe.base import Losses, PositionEncoding
from ctr_pe.pe.dif import DIF
from ctr_pe.pe.vectors import Vectors
from ctr_pe.sequence.positions import Items, Pairs, Positions
from ctr_pe.units import SelfAttention, TargetAttention

D, FIELDS, L = 8, (3, 3, 2), 6
COUNTS = [3, 0, 9, 1, 12, 6]


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_of(counts: Sequence[int]) -> Positions:
    return Positions.from_mask(torch.arange(max(counts)) < torch.tensor(counts).unsqueeze(1))


def randomised(module: nn.Module, seed: int = 0) -> Any:
    draw = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5, generator=draw)
    return module.double()


class Recorder(DIF):
    """Keeps the logits that it gets and those that it gives."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        fused = super().bias(logits, vectors, pairs)
        self.seen.append((logits.detach(), fused.detach()))
        return fused


UNITS = ["dot", "bilinear", "din", "causal", "both"]


def run(pe: PositionEncoding, unit: str, counts: Sequence[int] = COUNTS, seed: int = 0) -> Tensor:
    """Outputs of a unit whose own weights are the same for every encoding."""
    positions = rows_of(counts)
    history = vectors(sum(counts), D, seed=1 + seed)
    torch.manual_seed(0)
    if unit in ("causal", "both"):
        layer = SelfAttention(D, pe.num_heads, pe, unit == "causal").double()
        states: Tensor = layer(history, positions)
        return states
    interest: Tensor = TargetAttention(D, unit, pe).double().eval()(vectors(len(counts), D), history, positions)[0]
    return interest


def heads_of(unit: str) -> int:
    return 2 if unit in ("causal", "both") else 1


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("fusion", ["sum", "concat", "gate"])
def test_without_attributes_and_positions_it_is_plain_attention(unit: str, fusion: str) -> None:
    heads = heads_of(unit)
    pe = randomised(DIF(D, L, heads, field_dims=(D,), dif_positions=False, dif_fusion=fusion))
    assert torch.equal(run(pe, unit), run(PositionEncoding(D, L, heads), unit))
    assert not list(pe.parameters())


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("fusion", ["sum", "concat"])
def test_starts_exactly_as_none(unit: str, fusion: str) -> None:
    heads = heads_of(unit)
    pe = DIF(D, L, heads, field_dims=FIELDS, dif_fusion=fusion).double()
    assert torch.equal(run(pe, unit), run(PositionEncoding(D, L, heads), unit))
    assert not torch.allclose(run(randomised(pe), unit), run(PositionEncoding(D, L, heads), unit), atol=1e-3)


@pytest.mark.parametrize("unit", UNITS)
def test_concat_with_identities_is_the_sum(unit: str) -> None:
    """Also for histories longer than the fusion's columns."""
    pe = randomised(DIF(D, L, heads_of(unit), field_dims=FIELDS, dif_fusion="concat"))
    concat = run(pe, unit)
    with torch.no_grad():
        pe.concat.copy_(torch.eye(L).unsqueeze(1).expand_as(pe.concat))
    identities = run(pe, unit)
    pe.fusion = "sum"
    assert torch.allclose(run(pe, unit), identities, atol=1e-12)
    assert not torch.allclose(concat, identities, atol=1e-3)


@pytest.mark.parametrize("unit", UNITS)
def test_gate_whose_last_layer_is_zero_is_the_mean(unit: str) -> None:
    pe = randomised(Recorder(D, L, heads_of(unit), field_dims=FIELDS, dif_fusion="gate"))
    gated = run(pe, unit)
    nn.init.zeros_(pe.gate[1].weight)
    pe.seen.clear()
    mean = run(pe, unit)
    fused = [given for _, given in pe.seen]
    pe.fusion = "sum"
    pe.seen.clear()
    run(pe, unit)
    for ours, (_, total) in zip(fused, pe.seen, strict=True):
        assert torch.allclose(ours, total / (1 + len(FIELDS)), atol=1e-12)  # item, two attributes, position
    assert not torch.allclose(gated, mean, atol=1e-3)


@pytest.mark.parametrize("fusion", ["concat", "gate"])
def test_columns_count_places_from_the_query(fusion: str) -> None:
    """Later items move no key to another column (positions, which count from the newest item, are left out)."""
    pe = Recorder(D, 20, 2, field_dims=FIELDS, dif_fusion=fusion, dif_positions=False)
    layer, items = randomised(SelfAttention(D, 2, pe, causal=True)), vectors(9, D)
    layer(items, rows_of([9]))
    layer(items[:4], rows_of([4]))
    (_, whole), (_, part) = pe.seen
    lower = torch.ones(4, 4, dtype=torch.bool).tril()
    assert torch.allclose(whole[0, :, :4, :4][:, lower], part[0][:, -4:, -4:][:, lower], atol=1e-12)


def test_rank_of_fused_scores_is_the_sum_of_the_sources() -> None:
    """Theorem 4.1: d + sum of the sources' dims, per head, where scores of items alone have rank d at most."""
    pe = randomised(Recorder(D, 20, 2, field_dims=FIELDS, dif_source_dim=[4, 2], dif_position_dim=6))
    randomised(SelfAttention(D, 2, pe), seed=1)(vectors(20, D), rows_of([20]))
    ((plain, fused),) = pe.seen
    assert torch.linalg.matrix_rank(plain).tolist() == [[4, 4]]
    assert torch.linalg.matrix_rank(fused).tolist() == [[4 + 2 + 1 + 3] * 2]


@pytest.mark.parametrize("unit", ["din", "causal"])
def test_the_order_of_attributes_does_not_matter(unit: str) -> None:
    """Fields and their sources swapped."""
    pe = randomised(Recorder(D, L, heads_of(unit), field_dims=(4, 2, 2)))
    swapped = Recorder(D, L, heads_of(unit), field_dims=(4, 2, 2)).double()
    swapped.load_state_dict(pe.state_dict())
    swapped.sources["1"], swapped.sources["2"] = pe.sources["2"], pe.sources["1"]
    order = [0, 1, 2, 3, 6, 7, 4, 5]
    target, history, positions = vectors(6, D), vectors(sum(COUNTS), D, seed=1), rows_of(COUNTS)
    for encoding, at in ((pe, list(range(D))), (swapped, order)):
        items = Items(history[:, at])
        torch.manual_seed(0)
        if unit == "din":
            TargetAttention(D, unit, encoding).double().eval()(
                target, history, positions, positions.target_pairs(items, Items(target[:, at]))
            )
        else:
            layer = SelfAttention(D, 2, encoding, causal=True).double()
            layer(history, positions, positions.item_pairs(True, items))
    for (_, ours), (_, theirs) in zip(pe.seen, swapped.seen, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)
    assert (pe.sources["1"].query.weight != pe.sources["2"].query.weight).any()


@pytest.mark.parametrize("unit", ["dot", "causal"])
def test_sources_are_the_items_as_looked_up_not_the_states_below(unit: str) -> None:
    pe = randomised(Recorder(D, L, heads_of(unit), field_dims=FIELDS))
    positions, looked_up = rows_of(COUNTS), (Items(vectors(sum(COUNTS), D)), Items(vectors(6, D)))
    for seed in (1, 2):
        states = vectors(sum(COUNTS), D, seed=seed)
        torch.manual_seed(0)
        if unit == "dot":
            attention = TargetAttention(D, unit, pe).double()
            attention(vectors(6, D, seed=seed), states, positions, positions.target_pairs(*looked_up))
        else:
            layer = SelfAttention(D, 2, pe, causal=True).double()
            layer(states, positions, positions.item_pairs(True, looked_up[0]))
    half = len(pe.seen) // 2
    for (plain, fused), (other_plain, other) in zip(pe.seen[:half], pe.seen[half:], strict=True):
        assert torch.allclose(fused - plain, other - other_plain, atol=1e-12)
        assert (plain - other_plain).abs().max() > 1e-3


def test_positions_are_scored_alike_in_every_row() -> None:
    pe = randomised(Recorder(D, L, 2))
    run(pe, "both", [9, 9])
    ((plain, fused),) = pe.seen
    added = (fused - plain)[0]
    assert torch.allclose((fused - plain)[1], added, atol=1e-12)
    assert torch.allclose(added[:, :4, :4], added[:, :1, :1].expand(2, 4, 4), atol=1e-12)  # distances 6 and more
    assert not torch.allclose(added[0], added[1], atol=1e-3)
    assert not torch.allclose(added[0, 4:, 4:], added[0, 4:, 4:].T, atol=1e-3)


def test_dims_of_the_sources() -> None:
    pe = DIF(D, L, 4, field_dims=(2, 5, 1))
    assert [source.query.weight.shape for source in pe.sources.values()] == [(8, 5), (4, 1)]
    assert pe.table.shape == (L + 1, D)
    assert DIF(96, L, 2).table.shape == (L + 1, 32)
    pe = DIF(D, L, 2, field_dims=(2, 5, 1), dif_source_dim=[2, 6], dif_position_dim=4)
    assert [source.key.weight.shape for source in pe.sources.values()] == [(2, 5), (6, 1)]
    assert pe.table.shape == (L + 1, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"field_dims": (3, 3)}, r"field_dims=\[3, 3\] add up to 6, not to dim=8"),
        ({"field_dims": FIELDS, "field_sizes": (9, 9)}, r"field_sizes=\[9, 9\] are not as many as field_dims"),
        ({"dif_fusion": "mean"}, "dif_fusion must be one of sum, concat, gate, got 'mean'"),
        (
            {"field_dims": FIELDS, "dif_source_dim": 3},
            "dif_source_dim must be a positive multiple of num_heads=2, got 3",
        ),
        ({"field_dims": FIELDS, "dif_source_dim": [4]}, r"dif_source_dim=\[4\] is not one for each of 2 attributes"),
        ({"dif_position_dim": 0}, "dif_position_dim must be a positive multiple of num_heads=2, got 0"),
        ({"dif_predict": -1.0}, "dif_predict must be a weight of 0 or more, got -1.0"),
        ({"dif_predict": math.nan}, "dif_predict must be a weight of 0 or more, got nan"),
    ],
)
def test_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DIF(D, L, 2, **options)


LOSS = "attribute predictors"


class TestPredictors:
    SIZES = (50, 5, 0)  # ids of the item, of an attribute, and none: vectors

    def build(self, heads: int = 1, predict: float = 3.0) -> Any:
        return randomised(DIF(D, L, heads, field_dims=FIELDS, field_sizes=self.SIZES, dif_predict=predict)).train()

    @staticmethod
    def items(count: int, seed: int) -> Items:
        draw = torch.Generator().manual_seed(seed)
        ids = tuple(torch.randint(0, size, (count,), generator=draw) for size in (50, 5, 5))
        return Items(vectors(count, D, seed=seed), ids, torch.rand(count, generator=draw) < 0.7)

    def batch(self) -> tuple[Items, Items, Positions]:
        items, target = self.items(sum(COUNTS), 1), self.items(len(COUNTS), 2)
        return items, target, rows_of(COUNTS)

    @staticmethod
    def expected(pe: DIF, states: list[Tensor], answers: list[int]) -> Tensor:
        """λ times the mean over states and ids 1, 2, … of binary cross-entropies of one hot labels."""
        (predictor,) = pe.predictors.values()
        scores = predictor(torch.stack(states))[:, 1:]
        labels = nn.functional.one_hot(torch.tensor(answers), 5)[:, 1:].double()
        return 3.0 * nn.functional.binary_cross_entropy_with_logits(scores, labels)

    def test_in_target_attention_the_interest_predicts_the_clicked_target(self) -> None:
        pe, (items, target, positions) = self.build(), self.batch()
        assert target.chosen is not None
        pairs = positions.target_pairs(items, target)
        interest, _, losses = TargetAttention(D, "dot", pe).attend(target.embedding, items.embedding, positions, pairs)
        ids = target.ids[1].tolist()
        rows = [b for b in range(len(ids)) if target.chosen[b] and ids[b] > 0]
        assert 0 < len(rows) < int(target.chosen.sum())  # some are not clicked, some have no id
        want = self.expected(pe, [interest[b] for b in rows], [ids[b] for b in rows])
        assert torch.allclose(losses[LOSS], want, atol=1e-12)

    def test_in_causal_self_attention_each_item_predicts_the_next_of_its_row(self) -> None:
        pe, (items, _, positions) = self.build(2), self.batch()
        assert items.chosen is not None
        layer = randomised(SelfAttention(D, 2, pe, causal=True))
        heads, losses = layer.heads(items.embedding, positions, positions.item_pairs(True, items))
        states = heads.flatten(1)
        assert len(positions.blocks) > 1
        ids, found, answers, first = items.ids[1].tolist(), [], [], 0
        for count in COUNTS:
            for i in range(first, first + count - 1):
                if items.chosen[i + 1] and ids[i + 1] > 0:
                    found.append(states[i])
                    answers.append(ids[i + 1])
            first += count
        assert torch.allclose(losses[LOSS], self.expected(pe, found, answers), atol=1e-12)

    @pytest.mark.parametrize("unit", ["target", "causal"])
    def test_zero_predictors_lose_log_2(self, unit: str) -> None:
        pe, batch = self.build(), self.batch()
        assert list(pe.predictors) == ["1"]  # position is not predicted, nor are vectors
        for predictor in pe.predictors.parameters():
            nn.init.zeros_(predictor)
        assert torch.allclose(self.losses(pe, batch, unit)[LOSS], torch.tensor(3 * math.log(2), dtype=torch.float64))

    def losses(self, pe: DIF, batch: tuple[Items, Items, Positions], unit: str, training: bool = True) -> Losses:
        items, target, positions = batch
        if unit == "target":
            attention, pairs = TargetAttention(D, "dot", pe).train(training), positions.target_pairs(items, target)
            return attention.attend(target.embedding, items.embedding, positions, pairs)[-1]
        layer = SelfAttention(D, 1, pe, unit == "causal").double().train(training)
        return layer.attend(items.embedding, positions, positions.item_pairs(layer.causal, items))[-1]

    @pytest.mark.parametrize("unit", ["target", "causal", "both"])
    def test_when_nothing_is_learned(self, unit: str) -> None:
        """In evaluation, without labels, with a weight of 0; where attention is bidirectional."""
        items, target, positions = self.batch()
        unlabelled = replace(items, chosen=None), replace(target, chosen=None), positions
        without_ids = Items(items.embedding), Items(target.embedding), positions
        pe, off = self.build(), self.build(predict=0.0)
        for encoding, batch in ((off, self.batch()), (pe, unlabelled), (pe, without_ids)):
            assert not self.losses(encoding, batch, unit)
        assert not self.losses(pe, self.batch(), unit, training=False)
        assert not off.predictors
        assert (off.loss_names, pe.loss_names) == ((), ("attribute predictors",))
        assert bool(self.losses(pe, self.batch(), unit)) == (unit != "both")

    @pytest.mark.parametrize("unit", ["target", "causal"])
    def test_no_known_answer_is_no_loss(self, unit: str) -> None:
        items, target, positions = self.batch()
        items, target = (replace(x, ids=tuple(torch.zeros_like(ids) for ids in x.ids)) for x in (items, target))
        pe = self.build()
        loss = self.losses(pe, (items, target, positions), unit)[LOSS]
        assert loss == 0
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in pe.parameters())
