"""Training goes on: yesterday's model and today's events."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import torch

from ctr_pe.data.dataset import ID, ITEM
from ctr_pe.data.id_map import Index
from ctr_pe.data.logs.log import never_clicked
from ctr_pe.data.requests import EncodedRequests
from ctr_pe.sequence.batch import JaggedBatch
from ctr_pe.serving.encoder import ColumnNames, Encoder
from ctr_pe.serving.scorer import Scorer
from ctr_pe.serving.tables import column, keys, labels, newest, times
from ctr_pe.serving.vocabulary_growth import with_new_items
from ctr_pe.training import fit
from ctr_pe.utils.errors import UserError, counted

if TYPE_CHECKING:
    import numpy.typing as npt

log = logging.getLogger(__name__)
OF_TRAINING = frozenset(
    "batch_size embedding_regularizer learning_rate loss max_gradient_norm net_regularizer optimizer"
    " table_optimizer".split()
)
"""Hyper-parameters that an update may have of its own: all others are the model's."""
NEW, LABEL = ":new", ":label"  # columns that no log has: made here, beside raw ones


def update(
    scorer: Scorer,
    events: pl.DataFrame,
    items: pl.DataFrame | None,
    protocol: str,
    epochs: int,
    training: Mapping[str, Any] = MappingProxyType({}),
) -> Scorer:
    """A scorer of its own that was trained further on new events; the given one stays as it is.

    Values that are new get ids at the end. A history has the stored events of its user and the new ones, strictly
    before the time of the row. Every new event is a row, in an order that depends on the seed and the number of
    earlier updates; nothing is held out. The optimiser begins anew; if it is Adam, rows of embedding tables that the
    events do not have stay as they are (``table_optimizer: lazy_adam``).

    Args:
        scorer: with ``histories``.
        protocol: ``impressions``: rows are the new events, with their labels; ``din``: the new events but a user's very
            first, each with a known item that the user has no stored or new event with.
        training: those of ``OF_TRAINING`` that have changed since the last training.

    Raises:
        UserError: a scorer without catalogue or histories; a column that is missing, has nulls or another type.
    """
    began, names = time.perf_counter(), scorer.encoder.columns
    if scorer.histories is None:
        raise UserError("new_events: this model was saved without histories, which new events go on with")
    if not events.height:
        raise UserError("new_events: no rows")
    clock = [name for name in (names.order, names.time) if name is not None and name in scorer.histories.columns]
    stored = _plain(scorer.histories, clock, names, "histories")
    new = _plain(events, clock, names, "new_events", labelled=protocol == "impressions")
    if not stored.height:
        stored = new.clear()
    for name in (names.user, names.item):
        if stored[name].dtype != new[name].dtype:
            kinds = f"holds {new[name].dtype}, in the stored histories {stored[name].dtype}"
            raise UserError(f"new_events: column '{name}' {kinds}")
    older = stored.join(new, on=[names.user, names.item, *clock], how="anti", maintain_order="left")
    if again := stored.height - older.height:
        log.warning("%s of the stored histories are among the new ones: they count once", counted(again, "event"))
    past = older.join(new, on=names.user, how="semi", maintain_order="left")
    both = pl.concat([past, new]).with_columns(pl.Series(NEW, np.arange(past.height + new.height) >= past.height))
    seed, updates = int(scorer.config["seed"]), list(scorer.config.get("updates", []))
    trained, params = bool(scorer.config["epoch"] or updates), {**scorer.config["params"], **training}
    # A new Adam moves every row with a gradient by the learning rate, also one that has only its regularisation.
    lazy = trained and not params.get("table_optimizer") and params.get("optimizer", "adam").lower() == "adam"
    found = with_new_items(scorer, both, items, trained, **params | ({"table_optimizer": "lazy_adam"} if lazy else {}))
    draw = np.random.default_rng([seed, 1 + len(updates)])
    rows = both.filter(NEW) if protocol == "impressions" else _sampled(both, clock, found.encoder, draw)
    history = found.encoder.events(both.rename({LABEL: names.label}) if names.label else both, "new_events")
    encoded = found.encoder.requests(rows.drop(LABEL), history, "new_events")
    torch.manual_seed(seed + 1 + len(updates))  # dropout
    label, size = rows[LABEL].cast(pl.Float32).to_numpy(), int(params.get("batch_size", 1024))
    batches = _TrainingRows(found.model.feature_map.labels[0], encoded, label, size, draw)
    fitted = fit(found.model, batches, epochs=epochs) if encoded.rows and epochs else None
    found.model.eval()
    chosen = pl.concat([older, new]).filter(pl.col(LABEL) == 1)
    found.histories = newest(chosen.lazy(), names.user, names.item, clock, int(scorer.config["max_len"]))
    before = {name: len(known) for name, known in scorer.encoder.vocabularies.items()}
    done = {
        "events": new.height,
        "rows": rows.height,
        "epochs": epochs,
        "loss": fitted.best.loss if fitted else None,
        "new_ids": {name: len(known) - before[name] for name, known in found.encoder.vocabularies.items()},
        "seconds": round(time.perf_counter() - began, 3),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    log.info("update: %s", done)
    found.config = {**found.config, "params": params, "updates": [*updates, done]}
    return found


def _plain(
    table: pl.DataFrame, clock: list[str], names: ColumnNames, what: str, labelled: bool = False
) -> pl.DataFrame:
    """The columns of events that are read, as integers or strings; without a label all are chosen."""
    users, items = (keys(column(table, name, what), what).alias(name) for name in (names.user, names.item))
    at = [pl.Series(name, times(column(table, name, what), names.time_unit, what)) for name in clock]
    label = labels(column(table, names.label or "label", what), what) if labelled else np.ones(table.height, bool)
    return pl.DataFrame([users, items, *at, pl.Series(LABEL, label.astype(np.int8))])


def _sampled(both: pl.DataFrame, clock: list[str], encoder: Encoder, draw: np.random.Generator) -> pl.DataFrame:
    """Rows in pairs: a new event, and the same with a known item that the user has no event with."""
    names = encoder.columns
    assert encoder.items is not None
    events = both.sort(names.user, *clock, names.item, maintain_order=True)
    items = encoder.items.filter(pl.col(ITEM + ID) != encoder.unseen(ITEM))[ITEM]
    user = events[names.user].rle_id().cast(pl.Int64).to_numpy()
    target = np.flatnonzero(events[NEW].to_numpy() & np.append(False, user[1:] == user[:-1]))
    negative = never_clicked(user, Index(items).find(events[names.item]), target, len(items), draw)
    clicked = events.gather(target)
    other = clicked.with_columns(
        items.gather(np.maximum(negative, 0)).alias(names.item), pl.lit(0, pl.Int8).alias(LABEL)
    )
    return pl.concat([clicked, other.filter(pl.Series(negative >= 0))])


class _TrainingRows:
    """Epochs of encoded rows, each in an order that ``generator`` draws; a last batch of one row joins the one before
    it."""

    def __init__(
        self, label_field: str, encoded: EncodedRequests, label: npt.NDArray[np.float32], size: int, generator: Any
    ) -> None:
        self.label_field, self.encoded, self.label, self.generator = label_field, encoded, label, generator
        self.cuts = [*range(0, encoded.rows, size), encoded.rows]
        if len(self.cuts) > 2 and size > 1 and self.cuts[-1] - self.cuts[-2] == 1:
            del self.cuts[-2]

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def __iter__(self) -> Iterator[JaggedBatch]:
        order = self.generator.permutation(self.encoded.rows)
        for first, last in pairwise(self.cuts):
            rows = order[first:last]
            batch = self.encoded.batch(rows)
            yield replace(batch, rows=batch.rows | {self.label_field: torch.from_numpy(self.label[rows])})
