"""A log before it is built: what ``ctr-pe data build`` would read of a sample, and all that it would refuse."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from ctr_pe.data.logs.log import by_frequency, not_read, read_sample
from ctr_pe.data.logs.tables import is_text, readable, scan
from ctr_pe.utils.errors import UserError, counted, hyper_parameter

if TYPE_CHECKING:
    from ctr_pe.data.logs.events import EventBlock, Log
    from ctr_pe.data.logs.recipe import Recipe

ROWS = 1_000_000
SHOWN, WIDTH, COLUMNS = 5, 24, 12  # rows, characters of a value and columns that are printed


@dataclass
class Found:
    """What a check says: ``lines`` about what was read, and ``problems``, each an error of a build."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def check(recipe: Recipe, rows: int = ROWS) -> Found:
    """Read at most ``rows`` rows of a log as a build would.

    Of a text file these are the first ones, of parquet files pieces that are spread over the whole. What only all rows
    show, such as users with too few items, is said of the sample.
    """
    found = Found()
    log, block = read_sample(recipe, rows, found.problems)
    try:
        with readable(recipe.interactions, recipe.separator):
            table = scan(recipe.interactions, recipe.separator, rows).collect()
    except UserError as error:
        found.problems += [] if str(error) in found.problems else [str(error)]
        return found
    found.lines += _of_file(table, recipe, log, rows)
    if log is not None and block is not None:
        found.lines += _of_events(log, block)
    if log is not None:
        found.lines += not_read(log.unread)
    return found


def _of_file(table: pl.DataFrame, recipe: Recipe, log: Log | None, rows: int) -> list[str]:
    """How many rows, and per column its type, what it is read as and its nulls; the first rows."""
    file, read_as, missing = recipe.interactions, {} if log is None else log.read_as, {} if log is None else log.missing
    whole = "all" if table.height < rows else "the first" if is_text(file) else "pieces of the file:"
    lines = [f"{file}: {whole} {counted(table.height, 'row')} looked at"]
    roles = {getattr(recipe, role): role for role in ("user", "item", "time", "order", "label", "weight")}
    width = max(map(len, table.columns), default=0)
    unread = [] if log is None else log.unread["event"]
    for name, kind in table.schema.items():
        declared = recipe.columns.get(name)
        role = roles.get(name) or (None if declared is None else declared.source)
        said = "not read" if name in unread else ": ".join(word for word in (role, read_as.get(name)) if word)
        nulls = missing.get(name) or table[name].null_count()
        lines.append(f"  {name:{width}}  {kind!s:12}  {said}".rstrip() + (f", {nulls:,} missing" if nulls else ""))
    shown = [*(name for name in table.columns if name not in unread), *unread][:COLUMNS]
    lines.append(f"the first {counted(min(SHOWN, table.height), 'row')} as read:")
    return lines + _table([shown, *([repr(value) for value in row] for row in table.select(shown).head(SHOWN).rows())])


def _table(rows: list[list[str]]) -> list[str]:
    """Texts in columns."""
    texts = [[text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…" for text in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in texts]


def _of_events(log: Log, block: EventBlock) -> list[str]:
    """Users, items, labels, ties and repeated rows of the events."""
    user, item, positive = (block.column(name) for name in ("user", "tie", "positive"))
    lengths = np.bincount(user)
    lines = [
        f"users: {len(lengths):,}; events of one: {lengths.min():,} to {lengths.max():,}, half of them up to "
        f"{int(np.median(lengths)):,}; users by events: {by_frequency(lengths)}",
        f"items: {log.catalogue.height:,}; items by events: {by_frequency(np.bincount(item))}",
        f"events at the same time as the user's event before: {block.counts['tied']:,}; repeated: "
        f"{block.counts['repeated']:,}",
    ]
    if log.recipe.protocol == "impressions":
        ones = np.bincount(user, positive)
        both = int(((ones > 0) & (ones < lengths)).sum())
        lines.append(
            f"label 1: {int(positive.sum()):,}, label 0: {int((~positive).sum()):,}; users with both: {both:,}"
            + ("" if both else f": gAUC cannot be computed: train by AUC, {hyper_parameter('monitor', 'AUC')}")
        )
    if dropped := ", ".join(f"{count:,} with {rule}" for rule, count in log.dropped.items() if count):
        lines.append(f"dropped: {dropped}")
    if log.users is not None:
        without = int((block.column("owner")[block.is_first] < 0).sum())
        lines.append(f"users without a row in {log.recipe.users}: {without:,}")
    if log.without:
        lines.append("items without " + ", ".join(f"{name}: {count:,}" for name, count in log.without.items()))
    return lines
