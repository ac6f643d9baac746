"""``ctr-pe recommend``: what a data set says about position without training, and what follows from it.

The facts are counted. The rules are a table, and hold only what follows by construction or from committed results: each
names its evidence. R rows, N items of their histories.
"""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from ctr_pe.config.field_groups import Group
from ctr_pe.data.dataset import Dataset
from ctr_pe.data.synthetic.built_in import open_or_generate
from ctr_pe.utils.errors import counted

ROWS = 1_000_000
"""Histories of about so many rows are read; of a larger data set every second row, every third, and so on."""
CHUNK_ROWS = 65_536
DAY, STALE = 86_400, 92  # seconds; days
UNITS = {"day": DAY, "hour": 3600, "minute": 60, "second": 1}
EXACT = 0.99  # of the gaps are whole days, say, where times are days
WIDTH = 120
COMPARED = ("none", "naive", "rope", "cape")
ADVICE = ("try", "leave out", "mind")  # encodings, or something


@dataclass(frozen=True)
class Times:
    """``tied``: share of neighbours in a history that happened at one time; ``unit``: resolution of the other gaps;
    ``fresh``, ``stale``: shares of the histories whose newest item is less than a day old, or over ``STALE`` days."""

    tied: float
    unit: str
    fresh: float
    stale: float


@dataclass(frozen=True)
class Facts:
    """Counted in a data set. Shares are of rows, from 0 to 1; three numbers are quartiles.

    ``every``: histories were read of every n-th row; ``like``: the field that makes items like the target; ``unlike``:
    items after the latest like item; ``several``: rows with two like items or more, where the number of unlike items
    after one is not its plain distance; ``one_class_users``: share of test users all of whose labels are the same.
    """

    dataset: str
    rows: dict[str, int]
    users: int | None
    every: int
    max_len: int
    lengths: tuple[int, int, int]
    empty: float
    single: float
    full: float
    times: Times | None
    one_class_users: float
    one_class_rows: float
    like: str
    no_like: float
    several: float
    unlike: tuple[int, int, int]
    seen_before: float
    repeats: float

    @property
    def short(self) -> float:
        """Share of rows with one item or none."""
        return self.empty + self.single


@dataclass(frozen=True)
class Rule:
    """``advice``: one of ``ADVICE``. ``reason``: a format of ``facts``; ``evidence``: where it is shown."""

    holds: Callable[[Facts], bool]
    advice: str
    encodings: tuple[str, ...]
    reason: str
    evidence: str

    def line(self, facts: Facts) -> str:
        what = f"{self.advice} {', '.join(self.encodings)}".strip()
        return f"{what}: {self.reason.format(facts=facts)} [{self.evidence}]"


BY_CONSTRUCTION = "by construction"
RULES = (
    Rule(
        lambda facts: facts.times is None,
        "leave out",
        ("time_bias", "time_rope", "cape_time"),
        "the data set has no times, and these encodings read the age of an event.",
        "docs/encodings.md, needs",
    ),
    Rule(
        lambda facts: facts.times is not None and facts.times.tied > 0,
        "try",
        ("time_bias",),
        "{facts.times.tied:.0%} of neighbours in a history happened at one time. Their order is that of the file, and "
        "so is how many items they are from the target; their ages are equal.",
        BY_CONSTRUCTION,
    ),
    Rule(
        lambda facts: facts.short == 1,
        "leave out",
        ("rope", "cape"),
        "no history has two items. The softmax of target attention over one item is 1, whatever is added to its logit.",
        BY_CONSTRUCTION,
    ),
    Rule(
        lambda facts: 0.25 <= facts.short < 1,
        "mind",
        (),
        "{facts.short:.0%} of the rows have at most one item. In target attention with a softmax its weight is 1: "
        "encodings that change logits change nothing there, those that change what is pooled (naive, sinusoidal) can.",
        BY_CONSTRUCTION,
    ),
    Rule(
        lambda facts: facts.short < 1 and facts.several <= 0.1,
        "try",
        ("cape_constant",),
        "only {facts.several:.1%} of the rows have two items of the target's {facts.like} or more. In all others what "
        "follows the like item is unlike: counting unlike items is counting items, as cape_constant does.",
        BY_CONSTRUCTION,
    ),
    Rule(
        lambda facts: facts.several > 0.1,
        "try",
        ("cape_constant", "cape_cosine"),
        "{facts.several:.0%} of the rows have two items of the target's {facts.like} or more: there, what lies between "
        "can say more than distance. In DIN cape was level with cape_constant, which knows distance alone, on a "
        "purchase log, on one of impressions and on synthetic_context, where what lies between decides; on the last "
        "cape_cosine was above both.",
        "docs/evidence.md, In short",
    ),
    Rule(
        lambda facts: facts.times is not None and facts.short < 1,
        "mind",
        (),
        "the newest item is less than a day old in {facts.times.fresh:.0%} of the histories and over 92 days in "
        "{facts.times.stale:.0%}. On a purchase log position gained most where it was fresh and least where it "
        "was stale.",
        "docs/evidence.md, Where position helps",
    ),
    Rule(
        lambda facts: facts.short < 1,
        "mind",
        (),
        "models differ. On a purchase log BST and SASRec without an encoding were below DIN without one, and every "
        "encoding gained several times in them what it gained in DIN. On a log of impressions nothing was above none "
        "in them, nor in TIN.",
        "docs/evidence.md, In short",
    ),
    Rule(
        lambda facts: facts.lengths[2] > 10,
        "mind",
        ("naive",),
        "a quarter of the rows have {facts.lengths[2]} items or more. In DIN on a log of impressions naive, whose "
        "vectors are pooled with the items, was below none, the further the longer the histories.",
        "docs/evidence.md, Where position helps",
    ),
    Rule(
        lambda facts: facts.full >= 0.1,
        "mind",
        (),
        "{facts.full:.0%} of the histories have {facts.max_len} items, the most that were kept: no encoding sees older "
        "ones (`ctr-pe data build --max-len`).",
        BY_CONSTRUCTION,
    ),
    Rule(
        lambda facts: facts.one_class_users > 0,
        "mind",
        (),
        "{facts.one_class_users:.0%} of the test users, with {facts.one_class_rows:.0%} of the test rows, have labels "
        "of one class: they do not count in gAUC.",
        "docs/results.md, Statistics",
    ),
)


