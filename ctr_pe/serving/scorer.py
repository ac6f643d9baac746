"""A trained model that scores raw ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from ctr_pe.data.dataset import ID, ITEM
from ctr_pe.data.id_map import places
from ctr_pe.data.requests import EncodedRequests
from ctr_pe.data.timeline import EncodedLog
from ctr_pe.serving.encoder import Encoder
from ctr_pe.serving.request_graph import CUDAGraphs, inputs_from

if TYPE_CHECKING:
    from torch import Tensor

    from ctr_pe.sequence.batch import JaggedBatch

Scores = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
BATCH, ITEMS = 4096, 2**15  # requests, and items of their histories, scored at once
TILE, SHARED = 1024, 64  # requests scored at once with shared histories, and from how many of a history on
FEW = 8  # likewise, of requests that are there at once


class Recommended(NamedTuple):
    """Items by their raw ids, those of a request one after the other, the best first: (n,) each.

    ``rows``: of the requests; ``ranks``: from 1.
    """

    rows: Ints
    items: pl.Series
    scores: Scores
    ranks: Ints


class Scorer:
    """What :func:`~ctr_pe.serving.model_folder.read_model` gives: scores of raw users and items, without the data set.

    Attributes:
        model: in evaluation mode.
        encoder: raw ids -> ids of the model.
        config: the content of ``model.json``.
        histories: the newest events of the users it was trained on, as a raw table, or None.
        profile: what the training rows had, column by column (:mod:`ctr_pe.serving.profile`), or None.
        counts: of all calls so far: ``requests``, and what took a reserved id: ``unknown items`` (of requests),
            ``unknown history items``, ``unknown users`` (without an event in the history that was given), ``requests of
            unknown users``.
    """

    def __init__(
        self,
        model: Any,
        encoder: Encoder,
        config: Mapping[str, Any],
        histories: pl.DataFrame | None = None,
        profile: pl.DataFrame | None = None,
    ) -> None:
        self.model, self.encoder, self.config = model.eval(), encoder, config
        self.histories, self.profile = histories, profile
        self.counts: Counter[str] = Counter()

    @property
    def task(self) -> str:
        """What the model answers: ``click`` or ``next-item``."""
        task: str = self.config.get("task", "click")
        return task

    @cached_property
    def stored(self) -> EncodedLog | None:
        """The encoded ``histories``."""
        return None if self.histories is None else self.encoder.events(self.histories, "histories.parquet")

    def score_requests(self, history: pl.DataFrame | None, requests: pl.DataFrame) -> Scores:
        """Click probabilities (n,) of ``requests``, in their order.

        Args:
            history: events with user, item and time; None for the histories of the model folder.
            requests: user and item, and a time if it should not be that of the newest event. A request sees the
                events of its user strictly before its time.

        Raises:
            UserError: a column that is missing, has nulls or another type; no history at all.
        """
        events = self.stored if history is None else self.encoder.events(history)
        return self.score(self.encoder.requests(requests, events))

    def score_one(
        self,
        history: Sequence[Any],
        candidates: Sequence[Any],
        times: Sequence[int] | None = None,
        now: int | None = None,
        **fields: Any,
    ) -> Scores:
        """Click probabilities (K,) of one user's candidates.

        Args:
            history: raw ids of the items the user chose, oldest first.
            candidates: K raw item ids.
            times: of the history, in the unit of the log; only encodings by time need them.
            now: of the request, by default the newest of ``times``. All of the history is seen.
            fields: ``user``, ``context`` and ``history_context`` of :meth:`~ctr_pe.serving.encoder.Encoder.one`.

        Raises:
            UserError: the model needs times or further columns, or there are not as many times as items.
        """
        return self.score(self.encoder.one(history, candidates, times, now, **fields))

    def score_together(self, parts: Sequence[EncodedRequests]) -> list[Scores]:
        """Click probabilities of each of several encoded requests of :meth:`~ctr_pe.serving.encoder.Encoder.one`, with
        what computing them together saves."""
        scores = self.score(EncodedRequests.joined(parts), shared=FEW)
        return np.split(scores, np.cumsum([part.rows for part in parts])[:-1])

    @torch.inference_mode()
    def score(self, encoded: EncodedRequests, batch_size: int = BATCH, shared: int | None = None) -> Scores:
        """Click probabilities (n,) of encoded requests; adds to ``counts``. A history that ``shared`` of them see,
        ``SHARED`` by default, is encoded once."""
        scores = np.empty(encoded.rows, np.float32)
        tiles, alone = encoded.tiles(self.encoder.needs_age, TILE, shared or SHARED)
        for rows in (*tiles, *(some[:, None] for some in encoded.batches(alone, batch_size, ITEMS))):
            histories = encoded.histories(rows[:, 0])
            scores[rows] = self._score(histories, encoded.fields(rows)).float().cpu().numpy()
        self.counts.update(encoded.counts)
        return scores

    @cached_property
    def item_vectors(self) -> Tensor:
        """(V, D), what a next-item model compares states with."""
        with torch.inference_mode():
            vectors: Tensor = self.model.vectors()
        return vectors

    @cached_property
    def raw_items(self) -> pl.Series:
        """(V,) the raw id of each item of a next-item model."""
        items, ids = self.encoder.items, self.model.item_ids.cpu().numpy()
        assert items is not None
        return items[ITEM].gather(places(items[ITEM + ID].to_numpy(), int(ids.max(initial=0)) + 1)[ids])

    def recommend(self, encoded: EncodedRequests, k: int, filter_seen: bool) -> Recommended:
        """The first ``k`` items of a next-item model after the history of each request, with or without its items."""
        found, scores = [np.zeros((3, 0), np.int64)], [np.zeros(0, np.float32)]
        for rows in encoded.batches(np.arange(encoded.rows), BATCH, ITEMS):
            ranking = self.model.recommend(encoded.histories(rows), self.item_vectors, k, filter_seen)
            first, best = ranking.first.cpu().numpy(), ranking.scores.float().cpu().numpy()
            row, place = np.nonzero(first >= 0)
            found.append(np.stack([rows[row], first[row, place], place + 1]))
            scores.append(best[row, place])
        owners, numbers, ranks = np.concatenate(found, 1)
        return Recommended(owners, self.raw_items.gather(numbers), np.concatenate(scores), ranks)

    def _score(self, histories: JaggedBatch, others: Mapping[str, Tensor]) -> Tensor:
        """(H, K): scores of K targets of each of H histories; ``others``: fields (H, K)."""
        if self.cuda_graphs is not None:
            given = inputs_from(self.model, histories, others)
            if self.cuda_graphs.takes(given):
                return self.cuda_graphs(given)
        if next(iter(others.values())).shape[1] == 1:
            rows = {name: values.squeeze(1) for name, values in others.items()}
            return self.probabilities(replace(histories, rows=rows)).unsqueeze(1)
        pooled = {name: histories[name] for name in self.model.other_fields if name in histories}
        found: Tensor = self.model.score_candidates(self.model.encode(histories), {**pooled, **others})
        return found

    @cached_property
    def cuda_graphs(self) -> CUDAGraphs | None:
        """CUDA graphs of small requests; None on a CPU."""
        return CUDAGraphs(self.model) if self.model.device.type == "cuda" else None

    @torch.inference_mode()
    def probabilities(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Click probabilities (B,) of a batch, such as a BatchLoader gives."""
        scores: Tensor = self.model.forward(batch)["y_pred"].view(-1)
        return scores
