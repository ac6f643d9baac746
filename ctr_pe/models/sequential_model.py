"""What next-item models share on FuxiCTR: items of a catalogue, losses over them, full ranking.

A history of n items and the target after it are n questions in training: which item comes after each? In evaluation
one: which comes after the newest?

B rows, N real items of the batch, V items of the catalogue, D item dim, P questions that have an answer, K places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ctr_pe.config.field_groups import FIELD_KEYS, nested_fields
from ctr_pe.config.schema import Chance, Width
from ctr_pe.evaluation.ranking import NEXT_ITEM_METRICS, list_lengths, parts_of, ranking_metrics
from ctr_pe.fuxictr import padded
from ctr_pe.fuxictr.embeddings import look_up
from ctr_pe.fuxictr.feature_specs import unseen_id
from ctr_pe.models.batch_plan import FilledHistories, Histories
from ctr_pe.models.full_ranking import Ranking, rank_items
from ctr_pe.models.groups import SizedGroup
from ctr_pe.models.history_model import HistoryModel
from ctr_pe.models.item_losses import (
    ItemLoss,
    Negatives,
    binary_loss,
    draw_items,
    gbce_beta,
    sampled_softmax_loss,
    sampling_weights,
    softmax_loss,
)
from ctr_pe.pe import available_pes, build_pe
from ctr_pe.pe.base import Losses, PositionEncoding
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.units.causality import keeps_causality
from ctr_pe.utils import distributed
from ctr_pe.utils.errors import UserError, nearest
from ctr_pe.utils.random_generators import RandomGenerators

COUNTED_FROM_THE_OLDEST = {"position_index": "rank", "kernel_anchor": "start"}
"""Options of encodings with which a state does not depend on how many items follow."""


class Measured(NamedTuple):
    """``metrics`` by name, ``ranks`` (n,) float32 of the rows' answers, and ``counts``: rows, those whose answer no
    training row has, and those with an empty history."""

    metrics: dict[str, float]
    ranks: npt.NDArray[np.float32]
    counts: Counter[str]


class SequentialModel(HistoryModel):
    """A model that ranks all items by what a history says about the next one.

    A subclass builds its units (``build_stack``), calls :meth:`build_items` last, and defines :meth:`states`. Data are
    those of ``ctr-pe data build --protocol leave-one-out`` or ``temporal``: of each item the catalogue has the fields
    that histories have (:meth:`set_catalogue`). Items that no training row has are not ranked.

    Args:
        feature_map: FuxiCTR's.
        item_fields: of those that the data have for an item, the id first; None for all of them.
        item_loss: ``softmax`` over all items, ``sampled_softmax``, ``gbce`` or ``binary``
            (:mod:`ctr_pe.models.item_losses`).
        num_negatives: drawn items: of sampled_softmax for a batch, of gbce and binary for each state.
        negatives: how they are drawn: ``uniform``, or by ``popularity`` in the training rows.
        gbce_calibration: t of gBCE.
        item_table: ``tied``, an item is predicted by the vector that it has in histories, or ``untied``, by another.
        filter_seen: whether items of the history are left out of a ranking, except the answer. The authors of DIF-SR
            and EulerFormer keep them (RecBole, for sequences).
        kwargs: the keys of :class:`~ctr_pe.models.history_model.HistoryModel`. Encodings count places from the oldest
            item, unless their own keys say otherwise.

    Raises:
        UserError: as HistoryModel; several histories, an encoding that does not keep causality.
    """

    solves = "next-item"
    """What its data sets ask (:class:`~ctr_pe.data.dataset.Dataset`)."""
    other_fields: tuple[str, ...] = ()
    """None: a next-item model reads histories alone."""
    causal = True
    """Whether the state at an item must not depend on later ones."""
    predicts_by_id = False
    """Whether states are compared with the vectors of the items' ids alone, whatever else histories have of them."""

    def __init__(
        self,
        feature_map: Any,
        model_id: str = "SequentialModel",
        item_fields: list[str] | None = None,
        item_loss: ItemLoss = "softmax",
        num_negatives: Width = 256,
        negatives: Negatives = "uniform",
        gbce_calibration: Chance = 0.75,
        item_table: str = "tied",
        filter_seen: bool = False,
        **kwargs: Any,
    ) -> None:
        if distributed.processes() > 1:
            raise UserError(f"{self.registered_name}: next-item models train in one process")
        if kwargs.get("class_weight") is not None:
            raise UserError(
                f"{self.registered_name}: class_weight: a next-item model has no labels to weigh: leave it out"
            )
        if item_table not in ("tied", "untied"):
            raise UserError(f"item_table '{item_table}' is unknown: {nearest(item_table, ('tied', 'untied'))}")
        kwargs |= self._chosen_fields(kwargs, item_fields)
        kwargs.setdefault("metrics", [*NEXT_ITEM_METRICS])
        kwargs.setdefault("monitor", "NDCG@10")
        super().__init__(feature_map, model_id, **kwargs)
        if len(self.groups) != 1:
            raise UserError(f"{self.registered_name}: one history, the data have {len(self.groups)}")
        self.encoding_options = {**COUNTED_FROM_THE_OLDEST, **self.encoding_options}
        self.item_loss, self.num_negatives, self.negatives = item_loss, num_negatives, negatives
        self.gbce_calibration, self.tied, self.filter_seen = gbce_calibration, item_table == "tied", filter_seen
        self.generators = RandomGenerators(torch.initial_seed())
        spec = self.feature_map.features[self.group.target[0]]
        ids = torch.arange(1, int(spec["vocab_size"]))
        ids = ids[ids != unseen_id(spec)]
        numbers = torch.full((int(spec["vocab_size"]),), -1).index_copy(0, ids, torch.arange(len(ids)))
        self.register_buffer("item_ids", ids, persistent=False)
        self.register_buffer("item_numbers", numbers, persistent=False)
        self.register_buffer("frequency", torch.zeros(len(ids)))
        for index, field in enumerate(self.group.target[1:], 1):
            several = self.feature_map.features[field].get("values")
            shape = (len(ids), several) if several else (len(ids),)
            self.register_buffer(f"attribute_{index}", torch.zeros(shape, dtype=torch.int64))

    item_ids: Tensor
    item_numbers: Tensor
    frequency: Tensor

    @staticmethod
    def _chosen_fields(given: Mapping[str, Any], chosen: list[str] | None) -> dict[str, Any]:
        """The field groups with the ``chosen`` fields alone."""
        if chosen is None or not all(given.get(key) for key in FIELD_KEYS[:2]):
            return {}
        [target], [history] = (nested_fields(key, given[key]) for key in FIELD_KEYS[:2])
        for name in chosen:
            if name not in target:
                raise UserError(f"item_fields: items have no '{name}': {nearest(name, target)}")
        if target[0] not in chosen:
            raise UserError(f"item_fields: the item's id '{target[0]}' is missing")
        kept = [pair for pair in zip(target, history, strict=True) if pair[0] in chosen]
        return {key: [list(names)] for key, names in zip(FIELD_KEYS[:2], zip(*kept, strict=True), strict=True)}

    @property
    def group(self) -> SizedGroup:
        """The fields of items."""
        return self.groups[0]

    @property
    def predicting_fields(self) -> tuple[str, ...]:
        """The fields of an item whose vectors states are compared with."""
        return self.group.target[:1] if self.predicts_by_id else self.group.target

    @property
    def item_dim(self) -> int:
        """Width of those vectors, side by side."""
        return sum(self.group.dims[: len(self.predicting_fields)])

    def check_metric(self, name: str) -> None:
        parts_of(name)

    def check_attributes(self) -> None:
        """Raises UserError if items have an id and nothing else."""
        if len(self.group.target) == 1:
            where = "the data set has none (items), or item_fields leaves them out"
            raise UserError(f"{self.registered_name}: items have no attribute beside '{self.group.target[0]}': {where}")

    def build_stack(
        self, group: SizedGroup, layers: int, num_heads: int = 1, extra_slots: int = 0, dim: int | None = None
    ) -> list[PositionEncoding]:
        """The encodings of ``layers`` self-attentions over a history, one above the other, of width ``dim``, by default
        the items'.

        Raises UserError as ``build_encoding``, and for an encoding that does not keep causality.
        """
        width = group.dim if dim is None else dim
        first = self.build_encoding(group, width, num_heads, extra_slots)
        if self.causal and not keeps_causality(first, group.dim):
            raise UserError(
                f"{self.registered_name}: position encoding '{group.encoding}' does not keep causality: the state at "
                f"an item changes with the items after it: {nearest(group.encoding, _causal_encodings())}"
            )
        return [
            first,
            *(self.build_encoding(group, width, num_heads, extra_slots, first) for _ in range(layers - 1)),
        ]

    def build_items(self, dim: int) -> None:
        """The vectors by which states (..., ``dim``) predict items; then optimiser, initial weights and device."""
        if self.tied and dim != self.item_dim:
            wide = f"states of width {dim}, items of width {self.item_dim}"
            raise UserError(f"{self.registered_name}: {wide}: they cannot be tied: item_table='untied'")
        self.output_table = None if self.tied else nn.Embedding(len(self.item_ids), dim)
        if self.output_table is not None:
            nn.init.normal_(self.output_table.weight, std=dim**-0.5)
        self.finish()

    def set_catalogue(self, attributes: Mapping[str, Tensor], frequency: Tensor) -> None:
        """The ids of the items' fields, (V,) or (V, M) by field, and how often each is an answer in training (V,), in
        the order of ``item_ids``."""
        self.frequency.copy_(frequency)
        for index, field in enumerate(self.group.target[1:], 1):
            self.get_buffer(f"attribute_{index}").copy_(attributes[field])

    # What a model defines.

    def states(self, items: Items, positions: Positions) -> tuple[Tensor, Losses]:
        """Packed history (N, D) as looked up -> what comes after each of its items (N, any width), and in training what
        else is to be minimised, by name."""
        raise TypeError(f"{type(self).__name__} does not define states()")

    def questions(self, items: Items, positions: Positions, following: Tensor) -> tuple[Tensor, Tensor, Losses]:
        """In training: states (P, any) and the numbers (P,) of the items that they are to predict, -1 for none.

        ``following`` (N,): of the item after each of the history's.
        """
        states, losses = self.states(items, positions)
        return states, following, losses

    def newest_states(self, items: Items, positions: Positions) -> Tensor:
        """In evaluation: what comes after the history (B, any); zeros for an empty one, which ranks items as if all
        were equal: the most frequent first."""
        return positions.newest_of(self.states(items, positions)[0])

    def item_vectors(self, embedded: Mapping[str, Tensor]) -> Tensor:
        """Fields of items as looked up -> the vectors (..., D) that states are compared with, where they are tied."""
        return torch.cat([embedded[field] for field in self.predicting_fields], -1)

    # A batch.

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """A JaggedBatch -> in training {"loss", "penalties", "losses"}, in evaluation {"y_pred": states (B, any)}."""
        plan = self.planned(inputs).plan
        (history,) = plan.histories
        if not self.training:
            return {"y_pred": self.states_after(history)}
        ids = {field: history.ids[field] for field in self.group.history}
        target = plan.fields[self.group.target[0]]
        following = self.item_numbers[_following(ids[self.group.history[0]], target, history.positions)]
        embedded, penalties = self.look_up(ids)
        with self.precision():
            items = self._items(history, embedded)
            states, answers, losses = self.questions(items, history.positions, following)
        known = answers >= 0
        if not bool(known.all()):
            states, answers = states[known], answers[known]
        return {"loss": self.loss_of(states.float(), answers), "penalties": penalties, "losses": losses}

    def states_after(self, history: Histories | FilledHistories) -> Tensor:
        """In evaluation: what comes after each of the histories (B, any), in float32."""
        embedded, _ = self.look_up({field: history.ids[field] for field in self.group.history})
        with self.precision():
            return self.newest_states(self._items(history, embedded), history.positions).float()

    def loss_of(self, states: Tensor, answers: Tensor) -> Tensor:
        """states (P, any), the numbers (P,) of the items that follow -> the mean ``item_loss``, 0 without any."""
        if not len(answers):
            return states.sum()
        if self.item_loss == "softmax":
            return softmax_loss(states, self.vectors(), answers)
        weights, items = sampling_weights(self.negatives, self.frequency), len(self.item_ids)
        shared = self.item_loss == "sampled_softmax"
        shape = (self.num_negatives,) if shared else (len(answers), self.num_negatives)
        drawn = draw_items(shape, items, weights, self.generators.next()).to(states.device)
        if shared:
            return sampled_softmax_loss(states, self.vectors, answers, drawn, weights, items)
        calibration = self.gbce_calibration if self.item_loss == "gbce" else 0.0
        return binary_loss(states, self.vectors, answers, drawn, gbce_beta(self.num_negatives, items, calibration))

    def vectors(self, numbers: Tensor | None = None) -> Tensor:
        """Numbers of items, any shape -> the vectors (..., any) that states are compared with; by default of all."""
        if self.output_table is not None:
            weight = self.output_table.weight
            return weight if numbers is None else nn.functional.embedding(numbers, weight)
        first, *others = self.predicting_fields
        ids = {first: self.item_ids}
        ids |= {field: self.get_buffer(f"attribute_{index}") for index, field in enumerate(others, 1)}
        wanted = {field: of if numbers is None else of[numbers] for field, of in ids.items()}
        return self.item_vectors(look_up(self.embedding_layer, wanted)[0])

    def _items(self, history: Histories | FilledHistories, embedded: Mapping[str, Tensor]) -> Items:
        """A history as looked up; in training all its items are chosen."""
        vectors = torch.cat([embedded[field] for field in self.group.history], -1)
        chosen = torch.ones(len(vectors), dtype=torch.bool, device=vectors.device) if self.training else None
        ids = tuple(history.ids[field] for field in self.group.history)
        return Items(vectors, ids, chosen, history.all_ids)

    def add_loss(self, return_dict: Mapping[str, Any], y_true: Tensor) -> Tensor:
        losses: Mapping[str, Tensor] = return_dict["losses"]
        self.auxiliary_parts = {name: part.detach() for name, part in losses.items()}
        loss: Tensor = return_dict["loss"]
        return sum(losses.values(), loss)

    # Evaluation.

    @torch.inference_mode()
    def recommend(self, batch: Mapping[str, Tensor], vectors: Tensor, count: int, filter_seen: bool) -> Ranking:
        """The first ``count`` items, of vectors (V, any), after each history, with or without its own items."""
        states: Tensor = self.forward(batch)["y_pred"]
        return rank_items(states, vectors, None, self.seen(batch) if filter_seen else None, count)

    @torch.inference_mode()
    def rank(self, batch: Mapping[str, Tensor], vectors: Tensor, count: int = 0) -> Ranking:
        """Rank all items, of vectors (V, any), for each row: its target's rank, and the first ``count`` items."""
        states: Tensor = self.forward(batch)["y_pred"]
        target = batch[self.group.target[0]].to(states.device)
        seen = self.seen(batch) if self.filter_seen else None
        return rank_items(states, vectors, self.item_numbers[target], seen, count)

    def seen(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Row and number of the items in the histories of a batch, as far back as it has them."""
        field = self.group.history[0]
        lengths, values = padded.history(batch, [field])
        rows = torch.arange(len(lengths)).repeat_interleave(lengths.cpu()).to(self.device)
        numbers = self.item_numbers[values[field].to(self.device)]
        return rows[numbers >= 0], numbers[numbers >= 0]

    @torch.inference_mode()
    def measure(self, batches: Iterable[Mapping[str, Tensor]], names: Iterable[str]) -> Measured:
        """The metrics of these names over all rows; NaN where scores are not finite.

        Raises UserError for an unknown metric, or if there are no rows.
        """
        self.eval()
        names = list(names)
        places, vectors = list_lengths(names), self.vectors()
        covered = {k: torch.zeros(len(vectors), dtype=torch.bool, device=vectors.device) for k in places}
        ranks, counts = [], Counter[str]()
        for batch in batches:
            found = self.rank(batch, vectors, max(places, default=0))
            for k, items in covered.items():
                first = found.first[:, :k].flatten()
                items[first[first >= 0]] = True
            ranks.append(found.ranks.float().cpu().numpy())
            lengths, _ = padded.history(batch, [self.group.history[0]])
            counts["empty histories"] += int((lengths == 0).sum())
        every = np.concatenate(ranks) if ranks else np.zeros(0, np.float32)
        counts |= {"rows": len(every), "answers without a training row": int(np.isinf(every).sum())}
        coverage = {k: float(items.double().mean()) for k, items in covered.items()}
        return Measured(ranking_metrics(every, names, coverage), every, counts)

    def evaluate(self, data_generator: Any, metrics: Iterable[str] | None = None) -> dict[str, float]:
        return self.measure(data_generator, metrics or self.validation_metrics).metrics


def _following(items: Tensor, target: Tensor, positions: Positions) -> Tensor:
    """items (N,) and targets (B,) -> (N,): what comes after each item."""
    both = positions.append(items, target)
    return both[torch.arange(len(items), device=both.device) + positions.item_rows + 1]


def _causal_encodings() -> list[str]:
    """The built-in and installed encodings that keep causality."""
    built = {name: build_pe(name, 8, 6, 2, **COUNTED_FROM_THE_OLDEST) for name in available_pes()}
    return [name for name, pe in built.items() if keeps_causality(pe)]
