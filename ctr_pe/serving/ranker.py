"""A ranking model as a scikit-learn estimator: a log in a DataFrame in, ranked candidates out."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from ctr_pe.config.columns import declared
from ctr_pe.data.dataset import WEIGHT
from ctr_pe.data.logs.labels import check_label, label_column, threshold
from ctr_pe.data.logs.roles import ask_label, id_column, label_like, order_column, times
from ctr_pe.data.logs.tables import Place
from ctr_pe.serving import tables
from ctr_pe.serving.encoder import MISSING
from ctr_pe.serving.estimator import ModelEstimator
from ctr_pe.serving.model_folder import NOT_OF_MODEL, read_model, scorer_of
from ctr_pe.serving.scorer import Scorer
from ctr_pe.serving.tables import AnyTable
from ctr_pe.utils.errors import UserError, counted, option
from ctr_pe.utils.files import scratch_folder

if TYPE_CHECKING:
    from sklearn.utils import Tags

    from ctr_pe.data.logs.recipe import Recipe
    from ctr_pe.data.timeline import EncodedLog

log = logging.getLogger(__name__)
COLUMNS = ("user", "item", "time", "order", "label", "weight", "time_unit", "time_format", "keep", "behaviours")
RULES = ("strict", "valid_fraction", "test_fraction")
DECIDED = NOT_OF_MODEL | {"position_encoding", "target_field", "sequence_field", "neg_seq_field", "age_field"}
"""Keys of a config that are no hyper-parameters here."""


class CTRRanker(ModelEstimator):
    """Learns from a log of events which items users click, and ranks candidates by it.

    Follows scikit-learn's conventions without importing it. Tables are polars, pandas or pyarrow, or the path of a
    parquet or CSV file, which is read lazily. Unknown items and users take their reserved id and are counted, see
    ``unknown_``.

    Args:
        model: a name of ``ctr-pe list``.
        position_encoding: an encoding of ``ctr-pe list``, or several with ``+``; or a list, one per history.
        epochs: at most; the best on the validation rows is kept. None for the model's default, as for all
            hyper-parameters that are not given.
        random_state: an int for the same model every time; a RandomState or None for another one.
        max_len: newest events kept of a history.
        protocol: ``impressions`` if every row was shown and the label says whether it was chosen; ``din`` if all rows
            were chosen, the other items being sampled. None decides by whether the log has a label column.
        user, item, time, order, label: columns of the log and of all other tables; ``label`` also a threshold of one of
            numbers, such as ``rating >= 4``. Under their default names the last three are used where a table has them,
            as by ``ctr-pe data build``; None leaves one alone, and of the label says that all rows were chosen.
            ``order`` decides what is earlier; without it ``time`` does, and events of the same time do not see each
            other.
        weight: column of the log with each row's weight in the loss, 0 or more; of clicks alone, the weight of the
            pair that a click makes with a sampled item.
        attributes: columns of the items that the model reads; None for all that hold integers or strings.
        columns: what else it reads of events, items and users: column -> words such as ``"event"`` or ``"event,
            numeric"``, or a mapping of the keys of :class:`~ctr_pe.config.columns.DeclaredColumn`.
        tune: before training, try so many settings of learning rate, regularisation and dropout on the validation rows
            in short trainings (:mod:`ctr_pe.study.halving`); ``quick`` for 6.
        behaviours: ``{"action": ["click", "cart", "buy"]}``: each value of that column of the log has a history of its
            own, with an encoding of its own if ``position_encoding`` is a list; targets are events of the first value.
        time_unit: ``s``, ``ms``, ``us`` or ``ns``, of times that are numbers.
        time_format: of times that are texts, such as ``%d/%m/%Y``; None for ISO 8601.
        keep: which rows of one event (same user, item, time and order) count: ``first``, ``last`` or ``all`` of them,
            in the order of the table; None for an error.
        strict: missing values of attributes and declared columns are an error; else they are counted in ``report_``.
        valid_fraction, test_fraction: of the rows of ``impressions``: the newest are test rows, those before validation
            rows.
        gpu: -1 for the CPU.
        threads: of training; 0 leaves torch's as they are.
        hyper_parameters: of the model and its training, under FuxiCTR's names.

    Attributes (after ``fit`` or ``load``):
        scorer_: the trained :class:`~ctr_pe.serving.scorer.Scorer`.
        classes_: (2,) 0 and 1, the columns of ``predict_proba``.
        metrics_: of the test rows, each user's last event (``din``) or the newest rows (``impressions``).
        history_: of the epochs: loss, validation metrics, seconds.
        tuned_: the settings that ``tune`` chose.
        report_: of the log: rows, what was dropped, users, items, rows per split; of models from ``fit``.
        updates_: of every ``partial_fit``: events, rows, loss, new ids, seconds.
        unknown_: of the last call: ``requests``, ``unknown items``, ``unknown history items``, ``unknown users``,
            ``missing values of`` each declared column of events and users, times without the zone that
            those of the log had.
    """

    def __init__(
        self,
        model: str = "DIN",
        position_encoding: str | Sequence[str] = "cape",
        *,
        epochs: int | None = None,
        random_state: Any = 0,
        max_len: int = 100,
        protocol: str | None = None,
        user: str = "user_id",
        item: str = "item_id",
        time: str | None = "timestamp",
        order: str | None = "position",
        label: str | None = "label",
        weight: str | None = None,
        attributes: Sequence[str] | None = None,
        columns: Mapping[str, Any] | None = None,
        behaviours: Mapping[str, Any] | None = None,
        tune: int | str | None = None,
        time_unit: str = "s",
        time_format: str | None = None,
        keep: str | None = None,
        strict: bool = False,
        valid_fraction: float = 0.1,
        test_fraction: float = 0.1,
        gpu: int = -1,
        threads: int = 0,
        **hyper_parameters: Any,
    ) -> None:
        self.model = model
        self.position_encoding = position_encoding
        self.epochs = epochs
        self.random_state = random_state
        self.max_len = max_len
        self.protocol = protocol
        self.user = user
        self.item = item
        self.time = time
        self.order = order
        self.label = label
        self.weight = weight
        self.attributes = attributes
        self.columns = columns
        self.behaviours = behaviours
        self.tune = tune
        self.time_unit = time_unit
        self.time_format = time_format
        self.keep = keep
        self.strict = strict
        self.valid_fraction = valid_fraction
        self.test_fraction = test_fraction
        self.gpu = gpu
        self.threads = threads
        for name, value in hyper_parameters.items():
            setattr(self, name, value)

    def fit(
        self,
        events: AnyTable,
        y: Any = None,
        *,
        items: AnyTable | None = None,
        users: AnyTable | None = None,
        sample_weight: Any = None,
    ) -> Self:
        """Train on a log.

        Args:
            events: a row per event: user, item, time or order, and the label where there is one.
            y: (n,) labels of the events, in place of the column of labels.
            items: a row per item, those of the log and others that may be ranked later: item, and its attributes.
            users: a row per user, with the columns that are declared of users; without it the log has them.

            sample_weight: (n,) weights of the events in the loss, in place of the column of weights.

        Raises:
            UserError: a hyper-parameter or column that cannot be used, with its name; rows that cannot be read.
        """
        from ctr_pe.data.dataset import LABEL, USER
        from ctr_pe.data.logs.log import build
        from ctr_pe.study.halving import budget, search
        from ctr_pe.training import Run, train
        from ctr_pe.training.source import not_comparable

        params, seed, tried = self._params(), self._seed(), budget(self.tune)
        label = self.label if y is None else self.label or "label"
        made: list[Scorer] = []
        with scratch_folder() as folder:
            weighted, weight = _with_weights(_with_labels(events, y, label, "events"), sample_weight, "events")
            files = self._files(weighted, items, users, folder)
            try:
                recipe = self._recipe(files, label, weight or self.weight)
                dataset = build(recipe, folder / "log")
            except UserError as error:
                message = str(error)
                for name in files:  # what was a table in memory
                    message = message.replace(str(folder / f"{name}.parquet"), name)
                raise UserError(message) from None
            if problem := "gAUC" in params.get("monitor", "") and not_comparable(
                str(dataset.split("valid")), LABEL, USER
            ):
                if "monitor" in self.get_params():
                    raise UserError(f"monitor gAUC: validation rows: {problem}: choose the epoch by AUC, monitor='AUC'")
                log.warning("validation rows: %s: the best epoch is that of AUC, not of gAUC", problem)
                params["monitor"] = "AUC"
            self.report_ = json.loads((dataset.path / "report.json").read_text(encoding="utf-8"))
            if others := self.report_["unlisted_behaviours"]:
                some = ", ".join(f"{text}: {count:,}" for text, count in others.items())
                log.warning("events: behaviours that are not listed are in no history: %s rows", some)
            for table, word in (("events", "event"), ("users", "user")):
                if unread := self.report_["unread"][word]:
                    how = f"columns={{'{unread[0]}': '{word}'}} reads one"
                    log.info("%s: not read: %s (%s)", table, ", ".join(unread), how)
            gpu, threads = _plain(self.gpu), _plain(self.threads)
            run = Run(self.model, dataset.path, self.position_encoding, seed, "heldout", params, gpu, threads)
            self.tuned_ = search(run, tried) if tried else {}
            keep: Any = lambda *trained: made.append(scorer_of(*trained))  # noqa: E731
            outcome = train(replace(run, params={**params, **self.tuned_}, keep=keep))
            made[0].histories = newest_events(recipe)
        made[0].encoder.columns = replace(made[0].encoder.columns, weight=self.weight)
        log.info("%s: test %s", self, outcome.metrics)
        return self._fitted(made[0])

    def partial_fit(
        self,
        new_events: AnyTable,
        y: Any = None,
        *,
        items: AnyTable | None = None,
        users: AnyTable | None = None,
        epochs: int = 1,
        sample_weight: Any = None,
    ) -> Self:
        """Train further on new events, ``epochs`` times on each: the daily update.

        Users, items and attributes that are new get ids, all others keep theirs. Histories have the newest stored
        events of their users and the new ones. Nothing is held out: ``evaluate`` on the new events before is how good
        yesterday's model is today. ``metrics_`` and ``history_`` stay those of ``fit``; ``updates_`` grows by one.

        Of hyper-parameters that were set since the last training, those of training count, such as ``learning_rate``.

        Before ``fit``, it trains a new model on all events, without validation and test rows.

        Args:
            new_events, y, sample_weight: as in ``fit``, those since the last call alone; they are read into memory.
            items: new items, or known ones whose attributes have changed; a new item without a row here has reserved
                ids for its attributes.
            users: likewise of users, where the model has a table of them.

        Raises:
            UserError: as ``fit``; a model that was saved without histories or is of no log.
        """
        from ctr_pe.serving.update import OF_TRAINING, update

        epochs = _count("epochs", epochs, "how often to train on the new events")
        label = self.label if y is None else self.label or "label"
        weighted, weight = _with_weights(_with_labels(new_events, y, label, "new_events"), sample_weight, "new_events")
        new, weight = tables.frame(weighted, "new_events"), weight or self.weight
        changed = None if items is None else tables.frame(items, "items")
        owners = None if users is None else tables.frame(users, "users")
        before = self.scorer_ if hasattr(self, "scorer_") else self._cold_start(new, items, users, label, weight)
        labelled = label is not None and label_column(label, new.columns) in new.columns
        if label is not None and not labelled:
            read = [*before.encoder.reads(new.columns), weight]
            ask_label("new_events", label_like(new.lazy(), [name for name in new.columns if name not in read]))
        protocol = self.protocol or ("impressions" if labelled else "din")
        if protocol == "din" and labelled:
            new = new.filter(tables.labels(new, str(label), "new_events"))
        if self.threads:
            torch.set_num_threads(self.threads)
        training = {name: value for name, value in self._params().items() if name in OF_TRAINING}
        return self._fitted(update(before, new, changed, protocol, epochs, training, owners, weight))

    def predict_proba(self, requests: AnyTable, history: AnyTable | None = None) -> npt.NDArray[np.float64]:
        """(n, 2) probabilities that the user passes the item over, and clicks it.

        Args:
            requests: user, item, and a time if the request should not see all of the history.
            history: events of the users; None for the newest ones of those it was fitted on.

        Raises:
            UserError: a column that is missing or of another type, or no history at all.
        """
        clicked = self._scores(requests, self._events(history)).astype(np.float64)
        return np.stack([1 - clicked, clicked], axis=1)

    def rank(self, history: AnyTable | None, candidates: AnyTable, k: int = 10) -> pl.DataFrame:
        """The ``k`` best candidates of every user, best first: user, item, score and rank from 1.

        Users are in the order of their first candidate; with a column of times every user and time is ranked alone.

        Args:
            history: events of the users; None for the newest ones of those it was fitted on.
            candidates: a row per user and item, in any order.

        Raises:
            UserError: as ``predict_proba``.
        """
        k = _count("k", k, "the number of items to keep")
        table, names = tables.frame(candidates, "candidates"), self._scorer.encoder.columns
        events = self._events(history)
        clock = (names.time, names.order if events is not None and events.ordered else None)
        request = [names.user, *(name for name in clock if name in table.columns)]
        if same := {"score", "rank"} & {*request, names.item}:
            raise UserError(f"candidates: a ranking has a column '{min(same)}' of its own: rename it in all tables")
        row = " ".join([*request, names.item])  # a name that none of them has
        scores = pl.Series("score", self._scores(table, events, "candidates"))
        ranked = table.select(*request, names.item).with_columns(scores, pl.int_range(pl.len()).alias(row))
        ranked = ranked.with_columns(
            pl.col(row).min().over(request), rank=pl.col("score").rank("ordinal", descending=True).over(request)
        )
        return ranked.filter(pl.col("rank") <= k).sort(row, "rank").select(*request, names.item, "score", "rank")

    def evaluate(self, requests: AnyTable, history: AnyTable | None = None) -> dict[str, float]:
        """gAUC (within users), AUC and logloss of requests with a label, and the other ``metrics`` that it was trained
        with; with ``weighted_metrics`` requests have a column of weights, ``sample_weight`` if it has no other name.
        Otherwise as ``predict_proba``."""
        table = tables.frame(requests, "requests")
        return self._metrics(table, self._scores(table, self._events(history)))

    def score(self, events: AnyTable, y: Any = None, history: AnyTable | None = None) -> float:
        """gAUC of labelled events, which ``cross_val_score`` and ``GridSearchCV`` compare models by.

        Args:
            events, y: as in ``fit``.
            history: events of the users; None for those it was fitted on, and for users of whom it has none the rows of
                ``events`` themselves, of which a row sees those before it.

        Raises:
            UserError: as ``predict_proba``; no user has both labels.
        """
        table = tables.frame(_with_labels(events, y, self._scorer.encoder.columns.label, "events"), "events")
        new, scores = self._without_history(table), np.zeros(table.height, np.float32)
        parts = [(~new, None), (new, table.filter(new))] if history is None else [(new | ~new, history)]
        for rows, source in parts:
            if rows.any():
                scores[rows] = self._scores(table.filter(rows), self._events(source), "events")
        found = self._metrics(table, scores)["gAUC"]
        if np.isnan(found):
            instead = "evaluate(events)['AUC'] compares all rows"
            raise UserError(f"events: no user has rows of both labels, which gAUC compares: {instead}")
        return found

    @classmethod
    def load(cls, folder: str | Path, gpu: int = -1) -> Self:
        """The estimator of a model folder, whatever wrote it. Raises UserError for a folder that cannot be read."""
        scorer = read_model(folder, gpu)
        config, columns = scorer.config, scorer.encoder.columns
        given = {**config["params"], "gpu": gpu, "random_state": config["seed"], "max_len": config["max_len"]}
        given |= {name: getattr(columns, name) for name in COLUMNS} | {"columns": columns.columns or None}
        if columns.behaviours is not None:
            given["behaviours"] = {columns.behaviours["column"]: list(columns.behaviours["values"])}
        return cls(config["model"], config["position_encoding"], **given)._fitted(scorer)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """All parameters by name, the hyper-parameters that were given too."""
        public = [name for name in vars(self) if not name.startswith("_") and not name.endswith("_")]
        return {name: getattr(self, name) for name in public}

    def set_params(self, **params: Any) -> Self:
        """Set parameters, which count from the next ``fit`` or ``partial_fit`` on. Raises UserError for one that
        nothing reads."""
        known = self.get_params()
        for name in sorted(params, key=lambda name: name not in known):  # the model before hyper-parameters of its own
            if name not in known:
                self._check({name: params[name]})
            setattr(self, name, params[name])
        return self

    def __sklearn_tags__(self) -> Tags:
        from sklearn.utils import InputTags, Tags, TargetTags

        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=False),
            input_tags=InputTags(two_d_array=False, categorical=True, string=True),
            no_validation=True,  # the tables are checked here, not by scikit-learn
        )

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "scorer_")

    def _fitted(self, scorer: Scorer) -> Self:
        self.classes_, self.updates_ = np.array([0, 1]), scorer.config.get("updates", [])
        return super()._fitted(scorer)

    def _events(self, history: AnyTable | None) -> EncodedLog | None:
        """A history, encoded; for None the events it was fitted on."""
        scorer = self._scorer
        return scorer.stored if history is None else scorer.encoder.events(tables.frame(history, "history"))

    def _scores(self, requests: AnyTable, events: EncodedLog | None, what: str = "requests") -> npt.NDArray[np.float32]:
        scorer = self._scorer
        encoded = scorer.encoder.requests(tables.frame(requests, what), events, what)
        self.unknown_ = dict(encoded.counts)
        counts = {name: n for name, n in self.unknown_.items() if n}
        found = [f"{counted(n, name.removesuffix('s'))}" for name, n in counts.items() if name[0] == "u"]
        found += [f"{n:,} {name}" for name, n in counts.items() if name.startswith(MISSING)]
        if found:
            log.info("%s of %s take their reserved id", ", ".join(found), counted(encoded.rows, "request"))
        return scorer.score(encoded)

    def _metrics(self, table: pl.DataFrame, scores: npt.NDArray[np.float32]) -> dict[str, float]:
        from ctr_pe.evaluation import evaluate
        from ctr_pe.evaluation.metrics import METRICS

        names = self._scorer.encoder.columns
        clicked = tables.labels(table, names.label or "label", "requests")
        metrics = dict.fromkeys([*METRICS, *self._scorer.config["params"].get("metrics", ())])
        users, weights = tables.ids(table, names.user, "requests").to_numpy(), None
        if self._scorer.model.weighted_metrics:
            weights = tables.weights(table, names.weight or WEIGHT, "requests")
        return evaluate(clicked, scores, users, list(metrics), weights)

    def _without_history(self, table: pl.DataFrame) -> npt.NDArray[np.bool_]:
        """(n,) the rows of users without stored events; none where no column says which row is earlier."""
        names, stored = self._scorer.encoder.columns, self._scorer.stored
        users = tables.ids(table, names.user, "events")
        if not {names.time, names.order} & set(table.columns):
            return np.zeros(table.height, bool)
        if stored is None or users.dtype != stored.users.dtype:
            return np.full(table.height, stored is None)  # another type is an error, which the encoder names
        return stored.users.find(users) < 0

    def _params(self) -> dict[str, Any]:
        """All hyper-parameters of a training."""
        from ctr_pe.config.yaml import model_params

        named = inspect.signature(CTRRanker).parameters
        given = {name: value for name, value in self.get_params().items() if name not in named}
        given |= {"max_len": self.max_len} | ({} if self.epochs is None else {"epochs": self.epochs})
        given = {name: _plain(value) for name, value in given.items()}
        self._check({**given, "position_encoding": self.position_encoding})
        params = model_params(self.model, "log", given)
        return {name: value for name, value in params.items() if name not in DECIDED}

    def _check(self, params: dict[str, Any]) -> None:
        """Raises UserError for the first that cannot be used."""
        from ctr_pe.models.sections import check_params

        for name in params.keys() & (DECIDED - {"position_encoding", "gpu"}):
            raise UserError(f"CTRRanker: '{name}' is not a parameter: the log and the other parameters decide it")
        check_params(self.model, params)

    def _cold_start(
        self,
        events: pl.DataFrame,
        items: AnyTable | None,
        users: AnyTable | None,
        label: str | None,
        weight: str | None,
    ) -> Scorer:
        """A scorer with initial weights and without any item or user."""
        from ctr_pe.serving.update import empty_dataset
        from ctr_pe.training import Outcome, Run, build_model
        from ctr_pe.training.source import DataSource

        with scratch_folder() as scratch:
            recipe = self._recipe(self._files(events, items, users, scratch), label, weight)
            source = DataSource.of(empty_dataset(recipe, scratch / "log"))
            run = Run(
                self.model, source, self.position_encoding, self._seed(), params=self._params(), gpu=_plain(self.gpu),
                threads=_plain(self.threads),
            )  # fmt: skip
            model = build_model(run, source, scratch)
            before = Outcome({}, epoch=0, seconds=0.0, scores=np.zeros(0, np.float32), parameters=0)
            scorer = scorer_of(model, run, source, before)
        clock = [name for name in (recipe.order, recipe.time) if name in events.columns]
        scorer.encoder.columns = replace(scorer.encoder.columns, weight=self.weight)
        kinds = [recipe.behaviours.column] if recipe.behaviours else []
        scorer.histories = events.head(0).select(recipe.user, recipe.item, *clock, *_of_log(recipe), *kinds)
        return scorer

    def _files(
        self, events: AnyTable, items: AnyTable | None, users: AnyTable | None, folder: Path
    ) -> dict[str, Place]:
        """The tables as files, in ``folder`` if they are none."""
        named = {"events": events, "items": items, "users": users}
        return {name: tables.as_file(table, folder, name) for name, table in named.items() if table is not None}

    def _recipe(self, files: dict[str, Place], label: str | None, weight: str | None) -> Recipe:
        from ctr_pe.data.logs.recipe import Recipe, load_recipe

        events, items = files["events"], files.get("items")
        given = {name: _plain(getattr(self, name)) for name in (*COLUMNS, *RULES)} | {
            "label": label,
            "weight": weight,
        }
        # Under their default names columns may be absent.
        given = {name: value for name, value in given.items() if value != Recipe.model_fields[name].default}
        attributes, columns = self.attributes, declared(self.columns or {})
        if attributes is None and items is not None:
            kinds = tables.schema(items, "items")
            others = [name for name in kinds if name not in {self.item, *columns}]
            attributes = tables.key_columns(items, others, "items")
            if left_out := sorted({*others} - {*attributes}):
                word = "embedding" if kinds[left_out[0]].is_nested() else "numeric"
                how = f"columns={{'{left_out[0]}': 'item, {word}'}} reads one"
                log.warning("items: not read, neither integers nor strings: %s (%s)", ", ".join(left_out), how)
        there = tables.schema(events, "events")
        check_label(label, there)
        labelled = label is not None and label_column(label, there) in there
        protocol = self.protocol or ("impressions" if labelled else "din")
        given |= {"interactions": events, "items": items, "users": files.get("users"), "columns": columns}
        given |= {"protocol": protocol, "max_len": _plain(self.max_len)}
        return load_recipe(None, {**given, "attributes": tables.several_names(attributes)})

    def _seed(self) -> int:
        if isinstance(self.random_state, (int, np.integer)):
            return int(self.random_state)
        from sklearn.utils import check_random_state

        return int(check_random_state(self.random_state).randint(2**31 - 1))


def _plain(value: Any) -> Any:
    """A number of numpy as one of Python."""
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


def _count(name: str, value: Any, meaning: str) -> int:
    """A whole number of 1 or more, of Python or numpy."""
    if not isinstance(value, (int, np.integer, np.bool_)) or value < 1:
        raise UserError(f"{name}={value!r}: {meaning}, at least 1")
    return int(value)


def _with_labels(events: AnyTable, y: Any, name: str | None, what: str) -> AnyTable:
    """The events with ``y`` as the column ``name``, by default ``label``; without y as they are.

    Raises:
        UserError: no labels, such as a table of items, or not as many as events.
    """
    if y is None:
        return events
    table = tables.frame(events, what)
    try:
        shape = np.shape(y)
        column = pl.Series("y", np.reshape(y, -1) if shape[1:] == (1,) else y)
    except (TypeError, ValueError, pl.exceptions.PolarsError):
        shape = ()
    if len(shape) != 1 and shape[1:] != (1,):
        raise UserError(f"y: not a label per event; a table of items is given by name: {option('items')}")
    if len(column) != table.height:
        raise UserError(f"y: {counted(len(column), 'label')} for {counted(table.height, 'event')}")
    if nulls := column.null_count():
        raise UserError(f"y: null values: {nulls:,} of {table.height:,} labels")
    return table.with_columns(pl.Series(name or "label", tables.labels(column.to_frame(), "y", "y")).cast(pl.Int8))


def _with_weights(events: AnyTable, weights: Any, what: str) -> tuple[AnyTable, str | None]:
    """The events with these weights as a column, and its name; as they are without any.

    Raises:
        UserError: not a number per event.
    """
    if weights is None:
        return events, None
    table, shape = tables.frame(events, what), np.shape(weights)
    if shape not in ((table.height,), (table.height, 1)):
        raise UserError(f"sample_weight: shape {shape}, not a weight for each of {counted(table.height, 'event')}")
    try:
        column = pl.Series(WEIGHT, np.asarray(weights, np.float64).reshape(-1))
    except (TypeError, ValueError):
        raise UserError("sample_weight: not a number per event") from None
    return table.with_columns(column), WEIGHT


def newest_events(recipe: Recipe) -> pl.DataFrame:
    """The newest ``max_len`` chosen events of every user of a log, read as the log was."""
    file, raw = recipe.interactions, tables.lazy(recipe.interactions, "events")
    names = raw.collect_schema().names()
    columns = {name: id_column(file, role, name, raw) for role, name in (("user", recipe.user), ("item", recipe.item))}
    if recipe.order in names:
        columns[str(recipe.order)] = order_column(file, str(recipe.order), raw)
    if recipe.time in names:
        name = str(recipe.time)
        columns[name] = times(file, name, raw, recipe.time_unit, recipe.time_format).stored
    key, clock = [*columns, *([recipe.behaviours.column] if recipe.behaviours else [])], list(columns)[2:]
    events = raw.with_columns(one.alias(name) for name, one in columns.items())
    if recipe.keep in ("first", "last"):
        events = events.unique(key, keep=recipe.keep, maintain_order=True)
    if recipe.label is not None and label_column(recipe.label, names) in names:
        limit = threshold(recipe.label, names)
        events = events.filter((limit.holds(pl.col(limit.column)) if limit else pl.col(recipe.label).cast(float)) == 1)
    return tables.newest(events, recipe.user, recipe.item, clock, recipe.max_len, _of_log(recipe), recipe.behaviours)


def _of_log(recipe: Recipe) -> list[str]:
    """Declared columns that the log has."""
    return [*recipe.of("event"), *(() if recipe.users else recipe.of("user"))]


def load(folder: str | Path, gpu: int = -1) -> CTRRanker:
    """The ranker of a model folder, which scores and ranks without the data set it was trained on.

    Raises:
        UserError: no model folder, one of another format, or a file that is missing or damaged.
    """
    return CTRRanker.load(folder, gpu)
