"""A model folder as a function of Spark columns: ``frame.withColumn("score", score_udf("model")(*frame.columns))``.

``pip install 'ctr_pe[spark]'`` brings Spark 4.1 or newer, which hands columns over in Arrow's form: times keep their
instants whatever the time zone of the session is. For files, ``ctr-pe predict --engine spark`` needs no program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from ctr_pe.data.logs.places import place
from ctr_pe.data.logs.tables import Place, readable, scan
from ctr_pe.data.timeline import EncodedLog
from ctr_pe.serving.model_folder import MANIFEST, read_model
from ctr_pe.serving.scorer import Scorer
from ctr_pe.utils.engines import Surroundings
from ctr_pe.utils.errors import UserError


def score_udf(model: str | Path, events: str | Path | None = None) -> Callable[..., Any]:
    """A function of columns, by name or as Spark's, that gives the column of click probabilities, float32.

    The columns are those of ``ctr-pe predict``, under the names of the log: user, item and, if a row should not see all
    events of its user, a time; others are not read. A worker opens the model once.

    Args:
        model: a model folder, which the workers see under this name.
        events: the log: a file, folder, glob or address; None for the histories of the model folder.

    Raises:
        UserError: Spark is not installed, or the model cannot be read; in a task, a column that cannot be used.
    """
    try:
        from pyspark.sql.functions import arrow_udf, struct
    except ImportError:
        raise UserError("score_udf needs Spark 4.1 or newer: pip install 'ctr_pe[spark]'") from None
    folder = Path(model).absolute()
    read_model(folder)
    log = None if events is None else place(events)
    log = log.absolute() if isinstance(log, Path) else log
    surroundings, manifest = Surroundings(), (folder / MANIFEST).read_bytes()

    def scores(parts: Iterator[pa.Array]) -> Iterator[pa.Array]:  # types that Spark reads
        surroundings.enter()
        return _scores(parts, *_opened(folder, manifest, log))

    score = arrow_udf(scores, "float")
    return lambda *columns: score(struct(*columns))


def _scores(parts: Iterator[pa.Array], scorer: Scorer, events: EncodedLog | None) -> Iterator[pa.Array]:
    for part in parts:
        rows = pa.Table.from_struct_array(part)
        requests = pl.DataFrame(rows.select(scorer.encoder.reads(rows.column_names)))
        yield pa.array(scorer.score(scorer.encoder.requests(requests, events)))


@lru_cache(maxsize=1)
def _opened(folder: Path, manifest: bytes, log: Place | None) -> tuple[Scorer, EncodedLog | None]:
    """``manifest``: of the model, which may be replaced."""
    scorer = read_model(folder)
    if log is None:
        return scorer, scorer.stored
    with readable(log):
        return scorer, scorer.encoder.events(scan(log), str(log))
