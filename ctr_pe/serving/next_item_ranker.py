"""A next-item model as an estimator: a log in a DataFrame in, the items that come next out."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import polars as pl

from ctr_pe.data.dataset import ITEM
from ctr_pe.data.logs.tables import Place
from ctr_pe.serving import tables
from ctr_pe.serving.estimator import ModelEstimator
from ctr_pe.serving.model_folder import NOT_OF_MODEL, read_model, scorer_of
from ctr_pe.serving.next_item_graph import check_count
from ctr_pe.serving.ranker import newest_events
from ctr_pe.serving.scorer import Scorer
from ctr_pe.serving.tables import AnyTable
from ctr_pe.utils.errors import UserError, nearest
from ctr_pe.utils.files import scratch_folder

log = logging.getLogger(__name__)
COLUMNS = ("user", "item", "time", "order", "label", "time_unit", "time_format", "keep")
DECIDED = NOT_OF_MODEL | {"position_encoding", "target_field", "sequence_field", "neg_seq_field", "age_field"}
"""Keys of a config that are no hyper-parameters here."""


class NextItemRanker(ModelEstimator):
    """Learns from a log of chosen items which of all items a user chooses next.

    Tables are polars, pandas or pyarrow, or the path of a parquet or CSV file. Columns are those of
    :class:`~ctr_pe.serving.ranker.CTRRanker`.

    Args:
        model: a next-item model:

            - SASRec: causal transformer blocks (Kang & McAuley 2018).
            - SASRecF: SASRec on items whose attributes are fused with the id (baseline of DIF-SR).
            - DIFSR: attributes with attention scores of their own, and predicted (Xie et al. 2022).
            - FDSA: blocks over ids, others over attributes (Zhang et al. 2019).
            - HSTU: pointwise attention with a gate (Zhai et al. 2024).
            - CORE: states are means of items, scores cosines (Hou et al. 2022).
            - BERT4Rec: bidirectional blocks that learn masked items (Sun et al. 2019).
            - GRU4Rec: GRU layers (Hidasi et al. 2016); encoding ``none`` alone.
            - Popularity: the most frequent items; encoding ``none`` alone.
        position_encoding: an encoding of ``ctr-pe list``, or several with ``+``.
        epochs: at most; the best on the validation rows is kept. None for the model's default, as for all
            hyper-parameters that are not given.
        random_state: an int for the same model every time.
        max_len: newest events kept of a history.
        protocol: ``leave-one-out``, where each user's last events are test and validation, or ``temporal``, where the
            newest of the log are.
        user, item, time, order: columns of the log. Under their default names the last two are used where a table has
            them; None leaves one alone.
        label: column, or a threshold of one such as ``rating >= 4``, of rows that were chosen; the others are left out
            and counted in ``report_``. None for all.
        attributes: columns of the items that ``item_fields`` may name; None for all that hold integers or strings.
        item_fields: what the model knows of an item: columns, the item's own included; None for its id alone, of
            SASRecF, DIFSR and FDSA for all attributes.
        time_unit, time_format, keep: as in CTRRanker.
        gpu: -1 for the CPU. threads: of training; 0 leaves torch's as they are.
        hyper_parameters: of the model and its training.

    Attributes (after ``fit`` or ``load``):
        scorer_: the trained model with its encoder.
        metrics_: of the test rows, in full ranking. history_: of the epochs. report_: of the log, from ``fit``.
        unknown_: of the last ``recommend``: ``requests``, ``unknown users``, ``unknown history items``.
    """

    def __init__(
        self,
        model: str = "SASRec",
        position_encoding: str = "rope",
        *,
        epochs: int | None = None,
        random_state: int = 0,
        max_len: int = 50,
        protocol: str = "leave-one-out",
        user: str = "user_id",
        item: str = "item_id",
        time: str | None = "timestamp",
        order: str | None = "position",
        label: str | None = "label",
        attributes: Sequence[str] | None = None,
        item_fields: Sequence[str] | None = None,
        time_unit: str = "s",
        time_format: str | None = None,
        keep: str | None = None,
        gpu: int = -1,
        threads: int = 0,
        **hyper_parameters: Any,
    ) -> None:
        self.model, self.position_encoding, self.epochs = model, position_encoding, epochs
        self.random_state, self.max_len, self.protocol = random_state, max_len, protocol
        self.user, self.item, self.time, self.order, self.label = user, item, time, order, label
        self.attributes, self.item_fields = attributes, item_fields
        self.time_unit, self.time_format, self.keep = time_unit, time_format, keep
        self.gpu, self.threads, self.hyper_parameters = gpu, threads, hyper_parameters

    def fit(self, events: AnyTable, *, items: AnyTable | None = None) -> Self:
        """Train on a log.

        Args:
            events: a row per event: user, item, time or order.
            items: a row per item: item, and its attributes.

        Raises:
            UserError: a hyper-parameter or column that cannot be used, with its name; rows that cannot be read.
        """
        from ctr_pe.data.logs.log import build
        from ctr_pe.models.sections import model_class
        from ctr_pe.training import Run, train

        params, made = self._params(), list[Scorer]()
        with scratch_folder() as folder:
            given = {"events": events, "items": items}
            files = {name: tables.as_file(of, folder, name) for name, of in given.items() if of is not None}
            try:
                recipe = self._recipe(files)
                dataset = build(recipe, folder / "log")
            except UserError as error:
                message = str(error)
                for name in files:  # what was a table in memory
                    message = message.replace(str(folder / f"{name}.parquet"), name)
                raise UserError(message) from None
            self.report_ = json.loads((dataset.path / "report.json").read_text(encoding="utf-8"))
            keep: Any = lambda *trained: made.append(scorer_of(*trained))  # noqa: E731
            model = model_class(self.model, "next-item")
            run = Run(
                model, dataset.path, self.position_encoding, self.random_state, params=params, gpu=self.gpu,
                threads=self.threads, keep=keep,
            )  # fmt: skip
            outcome = train(run)
            made[0].histories = newest_events(recipe)
        log.info("%s: test %s", self, outcome.metrics)
        return self._fitted(made[0])

    def recommend(
        self,
        users: Sequence[Any] | AnyTable | None = None,
        k: int = 10,
        filter_seen: bool = True,
        history: AnyTable | None = None,
    ) -> pl.DataFrame:
        """The ``k`` items that come next for each user, best first: user, item, score and rank from 1.

        A user without events gets the most frequent items of the training rows; equal scores are in that order.

        Args:
            users: raw ids, or a table with the column of users; None for all users of the history.
            filter_seen: leave out the items of a user's history, of which ``max_len`` events are kept.
            history: events of the users; None for those it was fitted on.

        Raises:
            UserError: a column that is missing or of another type, no history at all, k below 1, or a ``filter_seen``
                that is neither True nor False.
        """
        check_count(k)
        if filter_seen not in (True, False):
            raise UserError(f"filter_seen {filter_seen!r} is not True or False")
        scorer, name = self._scorer, self._scorer.encoder.columns.user
        events = scorer.stored if history is None else scorer.encoder.events(tables.frame(history, "history"))
        if events is None:
            raise UserError("recommend: no history: give one, or save the model with the histories of its users")
        if users is None:
            wanted = pl.DataFrame({name: events.users.sorted})
        elif hasattr(users, "dtype") or (isinstance(users, Sequence) and not isinstance(users, str)):
            wanted = tables.series(users, name, "users").to_frame()
        else:
            wanted = tables.column(tables.frame(users, "users"), name, "users").to_frame()
        encoded, names = scorer.encoder.of_users(wanted, events), scorer.encoder.columns
        self.unknown_ = dict(encoded.counts)
        found = scorer.recommend(encoded, int(k), filter_seen)
        users_ = wanted[name].gather(found.rows).alias(names.user)
        score, rank = pl.Series("score", found.scores), pl.Series("rank", found.ranks)
        return pl.DataFrame([users_, found.items.alias(names.item), score, rank])

    def export(
        self, file: str | Path, kind: str = "onnx", k: int | None = None, filter_seen: bool | None = None
    ) -> None:
        """Write the model as one file for other runtimes, with the ranking in it: histories in, the first ``k`` items
        and their scores out.

        Args:
            kind: ``onnx``, ``torch`` or ``aoti``, see ``docs/pipeline.md``.
            k: None for 10; at most all items.
            filter_seen: leave out the items of a history; None for the model's own ``filter_seen``.

        Raises UserError as :func:`ctr_pe.serving.export.export_scorer`, or for a k below 1.
        """
        from ctr_pe.serving.export import export_scorer

        export_scorer(self._scorer, kind, file, k, filter_seen)

    @classmethod
    def load(cls, folder: str | Path, gpu: int = -1) -> Self:
        """The ranker of a model folder. Raises UserError for a folder that cannot be read, or of another task."""
        scorer = read_model(folder, gpu, task="next-item")
        config, columns = scorer.config, scorer.encoder.columns
        given = {**config["params"], "gpu": gpu, "random_state": config["seed"], "max_len": config["max_len"]}
        given |= {name: getattr(columns, name) for name in COLUMNS} | config.get("log", {})
        return cls(config["model"], config["position_encoding"], **given)._fitted(scorer)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """All parameters by name, the hyper-parameters that were given too."""
        named = [name for name in inspect.signature(type(self)).parameters if name != "hyper_parameters"]
        return {name: getattr(self, name) for name in named} | self.hyper_parameters

    def _params(self) -> dict[str, Any]:
        """All hyper-parameters of a training."""
        from ctr_pe.config.yaml import next_item_params
        from ctr_pe.models.sections import check_params, model_class

        for name in self.hyper_parameters.keys() & DECIDED:
            raise UserError(f"NextItemRanker: '{name}' is not a parameter: the log and the other parameters decide it")
        given = {**self.hyper_parameters, "max_len": self.max_len}
        if self.item_fields is not None:
            fields = tables.several_names(self.item_fields)
            given["item_fields"] = (
                fields if isinstance(fields, str) else [ITEM if name == self.item else name for name in fields]
            )
        given |= {} if self.epochs is None else {"epochs": self.epochs}
        check_params(model_class(self.model, "next-item"), {**given, "position_encoding": self.position_encoding})
        params = next_item_params(self.model, "log", given)
        return {name: value for name, value in params.items() if name not in DECIDED}

    def _recipe(self, files: dict[str, Place]) -> Any:
        from ctr_pe.data.logs.recipe import NEXT_ITEM, Recipe, load_recipe

        if self.protocol not in NEXT_ITEM:
            raise UserError(f"protocol '{self.protocol}': {nearest(self.protocol, NEXT_ITEM)}")
        given = {name: getattr(self, name) for name in COLUMNS}
        # Under their default names columns may be absent.
        given = {name: value for name, value in given.items() if value != Recipe.model_fields[name].default}
        attributes, items = self.attributes, files.get("items")
        if attributes is None and items is not None:
            others = [name for name in tables.schema(items, "items") if name != self.item]
            attributes = tables.key_columns(items, others, "items")
            if left_out := sorted({*others} - {*attributes}):
                log.warning("items: not read, neither integers nor strings: %s", ", ".join(left_out))
        given |= {"interactions": files["events"], "items": items, "protocol": self.protocol, "max_len": self.max_len}
        return load_recipe(None, {**given, "attributes": tables.several_names(attributes)})