def measure(dataset: Dataset) -> Facts:
    """Count in a data set; a million rows take seconds. Histories are those of the first field group."""
    first = dataset.groups[0]
    group = Group(first.target[:2], first.history[:2], first.age)  # the item and its first attribute, if it has one
    every = math.ceil(sum(dataset.rows.values()) / ROWS)
    splits = [dataset.scan(name) for name in dataset.rows]
    blocks = []
    for rows in splits:
        read = rows.select(*group.target, *group.history, *filter(None, [group.age])).gather_every(every)
        blocks += [_count(block, group) for block in read.collect_batches(chunk_size=CHUNK_ROWS, maintain_order=True)]
    counts = pl.concat(blocks)
    users, one_class_users, one_class_rows = _users(dataset, splits)
    length, like = pl.col("length"), pl.col("like")
    shares = counts.select(
        empty=(length == 0).mean(),
        single=(length == 1).mean(),
        full=(length >= dataset.max_len).mean(),
        no_like=(like == 0).mean(),
        several=(like > 1).mean(),
        seen_before=pl.col("seen").mean(),
        repeats=pl.col("repeated").sum() / pl.max_horizontal(1, length.sum()),
    )
    return Facts(
        dataset=dataset.dataset_id,
        rows=dataset.rows,
        users=users,
        every=every,
        max_len=dataset.max_len,
        lengths=_quartiles(counts["length"]),
        times=None if group.age is None else _times(counts.filter(length > 0)),
        one_class_users=one_class_users,
        one_class_rows=one_class_rows,
        like=group.target[-1],
        unlike=_quartiles(counts.filter(like > 0)["unlike"]),
        **{name: share or 0.0 for name, share in shares.row(0, named=True).items()},
    )


def _count(block: pl.DataFrame, group: Group) -> pl.DataFrame:
    """What is counted of each row; items are like the target where the last field of the group is the same."""
    lists = [*group.history, *filter(None, [group.age])]
    (item, items), (kind, kinds) = ((pl.col(group.target[at]), pl.col(group.history[at])) for at in (0, -1))
    place, known = pl.col("place"), items.filter(items != 0)
    found = {
        "length": pl.len(),
        "like": (kinds == kind).sum(),
        "unlike": place.max() - place.filter(kinds == kind).max(),
        "seen": (items == item).any(),
        "repeated": known.len() - known.n_unique(),
    }
    rows = block.with_row_index("row")
    events = rows.explode(lists, empty_as_null=False).with_row_index("place")
    if group.age is not None:
        gap, changed = pl.col("gap"), pl.col("gap") != 0  # null at the first item of a row
        age = pl.col(group.age).cast(pl.Int64)
        events = events.with_columns(gap=pl.when(pl.col("row") == pl.col("row").shift()).then(age.diff().abs()))
        found |= {"newest": age.last(), "pairs": gap.count(), "changed": changed.sum()}
        found |= {unit: (changed & (gap % seconds == 0)).sum() for unit, seconds in UNITS.items()}
    of_rows = rows.select("row").join(events.group_by("row").agg(**found), on="row", how="left")
    return of_rows.with_columns(
        pl.col("length", "like", "repeated").fill_null(0), pl.col("seen").fill_null(value=False)
    )


