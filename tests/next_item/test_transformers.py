"""Next-item models with self-attention beside SASRec: every encoding, odd histories, what is learned, and each against
its equations written plainly."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, layer_norm, silu, softmax

from ctr_pe.data.dataset import Dataset
from ctr_pe.model_zoo.next_item.bert4rec import BERT4Rec
from ctr_pe.model_zoo.next_item.core import CORE
from ctr_pe.model_zoo.next_item.dif_sr import DIFSR, attribute_loss
from ctr_pe.model_zoo.next_item.fdsa import FDSA
from ctr_pe.model_zoo.next_item.hstu import NextItemHSTU
from ctr_pe.model_zoo.next_item.popularity import Popularity
from ctr_pe.model_zoo.next_item.sasrec import NextItemSASRec
from ctr_pe.model_zoo.next_item.sasrecf import SASRecF
from ctr_pe.pe import available_pes
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.training import train
from ctr_pe.utils.errors import UserError
from tests.support.next_item import batch_of, built, categories, dataset, events, random_histories, run_of, states_of

CAUSAL = [SASRecF, DIFSR, NextItemHSTU, CORE, FDSA]
EVERY = [*CAUSAL, BERT4Rec]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("next") / "log"
    return dataset(folder, events(random_histories()), categories(), max_len=6)


def trained(data: Dataset, pe: str, model: type, **params: Any) -> Any:
    """In float64 and evaluation, with parameters far from their initial values."""
    found = built(data, pe, model, **params).double().eval()
    found.embedding_layer.double()
    draw = torch.Generator().manual_seed(3)
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.3, generator=draw)
    return found


@pytest.mark.parametrize("model", [NextItemSASRec, *EVERY])
@pytest.mark.parametrize(
    ("pe", "key", "loss"),
    [("pdm", "pdm_contrast", "PDM reorder contrast"), ("euler", "euler_contrast", "phase contrast")],
)
def test_losses_of_encodings_are_minimised(data: Dataset, model: type, pe: str, key: str, loss: str) -> None:
    """In proportion to their weight, beside the loss of the items."""
    totals, parts = [], []
    for weight in (0.0, 0.1, 0.2):
        built_ = built(data, pe, model, item_fields=None, **{key: weight}, hidden_dropout=0.0).train()
        found = built_.forward(batch_of([[1, 2, 3, 4, 5], [2, 3], [6, 7, 8, 9, 1, 2]], [6, 4, 10], cate=True))
        totals.append(float(built_.add_loss(found, torch.ones(3, 1)).detach()))
        parts.append(float(built_.auxiliary_parts.get(loss, torch.zeros(()))))
    assert parts[0] == 0 < parts[1]
    assert parts[2] == pytest.approx(2 * parts[1], rel=1e-4)
    assert totals[1] - totals[0] == pytest.approx(parts[1], abs=1e-4)
    assert totals[2] - totals[0] == pytest.approx(parts[2], abs=1e-4)


ONE_OF_A_KIND = ["native", "rope+cape", "kernel", "dif"]


@pytest.mark.parametrize("model", CAUSAL)
@pytest.mark.parametrize("encodings", [ONE_OF_A_KIND, pytest.param([*available_pes()], marks=pytest.mark.slow)])
def test_every_encoding_keeps_causality(data: Dataset, model: type, encodings: list[str]) -> None:
    """The state at an item is that of the history that ends with it."""
    for pe in encodings:
        found: list[Tensor] = []
        scorer = trained(data, pe, model)
        for items in ([3, 1, 2, 2, 5, 4], [3, 1, 2, 2], [3]):
            batch = batch_of([items, [7]], [1, 1], cate=True)
            batch.histories["age_history"] = torch.tensor([100 * k for k in range(len(items), 0, -1)] + [5])
            found.append(states_of(scorer, batch)[0])
        for part, count in ((found[1], 4), (found[2], 1)):
            assert torch.allclose(found[0][:count], part[:count]), pe


@pytest.mark.parametrize("model", EVERY)
def test_empty_short_and_long_histories(data: Dataset, model: type) -> None:
    """Each row is ranked as if it were alone, whatever the others' lengths; of a long history the newest items count;
    a batch of empty histories can be trained on and ranked."""
    scorer = trained(data, "native", model, max_len=6)
    histories = [[], [4], [9, 9, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [5, 1, 2]]
    together = scorer.forward(batch_of(histories, [1] * 5, cate=True))["y_pred"]
    assert together.isfinite().all()
    alone = [scorer.forward(batch_of([history], [1], cate=True))["y_pred"] for history in histories]
    torch.testing.assert_close(together, torch.cat(alone))
    torch.testing.assert_close(together[2], together[3])
    found = built(data, "native", model)
    found.train()
    assert math.isfinite(found.train_step(batch_of([[], []], [1, 2], cate=True)).item())


@pytest.mark.parametrize("model", CAUSAL)
@pytest.mark.parametrize("others", [[], [[4], [5, 1, 2]]])
def test_after_an_empty_history_the_most_frequent_items_come_first(
    data: Dataset, model: type, others: list[list[int]]
) -> None:
    scorer = trained(data, "native", model).float()
    scorer.embedding_layer.float()
    ranking = scorer.rank(batch_of([[], *others], [1] * (1 + len(others)), cate=True), scorer.vectors(), 3)
    assert ranking.first[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "model", [pytest.param(one, marks=[] if one is DIFSR else [pytest.mark.slow]) for one in EVERY]
)
def test_it_learns_more_than_popularity(data: Dataset, model: type) -> None:
    """Items follow each other in the order of their numbers, four times in five."""
    epochs = 60 if model is BERT4Rec else 30  # it has a third of the questions
    outcome = train(run_of(data, "native", model, num_blocks=1, epochs=epochs, filter_seen=True))
    assert outcome.history[-1].loss < 0.9 * outcome.history[0].loss
    popular = train(run_of(data, "none", Popularity, epochs=1, filter_seen=True))
    assert outcome.metrics["NDCG@10"] > popular.metrics["NDCG@10"] + 0.1


@pytest.mark.parametrize("model", [SASRecF, FDSA])
def test_items_without_attributes_are_refused(data: Dataset, model: type) -> None:
    with pytest.raises(UserError, match=f"{model.__name__}: items have no attribute beside 'item_id'"):
        built(data, "none", model, item_fields=["item_id"])


# Each against its equations, of one history.

HISTORY = [3, 1, 2, 2, 5]


def looked_up(model: Any) -> tuple[Tensor, Tensor]:
    """Vectors of the ids (5, D) and of the category (5, D) of HISTORY."""
    layers = model.embedding_layer.embedding_layers
    return layers["item_history"](torch.tensor(HISTORY)), layers["cate_history"](torch.ones(5, dtype=torch.int64))


def norm(x: Tensor, by: nn.Module) -> Tensor:
    return layer_norm(x, x.shape[-1:], by.weight, by.bias)


def heads(x: Tensor, count: int = 2) -> Tensor:
    """(5, D) -> (H, 5, d)."""
    return x.view(len(x), count, -1).transpose(0, 1)


def block(x: Tensor, by: Any, more: Tensor | float = 0.0, causal: bool = True) -> Tensor:
    """A transformer block with norms first; ``more``: what is added to its scores (H, 5, 5)."""
    normed = norm(x, by.layer_norm1)
    query, key, value = (heads(getattr(by.attention, name)(normed)) for name in ("query", "key", "value"))
    later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1) & causal
    logits = (query @ key.mT * query.shape[-1] ** -0.5 + more).masked_fill(later, -math.inf)
    x = x + by.attention.output((softmax(logits, -1) @ value).transpose(0, 1).flatten(1))
    return x + by.ffn[2](by.ffn[0](norm(x, by.layer_norm2)).relu())


def of_history(model: Any) -> Tensor:
    return states_of(model, batch_of([HISTORY], [1], cate=True))[0]


def test_sasrecf_is_its_equations(data: Dataset) -> None:
    model = trained(data, "naive", SASRecF)
    transformer = model.encoder.transformer
    states = model.fuse(torch.cat(looked_up(model), 1)) + transformer.pe.table[:5]
    for one in transformer.blocks:
        states = block(states, one)
    torch.testing.assert_close(of_history(model), norm(states, transformer.layer_norm))
    weight = model.embedding_layer.embedding_layers["item_id"].weight
    torch.testing.assert_close(model.vectors(), weight[model.item_ids])


def test_dif_sr_is_its_equations(data: Dataset) -> None:
    """Scores of ids, category and places are added up; values are those of the ids; nothing is added to the input."""
    model = trained(data, "native", DIFSR)
    states, category = looked_up(model)
    for one in model.encoder.transformer.blocks:
        pe = one.attention.pe
        added = torch.zeros(2, 5, 5, dtype=torch.float64)
        for source, of in ((pe.sources["1"], category), (pe.position, pe.table[:5])):
            added += heads(source.query(of)) @ heads(source.key(of)).mT * 4**-0.5
        states = block(states, one, added)
    torch.testing.assert_close(of_history(model), norm(states, model.encoder.transformer.layer_norm))


def test_attribute_predictors_of_dif_sr(data: Dataset) -> None:
    """What they add to the loss: of all items but the first, and the target, by the ids of their category."""
    model = built(data, "native", DIFSR, attribute_weight=5.0)
    model.train()
    found = model.forward(batch_of([[3, 1, 2], []], [4, 5], cate=True))["losses"]["attribute predictors"]
    states = states_of(model, batch_of([[3, 1, 2]], [4], cate=True))[0]
    probability = torch.sigmoid(model.predictors["1"](states))
    answers = model.attribute_1[model.item_numbers[torch.tensor([1, 2, 4])]]
    right = nn.functional.one_hot(answers, probability.shape[1] + 1)[:, 1:].float()
    assert right.sum() == 3
    torch.testing.assert_close(found, 5 * binary_cross_entropy(probability, right))
    assert not built(data, "native", DIFSR, attribute_weight=0.0).predictors


def test_an_item_has_an_attribute_once_or_none() -> None:
    logits = torch.tensor([[0.5, -1.0, 2.0], [1.0, 1.0, 1.0]])
    values = torch.tensor([[2, 2, 3], [0, 0, 0]])
    wanted = binary_cross_entropy(logits.sigmoid(), torch.tensor([[0.0, 1, 1], [0, 0, 0]]))
    torch.testing.assert_close(attribute_loss(logits, values), wanted)
    assert attribute_loss(logits[:0], values[:0]) == 0


def test_position_of_dif_sr_is_a_source_or_another_encoding(data: Dataset) -> None:
    """An encoding takes the place of the position source in the score of the ids; fields stay sources."""
    for pe, position, links in (("native", True, 1), ("dif", True, 1), ("none", False, 1), ("rope", False, 2)):
        first = built(data, pe, DIFSR).encoder.transformer.pe
        dif = first.encodings[0] if links == 2 else first
        assert (dif.position is not None, list(dif.sources)) == (position, ["1"])


def test_core_is_its_equations(data: Dataset) -> None:
    """A state is the mean of the items up to it, normed, by weights from the blocks; so are items; their product is
    divided by τ."""
    model = trained(data, "naive", CORE, temperature=0.1)
    transformer, items = model.encoder.transformer, torch.cat(looked_up(model), 1)
    states = items + transformer.pe.table[:5]
    for one in transformer.blocks:
        states = block(states, one)
    weights = torch.exp(model.weigh(norm(states, transformer.layer_norm)))
    means = (weights * items).cumsum(0) / weights.cumsum(0)
    torch.testing.assert_close(of_history(model), 10 * means / means.norm(dim=1, keepdim=True))
    torch.testing.assert_close(model.vectors().norm(dim=1), torch.ones(len(model.item_ids), dtype=torch.float64))
    with pytest.raises(UserError, match="CORE: item_table 'untied'"):
        built(data, "none", CORE, item_table="untied")


def test_fdsa_is_its_equations(data: Dataset) -> None:
    """Of one attribute the weight is 1."""
    model = trained(data, "naive", FDSA)
    found = []
    for encoder, states in zip((model.encoder, model.attribute_encoder), looked_up(model), strict=True):
        states = states + encoder.transformer.pe.table[:5]
        for one in encoder.transformer.blocks:
            states = block(states, one)
        found.append(norm(states, encoder.transformer.layer_norm))
    torch.testing.assert_close(of_history(model), model.join(torch.cat(found, 1)))


def test_attributes_of_fdsa_are_weighed_against_each_other(tmp_path: Path) -> None:
    items = categories().with_columns(brand=pl.col("item_id") % 4)
    data = dataset(tmp_path, events(random_histories()), items, columns={"brand": "item"})
    model = trained(data, "none", FDSA, num_blocks=1)
    fields = torch.randn(3, 2, 8, dtype=torch.float64)
    items_ = Items(torch.cat([torch.zeros(3, 8, dtype=torch.float64), fields.flatten(1)], 1))
    found: list[Tensor] = []
    model.attribute_encoder.encode = lambda mean, *_: (found.append(mean), (mean, {}))[1]
    model.states(items_, Positions.from_lengths(torch.tensor([3])))
    weights = softmax(model.weigh[2](model.weigh[0](fields).relu()), 1)
    torch.testing.assert_close(found[0], (weights * fields).sum(1))


def test_hstu_is_its_equations(data: Dataset) -> None:
    """Equations 1 to 3 with the bias by place and by time between the events."""
    model = trained(data, "native", NextItemHSTU, max_len=6)
    batch = batch_of([HISTORY], [1], cate=True)
    age = batch.histories["age_history"] = torch.tensor([90_000, 5000, 4000, 70, 3])
    states = torch.cat(looked_up(model), 1)
    offset = (torch.arange(5).unsqueeze(1) - torch.arange(5)).clamp(min=0)
    seconds = (age.unsqueeze(0) - age.unsqueeze(1)).abs()
    places, times = model.blocks[0].pe.encodings
    bucket = torch.where(seconds > 0, seconds.double().log2().floor() + 1, 0).long()
    decay = (1 + seconds.unsqueeze(-1) / 3600.0) ** -nn.functional.softplus(times.decay)
    bias = places.table[offset] + times.amount * decay + times.table[bucket]
    for one in model.blocks:
        u, v, q, k = silu(norm(states, one.layer_norm1) @ one.project.weight.T).chunk(4, 1)
        weights = silu(heads(q) @ heads(k).mT + bias.permute(2, 0, 1)).tril() / 6
        pooled = (weights @ heads(v)).transpose(0, 1).flatten(1)
        states = states + one.output(norm(pooled, one.layer_norm2) * u)
    torch.testing.assert_close(states_of(model, batch)[0], norm(states, model.layer_norm))


def test_bert4rec_asks_after_masked_items_and_the_next(data: Dataset) -> None:
    """With every item masked all rows of a length look alike, and all their items and targets are answers."""
    model = trained(data, "naive", BERT4Rec, mask_rate=1.0)
    model.train()
    asked: list[Tensor] = []
    model.loss_of = lambda states, answers: (asked.extend([states, answers]), states.sum())[1]
    model.forward(batch_of([[3, 1], [], [2, 5], [7]], [4, 1, 6, 8], cate=True))
    states, answers = asked
    assert answers.tolist() == model.item_numbers[torch.tensor([3, 1, 4, 2, 5, 6, 7, 8])].tolist()
    torch.testing.assert_close(states[:3], states[3:6])
    model.mask_rate = 0.0
    asked.clear()
    model.forward(batch_of([[3, 1], [7]], [4, 8], cate=True))
    assert asked[1].tolist() == model.item_numbers[torch.tensor([4, 8])].tolist()
    model.eval()
    torch.testing.assert_close(
        asked[0].double(), model.forward(batch_of([[3, 1], [7]], [1, 1], cate=True))["y_pred"].double()
    )


def test_bert4rec_is_its_equations(data: Dataset) -> None:
    """The mask after the history, in bidirectional blocks."""
    model = trained(data, "naive", BERT4Rec)
    transformer = model.encoder.transformer
    states = torch.cat([torch.cat(looked_up(model), 1), model.mask.unsqueeze(0)]) + transformer.pe.table[:6]
    for one in transformer.blocks:
        states = block(states, one, causal=False)
    wanted = model.project(norm(states[-1:], transformer.layer_norm))
    torch.testing.assert_close(
        model.forward(batch_of([HISTORY], [1], cate=True))["y_pred"].double(), wanted, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("encodings", [ONE_OF_A_KIND, pytest.param([*available_pes()], marks=pytest.mark.slow)])
def test_bert4rec_takes_every_encoding(data: Dataset, encodings: list[str]) -> None:
    for pe in encodings:
        model = built(data, pe, BERT4Rec)
        model.train()
        assert math.isfinite(model.train_step(batch_of([[1, 2, 3], [4]], [4, 5], cate=True)).item()), pe
        model.eval()
        assert model.forward(batch_of([[1, 2, 3], []], [4, 5], cate=True))["y_pred"].isfinite().all(), pe