def _times(counts: pl.DataFrame) -> Times:
    """Of the rows that have a history."""
    newest = pl.col("newest")
    shares = {"fresh": (newest < DAY).mean(), "stale": (newest > STALE * DAY).mean()}
    sums = counts.select(pl.col("pairs", "changed", *UNITS).sum(), **shares).row(0, named=True)
    unit = next(unit for unit in UNITS if sums[unit] >= EXACT * sums["changed"])
    return Times(1 - sums["changed"] / max(1, sums["pairs"]), unit, sums["fresh"] or 0.0, sums["stale"] or 0.0)


def _quartiles(values: pl.Series) -> tuple[int, int, int]:
    """Zeros if there are no values."""
    found = np.quantile(values.to_numpy(), (0.25, 0.5, 0.75), method="inverted_cdf") if len(values) else np.zeros(3)
    low, middle, high = map(int, found)
    return low, middle, high


def _users(dataset: Dataset, splits: list[pl.LazyFrame]) -> tuple[int | None, float, float]:
    """Users of all rows, and of test the shares of users and of rows with labels of one class; none without users."""
    if dataset.group_id is None:
        return None, 0.0, 0.0
    users = pl.concat([rows.select(dataset.group_id) for rows in splits], how="vertical_relaxed")
    labels = pl.col(dataset.label)
    of_user = pl.scan_parquet(dataset.split("test")).group_by(dataset.group_id)
    test = of_user.agg(rows=pl.len(), one=labels.min() == labels.max()).collect()
    shares = [
        float(test.filter("one").select(total).item() / max(1, test.select(total).item()))
        for total in (pl.len(), pl.col("rows").sum())
    ]
    return int(users.select(pl.all().n_unique()).collect().item()), shares[0], shares[1]


def advice(facts: Facts) -> list[Rule]:
    """The rules that hold."""
    return [rule for rule in RULES if rule.holds(facts)]


def encodings(facts: Facts) -> list[str]:
    """Those to compare: the usual ones and those to try, without those to leave out."""
    of = {what: [name for rule in advice(facts) if rule.advice == what for name in rule.encodings] for what in ADVICE}
    return [name for name in dict.fromkeys([*COMPARED, *of["try"]]) if name not in of["leave out"]]


def report(facts: Facts, name: str, *more: str) -> str:
    """What ``ctr-pe recommend`` prints: facts, advice, and the command to try it on the data set ``name``; ``more``:
    its other options."""
    rows = " · ".join(f"{split} {count:,}" for split, count in facts.rows.items())
    users = "no users" if facts.users is None else counted(facts.users, "user")
    lengths, unlike = ("{} / {} / {}".format(*quartiles) for quartiles in (facts.lengths, facts.unlike))
    times = "none"
    if facts.times is not None:
        times = f"{facts.times.tied:.1%} of neighbours tied, others differ by whole {facts.times.unit}s; newest item "
        times += f"under a day old {facts.times.fresh:.1%}, over {STALE} days {facts.times.stale:.1%}"
    lines = {
        "rows": f"{rows}; {users}" + f"; histories of one row in {facts.every}" * (facts.every > 1),
        "items in a history": f"{lengths} (quartiles); none {facts.empty:.1%}, one {facts.single:.1%}, "
        f"{facts.max_len} or more {facts.full:.1%}",
        "times": times,
        "labels of one class": f"{facts.one_class_users:.1%} of test users, {facts.one_class_rows:.1%} of test rows",
        f"like items ({facts.like})": f"none {facts.no_like:.1%}, two or more {facts.several:.1%}; unlike items after "
        f"the latest {unlike} (quartiles)",
        "repeats": f"{facts.seen_before:.1%} of targets and {facts.repeats:.1%} of items were in the history before",
    }
    text = [f"{facts.dataset}", *(f"  {name + ':':<25} {value}" for name, value in lines.items()), "advice"]
    found = [rule.line(facts) for rule in advice(facts)] or ["none: nothing follows from these facts alone"]
    text += [textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="    ") for line in found]
    command = ["ctr-pe", "benchmark", "--dataset", name, "--pe", ",".join(encodings(facts)), *more]
    return "\n".join([*text, "try it", f"  {shlex.join([*command, '--dry-run'])}", f"  {shlex.join(command)}"])


def as_json(name: str, root: Path | None = None) -> dict[str, Any]:
    """The facts, the advice and the encodings to compare of :func:`recommend`, for a machine."""
    facts = measure(open_or_generate(name, root))
    rules = [
        {
            "advice": rule.advice,
            "encodings": rule.encodings,
            "reason": rule.reason.format(facts=facts),
            "evidence": rule.evidence,
        }
        for rule in advice(facts)
    ]
    return {"facts": asdict(facts), "advice": rules, "compare": encodings(facts)}


def recommend(name: str, root: Path | None = None) -> str:
    """The report on a data set below the data root, or on the path of one; a built-in one is generated at first use.

    Raises:
        UserError: no such data set.
    """
    return report(measure(open_or_generate(name, root)), name, *(["--data-root", str(root)] if root else []))
