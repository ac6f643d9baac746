"""Writes docs/evidence.md: what the published runs say, every number taken from their rows (make tables).

A sentence that compares names its claim, and the build fails where the runs do not bear it out: ``above`` and ``below``
need a difference with p < .05, corrected for the number of encodings in its table; ``level`` needs that there is none.
"""

from __future__ import annotations

import json
import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from benchmark import variants, where
from ctr_pe.evaluation.paired import LEVEL, Difference
from ctr_pe.study.differences import BASELINES, Runs, Setting, between, settings
from ctr_pe.study.store import Store
from ctr_pe.study.suite import Cell
from ctr_pe.study.tables import changes, gains
from ctr_pe.study.users import UserStatistics, user_statistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[1]
GAINS = "gAUC − none, 95 % interval"
GLUE = "\x00"
"""Instead of a space at which no line ends: within an interval."""
MODELS = ("DIN", "BST", "SASRec")
MATCHING = ("matching:MatchingBST", "matching:MatchingSASRec")
EVERY_BEAUTY = "real_logs_all/DIN/amazon_beauty"
BST_BEAUTY = "real_logs_all/BST/amazon_beauty"
SASREC_BEAUTY = "real_logs_all/SASRec/amazon_beauty"
BEAUTY = (EVERY_BEAUTY, BST_BEAUTY, SASREC_BEAUTY)
CHAINS = ("kernel+cape", "rope+cape", "time_bias+cape")
VARIANTS = "real_logs_variants"
LENGTHS = "real_logs_context_length"
ENCODINGS = ("naive", "rope", "cope", "cape", "cape_constant", "cape_cosine")

FORMS = ("cape", "cape_constant", "cape_cosine")
MATCH = "cape_constant+likeness"
"""The distance, and a likeness to the target without order."""
MATCHED = (
    "DIN-synthetic_context",
    "DIN-amazon_sports",
    "TIN-amazon_sports",
    "BST-amazon_sports",
    "TIN-amazon_beauty",
    "TIN-kuairand_pure",
    "BST-kuairand_pure",
    "SASRec-kuairand_pure",
    "TIN-ml-1m",
    "DIN-ml-1m",
)
"""Places that have it."""


class NotBorneOut(Exception):
    """A sentence of the page that its runs do not support."""


@dataclass
class OfSuite:
    """A suite's cells that have been run with all seeds. A cell's name is its encoding and what is varied:
    ``cape max_len=5 position_dim=16``."""

    statistics: UserStatistics
    runs: dict[Cell, Runs]

    def pooled(self, name: str) -> Runs:
        """Of all cells with this encoding and these values, ``cape max_len=5``: of all widths. A number per run, which
        is the seed of one cell's. Raises NotBorneOut if there are none."""
        cells = [cell for cell in self.runs if cell.pe == name.split()[0] and {*name.split()} <= {*_cell(cell).split()}]
        if not cells:
            raise NotBorneOut(f"no cell of {name} has all seeds")
        return dict(enumerate(run for cell in cells for run in self.runs[cell].values()))

    @cached_property
    def gains(self) -> dict[str, Difference]:
        """To ``none`` under the same settings; p corrected for all of these."""
        return {_cell(cell): one for cell, one in gains(self.statistics, self.runs).items()}

    @cached_property
    def changes(self) -> dict[str, Difference]:
        """To the same encoding by default; p corrected for all of these. The name is what is varied alone."""
        return {_varied(cell): one for cell, one in changes(self.statistics, self.runs).items()}


@dataclass
class Rows:
    """Numbers of the folder of results. A place is FOLDER, or FOLDER/MODEL/DATASET where it has several tables."""

    results: Path
    _read: dict[str, list[Setting]] = field(default_factory=dict)
    _suites: dict[str, OfSuite] = field(default_factory=dict)
    _bins: dict[str, list[where.BinRuns]] = field(default_factory=dict)

    def setting(self, place: str) -> Setting:
        found = self.settings(place)
        if len(found) != 1:
            raise NotBorneOut(f"{place}: {len(found)} tables of this name, not one")
        return found[0]

    def settings(self, place: str) -> list[Setting]:
        """A setting per table: of a folder, or of the one that is named."""
        folder, *rest = place.split("/")
        if folder not in self._read:
            self._read[folder] = settings(Store(self.results / folder))
        return [one for one in self._read[folder] if not rest or [one.key.model, one.key.dataset] == rest]

    def runs(self, place: str, pe: str) -> Runs:
        """Raises NotBorneOut if there are none."""
        of_pe = self.suite(place).pooled(pe) if "=" in pe else self.setting(place).runs.get(pe)
        if not of_pe:
            raise NotBorneOut(f"{place}: no runs of {pe}")
        return of_pe

    def mean(self, place: str, pe: str, metric: str = "gAUC") -> str:
        """.8361 ± .0014: mean and standard deviation over the seeds."""
        values = [run.metrics[metric] for run in self.runs(place, pe).values()]
        return f"{short(statistics.mean(values))} ± {short(statistics.stdev(values))}"

    def spread(self, place: str, pe: str) -> str:
        """.0014: the standard deviation of gAUC over the seeds."""
        return self.mean(place, pe).split(" ± ")[1]

    def seeds(self, place: str) -> str:
        """5, or 5 to 7 where encodings have different numbers of them."""
        counts = {len(runs) for runs in self.setting(place).runs.values()}
        return " to ".join(map(str, sorted({min(counts), max(counts)})))

    def difference(self, place: str, ours: str, theirs: str = "none") -> Difference:
        """In gAUC; p corrected for the table's encodings if ``theirs`` is a baseline of tables.

        Of a suite, ``kernel_u=full`` against ``default``, ``cape max_len=5 position_dim=16`` against another cell or
        several together, and against ``none`` that under the same settings.
        """
        if theirs == "default":
            return self.suite(place).changes[ours]
        if "=" in ours:
            suite = self.suite(place)
            if theirs == "none":
                return suite.gains[ours]
            return between(suite.statistics, {0: (suite.pooled(ours), suite.pooled(theirs))})[0]["gAUC"]
        mine, others = self.runs(place, ours), self.runs(place, theirs)
        setting = self.setting(place)
        if theirs in BASELINES and ours not in BASELINES[: BASELINES.index(theirs)]:
            return setting.differences(theirs)[ours]["gAUC"]
        return between(setting.statistics, {0: (mine, others)})[0]["gAUC"]

    def suite(self, folder: str) -> OfSuite:
        """Raises NotBorneOut if no suite of this name varies anything."""
        if folder not in self._suites:
            store = Store(self.results / folder)
            suite = variants.suite_of(store)
            if suite is None:
                raise NotBorneOut(f"{folder}: no suite of this name varies anything")
            runs = {cell: runs for cell, runs in variants.runs_of(store, suite).items() if len(runs) == suite.seeds}
            self._suites[folder] = OfSuite(user_statistics(store, next(iter(store.read())).data_hash), runs)
        return self._suites[folder]

    def above(self, place: str, ours: str, theirs: str = "none") -> str:
        """+.0024 [+.0008, +.0041]: a difference above zero."""
        found = self.difference(place, ours, theirs)
        if not (found.p_holm < LEVEL and found.value > 0):
            raise NotBorneOut(f"{place}: {ours} is not above {theirs}: {interval(found)}, p {found.p_holm:.3f}")
        return interval(found)

    def below(self, place: str, ours: str, theirs: str = "none") -> str:
        found = self.difference(place, ours, theirs)
        if not (found.p_holm < LEVEL and found.value < 0):
            raise NotBorneOut(f"{place}: {ours} is not below {theirs}: {interval(found)}, p {found.p_holm:.3f}")
        return interval(found)

    def level(self, place: str, ours: str, theirs: str = "none") -> str:
        """+.0002 [−.0011, +.0015]: a difference that chance alone can give."""
        found = self.difference(place, ours, theirs)
        if not found.p_holm >= LEVEL:
            raise NotBorneOut(f"{place}: {ours} and {theirs} differ: {interval(found)}, p {found.p_holm:.3f}")
        return interval(found)

    def least(self, folder: str, bound: float) -> str:
        """.7290: the smallest gAUC of all runs of a folder, which is above a bound."""
        found = min(run.metrics["gAUC"] for setting in self.settings(folder) for run in setting.results)
        if not found > bound:
            raise NotBorneOut(f"{folder}: a run ends at {short(found)}, not above {bound}")
        return short(found)

    def all_above(self, place: str, but: set[tuple[str, str]]) -> str:
        """65 of 72: of the encodings of all models of a place, those above none, which are all but these."""
        cells = {
            (setting.key.model, pe): found["gAUC"]
            for setting in self.settings(place)
            for pe, found in setting.differences("none").items()
        }
        others = {cell for cell, found in cells.items() if not (found.p_holm < LEVEL and found.value > 0)}
        if others != but:
            raise NotBorneOut(f"{place}: not above none are {sorted(others)}")
        return f"{len(cells) - len(but)} of {len(cells)}"

    def none_shown(self, place: str) -> str:
        """27: the encodings of a table, none of which is shown to differ from none."""
        found = {pe: of["gAUC"] for pe, of in self.setting(place).differences("none").items()}
        if shown := sorted(pe for pe, one in found.items() if one.p_holm < LEVEL):
            raise NotBorneOut(f"{place}: {', '.join(shown)} differ from none")
        return str(len(found))

    def all_level(self, folder: str, pairs: Sequence[tuple[str, str]]) -> str:
        """32: the pairs of a suite's cells, none of which is shown to differ, corrected for their number."""
        suite = self.suite(folder)
        found = between(suite.statistics, {pair: (suite.pooled(pair[0]), suite.pooled(pair[1])) for pair in pairs})
        if shown := [pair for pair, of in found.items() if of["gAUC"].p_holm < LEVEL]:
            raise NotBorneOut(f"{folder}: {' and '.join(shown[0])} differ")
        return str(len(found))

    def by_gain(self, place: str) -> list[str]:
        """The encodings of a table, the one that gains most against none first."""
        found = {pe: of["gAUC"].value for pe, of in self.setting(place).differences("none").items()}
        return sorted(found, key=lambda pe: -found[pe])

    def largest(self, place: str) -> str:
        """The three encodings of a table that gain most against none, and how much."""
        first, second, third = (self.gain(place, pe) for pe in self.by_gain(place)[:3])
        return f"{first}, {second} and {third}"

    def gain(self, place: str, pe: str) -> str:
        """`t5` (+.0019 [−.0004, +.0043]): the difference to none of an encoding, whichever way it goes."""
        return f"`{pe}` ({interval(self.difference(place, pe))})"

    def detectable(self, place: str, pes: Iterable[str]) -> str:
        """.0017: the largest of the smallest differences to none that the runs would show."""
        return short(max(self.difference(place, pe).detectable for pe in pes))

    def least_detectable(self, place: str, pes: Iterable[str]) -> str:
        """.0012: the same with any number of seeds."""
        return short(max(self.difference(place, pe).least_detectable for pe in pes))

    def among(self, place: str, users: str, pe: str) -> str:
        """The difference to none among the users of one bin (:mod:`where`)."""
        found = {some.name: some for some in self.bins(place)}
        if users not in found:
            raise NotBorneOut(f"{place}: no users '{users}', but {', '.join(found)}")
        return interval(found[users].gain(pe))

    def by(self, fact: str, places: Sequence[str], pe: str) -> str:
        """A row per place, a column per bin of users by one fact of their histories: the difference to none there.

        Raises NotBorneOut where the intervals of the first and the last bin of a place overlap.
        """
        lines: list[list[str]] = []
        for place in places:
            users = [some for some in self.bins(place) if some.fact == fact]
            found = [some.gain(pe) for some in users]
            if not found[0].low > found[-1].high:
                raise NotBorneOut(f"{place}: {pe} gains no more {users[0].name} than {users[-1].name}")
            if not lines:
                lines = [["model", *(some.name for some in users)], ["---"] * (1 + len(users))]
            lines.append([self.setting(place).key.model, *map(interval, found)])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def bins(self, place: str) -> list[where.BinRuns]:
        """The runs of one place in each bin of its users."""
        if place not in self._bins:
            self._bins[place] = where.bins_of(Store(self.results / place.split("/")[0]), self.setting(place))
        return self._bins[place]

    def table(self, places: Sequence[str], pes: Sequence[str]) -> str:
        """A row per place, a column per encoding: its difference to none, bold where p < .05, corrected."""
        lines = [["model and data set", "seeds", "none", *map(_name, pes)], ["---"] * (3 + len(pes))]
        for place in places:
            setting = self.setting(place)
            cells = [
                f"{_name(setting.key.model)} on {setting.key.dataset}",
                self.seeds(place),
                self.mean(place, "none"),
            ]
            for pe in pes:
                found = self.difference(place, pe) if pe in setting.runs else None
                cells.append("–" if found is None else _bold(interval(found), found.p_holm < LEVEL))
            lines.append(cells)
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def gate(self, model: str, pe: str) -> list[float]:
        """Per seed."""
        rows = pl.read_csv(self.results / "gates.csv").filter(model=model, encoding=pe)
        return rows.group_by("seed").agg(pl.col("auc").mean())["auc"].to_list()

    def tells(self, model: str, pe: str) -> bool:
        """Whether gates tell like items from unlike ones: the unlike one has the larger in four pairs of five, at every
        seed."""
        return min(self.gate(model, pe)) > 0.8

    def gates(self, models: Sequence[str], pes: Sequence[str]) -> str:
        """A row per encoding, a column per model: how often an unlike item has the larger gate, .97 ± .01, mean over
        units and heads, and standard deviation over the seeds (:mod:`gates`)."""
        lines = [["encoding", *map(_name, models)], ["---"] * (1 + len(models))]
        for pe in pes:
            each = [self.gate(model, pe) for model in models]
            lines.append([pe, *(f"{statistics.mean(one):.2f} ± {statistics.stdev(one):.2f}" for one in each)])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("| 0.", "| .").replace("± 0.", "± .")

    def parameters(self, place: str, pe: str) -> str:
        """+3,232: more than none has."""
        ours, none = ({run.parameters for run in self.runs(place, name).values()} for name in (pe, "none"))
        return f"{ours.pop() - none.pop():+,}"

    def speed(self, case: str) -> str:
        """1.07×: a figure of speed.json."""
        if case not in self._speed:
            raise NotBorneOut(f"speed.json: no case {case}")
        return f"{self._speed[case]['ratio']:.2f}×"

    @cached_property
    def _speed(self) -> dict[str, Any]:
        cases = json.loads((self.results / "speed.json").read_text(encoding="utf-8"))
        return {case["name"]: case for case in cases}


def short(value: float) -> str:
    """.0014 for 0.0014."""
    return f"{value:.4f}".replace("0.", ".", 1)


def interval(found: Difference) -> str:
    value, low, high = (f"{number:+.4f}".replace("0.", ".", 1) for number in (found.value, found.low, found.high))
    return f"{value} [{low}, {high}]".replace("-", "−")


def _cell(cell: Cell) -> str:
    return f"{cell.pe} {_varied(cell)}".strip()


def _varied(cell: Cell) -> str:
    return " ".join(f"{key}={value}" for key, value in cell.varied.items())


def _name(text: str) -> str:
    """MatchingBST for matching:MatchingBST: a model or an encoding without the modules of its classes."""
    return re.sub(r"\w+:", "", text)


def _bold(text: str, is_bold: bool) -> str:
    return f"**{text}**" if is_bold else text


def page(rows: Rows) -> str:
    """The text of docs/evidence.md."""
    sports, fuxictr, on_gpu = (f"DIN-amazon_sports{how}" for how in ("", "-fuxictr", "-gpu"))
    dien, tin, bst, sasrec = "DIEN-amazon_sports", "TIN-amazon_sports", "BST-amazon_sports", "SASRec-amazon_sports"
    tin_beauty = "TIN-amazon_beauty"
    kuairand, tin_kuairand, bst_kuairand, sasrec_kuairand = impressions = [
        f"{model}-kuairand_pure" for model in ("DIN", "TIN", "BST", "SASRec")
    ]
    tin_ml, din_ml, tin_ml_shuffled = "TIN-ml-1m", "DIN-ml-1m", "TIN-ml-1m_shuffled_all"
    shuffled = "DIN-amazon_sports_shuffled_all"
    unordered = "DIN-amazon_sports_shuffled_test"
    every, dmin = "all_encodings", "DMIN-synthetic"
    every_din, every_bst, every_sasrec = (f"{every}/{model}/synthetic" for model in ("DIN", "BST", "SASRec"))
    unsteady = ("cape", "cape_oracle", "cape_time", "dif", "euler")
    unshown = {("DIN", "alibi"), ("SASRec", "time_rope"), *(("SASRec", pe) for pe in unsteady)}
    unshown_bst = {("BST", "kerple_log")}
    weak = rows.by_gain(BST_BEAUTY)[-7:]
    if set(weak) != {"alibi", "kerple_log", "kerple_power", "fire", "fox", "time_bias", "cape_time"}:
        raise NotBorneOut(f"{BST_BEAUTY}: the least bring {', '.join(weak)}")
    for pe in rows.by_gain(BST_BEAUTY)[:3]:
        rows.level(BST_BEAUTY, pe, "naive")
    weak_sasrec = rows.by_gain(SASREC_BEAUTY)[-7:]
    if set(weak_sasrec) != set(weak):
        raise NotBorneOut(f"{SASREC_BEAUTY}: the least bring {', '.join(weak_sasrec)}")
    unshown_sasrec = {("SASRec", "kerple_power"), ("SASRec", "time_bias")}
    most_of_weak = next(pe for pe in weak_sasrec if ("SASRec", pe) not in unshown_sasrec)
    if rows.by_gain(SASREC_BEAUTY)[0] != "naive":
        raise NotBorneOut(f"{SASREC_BEAUTY}: naive does not gain most")
    chained = {(place, pe): rows.difference(place, pe, "cape") for place in BEAUTY for pe in CHAINS}
    for place, pe in chained:
        rows.level(place, pe, "cape")
    most = sorted(chained, key=lambda one: -chained[one].value)[:2]
    chains = [f"`{pe}` in {place.split('/')[1]} ({interval(chained[place, pe])})" for place, pe in most]
    steady = {
        name: one
        for name, one in rows.suite(VARIANTS).changes.items()
        if not name.startswith(("pdm_", "kernel_shared="))  # SASRec, and one that harms
    }
    least_shown = max(one.detectable for one in steady.values())
    if least_shown > min(rows.difference(BST_BEAUTY, pe).value for pe in ("kernel", "dif", "euler")) / 3:
        raise NotBorneOut(f"{VARIANTS}: differences of a third of the gains would not be shown")
    shared = [f"kernel_shared={how}" for how in ("none", "both")]
    shared_shown = max(rows.difference(VARIANTS, one, "default").detectable for one in shared)
    not_shared, both_shared = (rows.level(VARIANTS, one, "default") for one in shared)
    reorder, crop, mask = (f"pdm_contrast=0.1 pdm_augment={how}" for how in ("reorder", "crop", "mask"))
    widths = [
        (f"{pe} max_len={kept} position_dim={width}", f"{pe} max_len={kept} position_dim=16")
        for pe in FORMS[:2]
        for kept in (3, 5, 10, 20)
        for width in (8, 32, 64, 128)
    ]
    added = [(f"cape_additive max_len={kept}", f"cape max_len={kept} position_dim=16") for kept in (3, 5, 10, 20)]
    three, five, ten, twenty = (
        rows.level(LENGTHS, f"cape max_len={kept}", f"cape_constant max_len={kept}") for kept in (3, 5, 10, 20)
    )
    constant_shown = max(
        rows.difference(LENGTHS, f"cape max_len={kept}", f"cape_constant max_len={kept}").detectable
        for kept in (3, 5, 10, 20)
    )
    contrasted = [f"pdm {how}" for how in (reorder, crop, mask)]
    means = [rows.mean(VARIANTS, one).split()[0] for one in contrasted]
    if max(rows.difference(VARIANTS, one).value for one in contrasted) > 0:
        raise NotBorneOut(f"{VARIANTS}: PDM with its contrast ends above what BST has without positions")
    spreads = sorted(rows.spread(every_sasrec, pe) for pe in unsteady)
    contexts = built_in, bst_built_in, sasrec_built_in = [f"{model}-synthetic_context" for model in MODELS]
    places = [*contexts, sports, dien, tin, bst, sasrec, *impressions, din_ml, tin_ml]
    few, many = "to 7 items", "over 22 items"
    fresh, stale = "to 0 days", "over 92 days"
    newest_like, older_like = "to 0 unlike items", "over 3 unlike items"
    for pe in ENCODINGS:
        rows.above(bst, pe)
        rows.above(sasrec, pe)
        if pe != "naive":
            rows.level(sports, pe, "naive")
        rows.level("DIEN-synthetic", pe)
    for pe in FORMS[1:]:
        rows.level(kuairand, pe, "cape")
    rows.level(kuairand, "cape_cosine", "cape_constant")
    every_gain = {place: [rows.difference(place, pe).value for pe in ENCODINGS] for place in (sports, bst, sasrec)}
    for place in (bst, sasrec):
        if min(every_gain[place]) < 3 * max(every_gain[sports]):
            raise NotBorneOut(f"{place}: gains are not several times those of DIN")
    for pe in ("naive", *FORMS[:2]):
        if not rows.difference(shuffled, pe).high < rows.difference(sports, pe).value:
            raise NotBorneOut(f"{shuffled}: {pe} may gain as much as with order")
    if not max(every_gain[sports]) < min(rows.difference(EVERY_BEAUTY, pe).detectable for pe in FORMS):
        raise NotBorneOut(f"{EVERY_BEAUTY}: the runs would show what position brings DIN on amazon_sports")
    for model in MODELS:
        if rows.tells(model, "cape") or not rows.tells(model, "cape_cosine"):
            raise NotBorneOut(f"gates.csv: not those of cape_cosine alone tell in {model}")
    if not (rows.tells(MATCHING[0], "cape") and all(rows.tells(model, "cape_cosine") for model in MATCHING)):
        raise NotBorneOut("gates.csv: not those of CAPE in MatchingBST and of cape_cosine in both tell")
    bst_matching, sasrec_matching = matching = [f"matching/{model}/synthetic_context" for model in MATCHING]
    bst_alone, sasrec_alone = alone = [f"matching/{model}/synthetic_context" for model in ("BST", "SASRec")]
    return filled(f"""# What position brings

What the runs in [benchmark/results](../benchmark/results/README.md) say so far, conclusions first. `make tables` writes
this page: it takes every number from the rows of these runs, and fails where they do not bear out a comparison in the
text. Differences are in gAUC, with 95 % intervals for other users and newly trained runs
([how](results.md#statistics)); p is corrected for the encodings of a table.

## In short

- **On a purchase log position brings DIN one to three thousandths of gAUC.** `cape_constant`, which knows plain
  distance alone, is {rows.above(sports, "cape_constant")} above `none`, and CAPE is level with it:
  {rows.level(sports, "cape", "cape_constant")}. No encoding is shown to be above `naive` (`cape_constant`:
  {rows.level(sports, "cape_constant", "naive")}, uncorrected), nor `naive` above `none`
  ({rows.level(sports, "naive")}). TIN gains as much by `cape_constant` ({rows.above(tin, "cape_constant")}), CAPE
  ({rows.above(tin, "cape")}), `naive` ({rows.above(tin, "naive")}) and CoPE ({rows.above(tin, "cope")}); of
  RoPE no gain is shown ({rows.level(tin, "rope")}).
- **On a log of impressions it brings less, and can do harm.** On KuaiRand-Pure, real impressions labelled by long
  views, CAPE brings DIN {rows.above(kuairand, "cape")}, `cape_constant` {rows.above(kuairand, "cape_constant")} and
  `cape_cosine` {rows.above(kuairand, "cape_cosine")}, level with one another. CoPE brings nothing
  ({rows.level(kuairand, "cope")}). `naive`, whose vectors are pooled with the
  items, brings {rows.below(kuairand, "naive")}, RoPE {rows.below(kuairand, "rope")}. BST, which ends there at
  {rows.mean(bst_kuairand, "none")} without positions, DIN at {rows.mean(kuairand, "none")}, loses by each that was
  tried in it: by CAPE {rows.below(bst_kuairand, "cape")}, RoPE {rows.below(bst_kuairand, "rope")}, `naive`
  {rows.below(bst_kuairand, "naive")}. SASRec, at {rows.mean(sasrec_kuairand, "none")}, gains nothing either: `naive`
  brings it {rows.below(sasrec_kuairand, "naive")}, and by CAPE ({rows.level(sasrec_kuairand, "cape")}) and RoPE
  ({rows.level(sasrec_kuairand, "rope")}) no difference is shown. In TIN, at {rows.mean(tin_kuairand, "none")},
  nothing is shown of any of {rows.none_shown(tin_kuairand)} encodings: CAPE
  {rows.level(tin_kuairand, "cape")}, `naive` {rows.level(tin_kuairand, "naive")}. TIN, BST and SASRec have three seeds
  there.
- **On purchases BST and SASRec need it most.** Without positions they are far below DIN, SASRec though its causal
  attention tells them, and every encoding brings them more than any brings DIN: BST with `naive`
  {rows.above(bst, "naive")}, CAPE {rows.above(bst, "cape")}, `cape_constant` {rows.above(bst, "cape_constant")}; SASRec
  {rows.above(sasrec, "naive")}, {rows.above(sasrec, "cape")} and {rows.above(sasrec, "cape_constant")}.
  BST's own, a vector beside each item's, brings
  as much ({rows.above(bst, "native")}; against `naive` {rows.level(bst, "native", "naive")}, uncorrected), RoPE less
  (against `naive` {rows.below(bst, "rope", "naive")}). On a smaller log, where nothing is shown of any encoding in DIN,
  CAPE brings BST {rows.above(BST_BEAUTY, "cape")} and SASRec {rows.above(SASREC_BEAUTY, "cape")}, `naive`
  {rows.above(BST_BEAUTY, "naive")} and {rows.above(SASREC_BEAUTY, "naive")}.
- **On MovieLens 1M, where users choose one item right after another, it brings more.** With the newest 20 items and
  three epochs DIN ends at {rows.mean(din_ml, "none")} without positions; RoPE brings it {rows.above(din_ml, "rope")},
  CAPE {rows.above(din_ml, "cape")} (two seeds). TIN ends at {rows.mean(tin_ml, "none")}; `naive` brings it
  {rows.above(tin_ml, "naive")}, the control `{MATCH}` {rows.above(tin_ml, MATCH)}, RoPE nothing
  ({rows.level(tin_ml, "rope")}), and of CAPE, whose seeds differ much, no gain is shown ({rows.level(tin_ml, "cape")}).
  **Much of what `naive` brings TIN there is not order**: with histories in random order it brings
  {rows.above(tin_ml_shuffled, "naive")}, CAPE nothing ({rows.level(tin_ml_shuffled, "cape")}). A reason may be that
  its vectors, which are added to items and target, give TIN's products a part that is the target's alone.
- **In DIEN, whose GRU reads histories in order, RoPE and `cape_constant` bring two thousandths.** It ends at
  {rows.mean(dien, "none")} without position, DIN at {rows.mean(sports, "none")}. RoPE brings
  {rows.above(dien, "rope")}, `cape_constant` {rows.above(dien, "cape_constant")}; no gain is shown of
  CAPE ({rows.level(dien, "cape")}), `cape_cosine` ({rows.level(dien, "cape_cosine")}), CoPE
  ({rows.level(dien, "cope")}) and `naive` ({rows.level(dien, "naive")}), which is
  below RoPE ({rows.below(dien, "naive", "rope")}).
- **What is called context in CAPE has shown no effect.** On a built-in set where context is all there is, CAPE is level
  with the same encoding whose gates are all ½: {rows.level(built_in, "cape", "cape_constant")}. Both find distance. On
  the purchase log it is not above it in any of five models (DIEN {rows.level(dien, "cape", "cape_constant")}, TIN
  {rows.level(tin, "cape", "cape_constant")}, BST {rows.below(bst, "cape", "cape_constant")}, SASRec
  {rows.level(sasrec, "cape", "cape_constant")}, each uncorrected), nor in BST and SASRec on a smaller one
  ({rows.level(BST_BEAUTY, "cape", "cape_constant")} and {rows.below(SASREC_BEAUTY, "cape", "cape_constant")},
  uncorrected) or in DIN on the impressions
  ({rows.level(kuairand, "cape", "cape_constant")}), nor in DIN with three to twenty items of the history and tables of
  five widths ([below](#differences-to-none)). Its gates learn
  only where attention is made to match like items ([Do gates learn?](#do-gates-learn)).
- **Gates with a likeness of their own find context where there is some.** In DIN `cape_cosine` is
  {rows.above(built_in, "cape_cosine", "cape")} above CAPE on that set, near gates that are told the categories
  ({rows.mean(built_in, "cape_oracle")}); in SASRec it finds it once attention matches like items
  ({rows.above(sasrec_matching, "cape_cosine", "cape")} above CAPE). On the purchase log it is level with CAPE in DIN
  ({rows.level(sports, "cape_cosine", "cape")}), DIEN ({rows.level(dien, "cape_cosine", "cape")}) and BST
  ({rows.level(bst, "cape_cosine", "cape")}), and above it in TIN
  ({rows.above(tin, "cape_cosine", "cape")}) and SASRec ({rows.above(sasrec, "cape_cosine", "cape")}), uncorrected for
  several such comparisons. In TIN that is the likeness and no context: `{MATCH}`, the same without order beside plain
  distance, is {rows.above(tin, MATCH, "cape_cosine")} above it; BST ends with it at
  {rows.mean(bst, MATCH)}, DIN at {rows.mean(sports, MATCH)} ([Context or likeness?](#context-or-likeness)).
- **Start with `cape_constant`**, on impressions with `none` beside it.
  Try `cape_cosine` beside it where histories are long and of several kinds of items in
  turn, and the control without order (`{MATCH}`) beside both: what `cape_cosine` has above the better of them is
  context.

All this is of five backbones on one purchase log, of DIN, BST and SASRec on [a smaller one](#differences-to-none), of
DIN on one log of impressions, where TIN, BST and SASRec have few encodings and three seeds, and of TIN and DIN on
MovieLens 1M, with three and two seeds and the newest 20 items of each history. DMIN on real logs and longer histories
have not been measured in this way yet. Learning rate and regularisation are those best for `none`; no encoding has
settings of its own, and what it would gain by them is not in these numbers.

## Differences to none

Bold: p < .05, corrected.

{rows.table(places, (*ENCODINGS, "native", "cape_oracle"))}

![Differences to none with their intervals](evidence-differences.png)

`none` is at chance on the built-in set by construction, but in SASRec, whose causal attention tells positions. On
amazon_sports the runs of DIN would show differences from {rows.detectable(sports, ENCODINGS)} on, those of DIEN from
{rows.detectable(dien, ENCODINGS)}, those of TIN from {rows.detectable(tin, ENCODINGS)}, those of BST
from {rows.detectable(bst, ENCODINGS)} and those of SASRec from
{rows.detectable(sasrec, ENCODINGS)} (80 % power, uncorrected):
encodings that differ by less look alike there. With any number of seeds it would be
{rows.least_detectable(sports, ENCODINGS)}, {rows.least_detectable(dien, ENCODINGS)},
{rows.least_detectable(tin, ENCODINGS)}, {rows.least_detectable(bst, ENCODINGS)} and
{rows.least_detectable(sasrec, ENCODINGS)}: the test users set that. On kuairand_pure, where seeds move `none` by
{rows.spread(kuairand, "none")}, it is {rows.detectable(kuairand, FORMS)} for the forms of CAPE.
`native` is a model's own: none in DIN and DIEN, `naive` in TIN and SASRec, in BST a vector
beside each item's.

**Training matters more than position.** By FuxiCTR's recipe (constant learning rate, early stop) and the best
settings found for it DIN ends at {rows.mean(fuxictr, "none")} without position and {rows.mean(fuxictr, "cape")} with
CAPE, by the default one at {rows.mean(sports, "none")} and {rows.mean(sports, "cape")}: a better recipe brings three
times what position does ([how it was chosen](results.md#the-recipe)). Trained anew on a GPU, with another torch, it
ends there too: {rows.mean(on_gpu, "none")} and {rows.mean(on_gpu, "cape")} ({rows.above(on_gpu, "cape")}).

**Where order counts by construction, encodings find it.** On the built-in set `synthetic`, DIN, BST and SASRec with
every encoding but `likeness`, which knows no order, five seeds
([tables](../benchmark/results/all_encodings/table.md)): no run ends below
{rows.least(every, 0.7)} (of TIN, DIEN and DMIN with seven encodings {rows.least("TIN-synthetic", 0.7)},
{rows.least("DIEN-synthetic", 0.7)} and {rows.least(dmin, 0.7)}), and
{rows.all_above(every, unshown)} encodings are above `none`. Not in DIN is ALiBi, whose slope for a single head is
nearly flat ({rows.level(every_din, "alibi")}; the option `alibi_slope`). In SASRec, whose causal attention tells
positions without one ({rows.mean(every_sasrec, "none")}; DIN {rows.mean(every_din, "none")}), the gains are smaller,
and not shown of `time_rope`, nor of `cape`, `cape_oracle`, `cape_time`, `euler` and `dif`, whose runs differ more by
the seed (standard deviation {spreads[0]} to {spreads[-1]}). In DMIN `naive` ({rows.above(dmin, "naive")}), CAPE
({rows.above(dmin, "cape")}) and RoPE ({rows.above(dmin, "rope")}) gain, CoPE does not ({rows.level(dmin, "cope")}). In
DIEN, whose GRU knows the order, no gain is shown of any encoding (CAPE {rows.level("DIEN-synthetic", "cape")}). TIN
gains from five of its six, `naive` ({rows.above("TIN-synthetic", "naive")}) and CAPE
({rows.above("TIN-synthetic", "cape")}) among them, but not from RoPE ({rows.level("TIN-synthetic", "rope")}), and
cannot: its score is the bare product of the target's and the item's embedding, without projections, so a rotation by
the distance changes the score of a pair by the pair's own phases, and a preference for the newest item, whichever it
is, would need one phase for all pairs. BST, which projects queries and keys apart, and DIN, whose MLP scores the pair,
find the order by the same rotation ({rows.above(every_bst, "rope")}, {rows.above(every_din, "rope")}).

**On a smaller purchase log nothing is shown in DIN, and much in BST and SASRec.** All three on amazon_beauty with
every encoding but `likeness` and three chains, five seeds
([tables](../benchmark/results/real_logs_all/table.md)). In DIN, of
{rows.none_shown(EVERY_BEAUTY)}, none differs from `none` ({rows.mean(EVERY_BEAUTY, "none")}) once corrected for their
number. The largest gains are those of {rows.largest(EVERY_BEAUTY)}; CAPE's is {rows.level(EVERY_BEAUTY, "cape")}, and
fixed waves (`sinusoidal`) bring {rows.level(EVERY_BEAUTY, "sinusoidal")}. The log has too few users to tell: its runs
would show differences from {rows.detectable(EVERY_BEAUTY, FORMS)} on for the forms of CAPE, more than position brings
DIN on amazon_sports.

BST, which is far below DIN here too without positions ({rows.mean(BST_BEAUTY, "none")}), gains several times that, and
{rows.all_above(BST_BEAUTY, unshown_bst)} encodings are above `none`. The most bring
{rows.largest(BST_BEAUTY)}. CAPE brings {rows.above(BST_BEAUTY, "cape")}; `dif` is
{rows.above(BST_BEAUTY, "dif", "cape")} above it and `dape` {rows.above(BST_BEAUTY, "dape", "cape")}, uncorrected for
being the two largest of {rows.none_shown(EVERY_BEAUTY)}. None of these is shown to be above `naive`
({rows.above(BST_BEAUTY, "naive")}), which varies more by the seed (standard deviation
{rows.spread(BST_BEAUTY, "naive")}). The least bring `alibi`, `kerple_log`, `kerple_power`, `fire`, `fox`, `time_bias`
and `cape_time`: at most {rows.gain(BST_BEAUTY, weak[0])}; a free value per distance (`t5`) brings
{rows.above(BST_BEAUTY, "t5")}. With gates that are told the categories (`cape_oracle`) it gains less than with CAPE's
({rows.below(BST_BEAUTY, "cape_oracle", "cape")}, uncorrected).

SASRec is as far below DIN without positions ({rows.mean(SASREC_BEAUTY, "none")}), and
{rows.all_above(SASREC_BEAUTY, unshown_sasrec)} encodings are above `none`. The most bring
{rows.largest(SASREC_BEAUTY)}. The least bring those that did in BST: `alibi`, `kerple_log`, `fire`,
`fox` and `cape_time`, at most {rows.gain(SASREC_BEAUTY, most_of_weak)}, and `kerple_power` and `time_bias`, of which no
gain is shown once corrected for their number ({rows.level(SASREC_BEAUTY, "kerple_power")} and
{rows.level(SASREC_BEAUTY, "time_bias")}); `t5` brings {rows.above(SASREC_BEAUTY, "t5")}. A learned vector per position
is enough here: against `naive`, RoPE is {rows.below(SASREC_BEAUTY, "rope", "naive")}, CoPE
{rows.below(SASREC_BEAUTY, "cope", "naive")}, CAPE {rows.below(SASREC_BEAUTY, "cape", "naive")} and `cape_cosine`
{rows.below(SASREC_BEAUTY, "cape_cosine", "naive")}; `cape_constant` is level with it
({rows.level(SASREC_BEAUTY, "cape_constant", "naive")}). Gates that are told the categories gain less than CAPE's in
SASRec too ({rows.below(SASREC_BEAUTY, "cape_oracle", "cape")}, uncorrected). No chain is shown to bring more than CAPE
alone in any of the three: the most bring {" and ".join(chains)}, against CAPE, uncorrected. The same encodings on the
set where order counts by construction are beside the three:

![Differences to none of every encoding on a purchase log, in three models, and on a built-in set](evidence-every.png)

**Of what their papers vary, two things count.** The positional kernel, DIF-SR, EulerFormer and PDMRec in BST on
amazon_beauty, as they are by default and with one thing changed, five seeds
([tables](../benchmark/results/real_logs_variants/suite.md)); p is corrected for all these changes. The kernel's L has
to be full: with one value per distance (`kernel_l=toeplitz`) it is
{rows.below(VARIANTS, "kernel_l=toeplitz", "default")} against the default, and its paper finds the same. A full U
brings nothing more ({rows.level(VARIANTS, "kernel_u=full", "default")}), nor, in SASRec, layers that share neither
factor ({not_shared}) or both ({both_shared}), where {short(shared_shown)} would be shown. In DIF
no difference is shown between ways to fuse the fields' scores (concatenated
{rows.level(VARIANTS, "dif_fusion=concat", "default")}, gated
{rows.level(VARIANTS, "dif_fusion=gate", "default")}, both
against their sum), nor by predicting attributes beside ({rows.level(VARIANTS, "dif_predict=1.0", "default")}).
EulerFormer has a learned vector per position, as `naive`, and nothing that it adds is
shown to matter: not the adaptation (without it {rows.level(VARIANTS, "euler_adaptation=none", "default")}), the rotary
embedding ({rows.level(VARIANTS, "euler_rotary_embedding=False", "default")}), the rotation, left out
({rows.level(VARIANTS, "euler_frequencies=none", "default")}) or learned
({rows.level(VARIANTS, "euler_frequencies=learned", "default")}), or the phase contrast
({rows.level(VARIANTS, "euler_contrast=0.0001", "default")}). Differences from {short(least_shown)} on would be shown, a
third of what these three encodings gain. PDMRec's contrast harms: with the paper's weight of .1, in batches of 1,024,
it takes away all that positions bring BST, with items reordered
({rows.below(VARIANTS, reorder, "default")}), cropped ({rows.below(VARIANTS, crop, "default")}) and
masked ({rows.below(VARIANTS, mask, "default")}; {means[0]}, {means[1]} and {means[2]}, without positions
{rows.mean(BST_BEAUTY, "none")}).

![Differences of each change of an encoding to the encoding by default](evidence-variants.png)

**Ten items are enough on a log of short histories, and no width of CAPE's table is shown to be better.**
CAPE's Figures 3 and 4, in DIN on amazon_sports, where half of the users have four items or fewer, three seeds
([tables](../benchmark/results/real_logs_context_length/suite.md)); runs of all five widths together where none is
named, uncorrected. Of histories cut to the newest five items instead of three CAPE gains
{rows.above(LENGTHS, "cape max_len=5", "cape max_len=3")}, of ten instead of five
{rows.above(LENGTHS, "cape max_len=10", "cape max_len=5")}, of twenty instead of ten nothing that is shown
({rows.level(LENGTHS, "cape max_len=20", "cape max_len=10")}); `none` gains as much by five instead of three
({rows.above(LENGTHS, "none max_len=5", "none max_len=3")}). No `position_dim` from 8 to 128 is shown to differ from 16,
with CAPE or `cape_constant` ({rows.all_level(LENGTHS, widths)} comparisons, corrected; three seeds a cell show only
large differences). CAPE is level with `cape_constant` at every length: {three}, {five}, {ten} and {twenty}, where
{short(constant_shown)} would be shown. Added to the item embedding instead of the logit (`cape_additive`) the position
is not shown to bring less at any length ({rows.all_level(LENGTHS, added)} comparisons; at ten items
{rows.level(LENGTHS, added[2][0], added[2][1])}); the paper finds that this harms DIN.

![Differences to none by how many items are kept](evidence-lengths.png)

## Do gates learn?

On `synthetic_context` a click depends on how many unlike items followed the last like one: gates should be larger at
unlike items than at like ones. How often they are, of an unlike and a like item (.5: the gate does not tell), three
seeds, five of the last two columns:

{rows.gates((*MODELS, *MATCHING), ("cape", "cape_cosine"))}

In the models as they are CAPE's gates do not: they are made of the attention's own logits, and in DIN go one way or the
other by the seed. Those with a likeness of their own do, in every model. In DIN that is what brings the gain. In BST
and SASRec it brings nothing, but nor do gates that are told the categories: `cape_oracle` against CAPE
{rows.level(bst_built_in, "cape_oracle", "cape")} and {rows.level(sasrec_built_in, "cape_oracle", "cape")},
{rows.seeds(bst_built_in)} seeds.

**What seems to be missing there is the match.** A click depends on what follows the target's own item in the history,
and queries and keys that are projected apart have to learn to find it. Where both start as one
projection, with larger embeddings
and one head ([MatchingBST and MatchingSASRec](../benchmark/matching.py), {rows.seeds(sasrec_matching)} seeds), items
attend to those like them from the first step, and context counts:

{rows.table(matching + alone, ("cape", "cape_constant", "cape_cosine", "cape_oracle"))}

There CAPE's gates learn too, less sharply in SASRec, where it is {rows.above(sasrec_matching, "cape", "cape_constant")}
above `cape_constant`. The same embeddings and head without this start, the last two rows, change nothing:
`cape_oracle` is level with `cape_constant` ({rows.level(bst_alone, "cape_oracle", "cape_constant")} and
{rows.level(sasrec_alone, "cape_oracle", "cape_constant")}). So CAPE needs attention logits that are a likeness. Its
authors take them for one; nothing in these models makes them so. This start is a control and no advice: attention that
matches sees less of the rest, and by distance alone (`cape_constant`) MatchingBST ends at
{rows.mean(bst_matching, "cape_constant")} and MatchingSASRec at {rows.mean(sasrec_matching, "cape_constant")}, the same
without the start at {rows.mean(bst_alone, "cape_constant")} and {rows.mean(sasrec_alone, "cape_constant")}.

## Context or likeness?

Gates of a likeness tell attention two things: how many unlike items came after an item, which is context, and by the
item's own gate whether it is like the target, which is no matter of position. A control has the own gate alone
([`likeness`](encodings.md#likeness)), beside plain distance:

{rows.table(MATCHED, ("cape_constant", "cape_cosine", "cape_oracle", "likeness", MATCH))}

Where context is all there is, the control is level with `cape_constant`
({rows.level(built_in, MATCH, "cape_constant")}) and `cape_cosine` far above it
({rows.above(built_in, "cape_cosine", MATCH)}): what that finds is context. In TIN on the
purchase log it is the other way round. The control is above `cape_cosine`
({rows.above(tin, MATCH, "cape_cosine")}), and gates that are told the categories are level with plain distance
({rows.level(tin, "cape_oracle", "cape_constant")}): what `cape_cosine` has above plain distance there
({rows.above(tin, "cape_cosine", "cape_constant")}, uncorrected) is a likeness that TIN lacks. BST, whose
queries and keys are projected apart, lacks it too: there the
control is {rows.above(bst, MATCH, "cape_constant")} above `cape_constant`, though `cape_cosine` is level with it
({rows.level(bst, "cape_cosine", "cape_constant")}), and ends at {rows.mean(bst, MATCH)}, DIN with the same at
{rows.mean(sports, MATCH)}. DIN, whose score is given the products of target and item, does not lack it: there the
control is level with `cape_constant` ({rows.level(sports, MATCH, "cape_constant")}). In TIN the likeness
helps wherever the like item lies: where more than three unlike items came after it, `cape_cosine` is
{rows.among(tin, older_like, "cape_cosine")} against `none`, the control {rows.among(tin, older_like, MATCH)}.

**Logs that did not choose it.** The control was found on amazon_sports. On amazon_beauty TIN gains
{rows.above(tin_beauty, MATCH)} by it: by distance alone {rows.above(tin_beauty, "cape_constant")}, by the likeness
alone {rows.above(tin_beauty, "likeness")}, one as much as the other
({rows.level(tin_beauty, "likeness", "cape_constant")}). Both together are
above the likeness alone ({rows.above(tin_beauty, MATCH, "likeness")}) and `cape_cosine`
({rows.above(tin_beauty, MATCH, "cape_cosine")}), but not shown to be above distance alone
({rows.level(tin_beauty, MATCH, "cape_constant")}, all uncorrected). On the impressions of kuairand_pure no gain
of TIN is shown by it ({rows.level(tin_kuairand, MATCH)}, three seeds), and none by distance alone
({rows.level(tin_kuairand, "cape_constant")}); BST loses by it
({rows.below(bst_kuairand, MATCH)}), and so does SASRec
({rows.below(sasrec_kuairand, MATCH)}). On ml-1m it brings TIN {rows.above(tin_ml, MATCH)}, level with `naive`
({rows.level(tin_ml, MATCH, "naive")}). So it is a thing to try on purchases and other choices, and no default.

## Where position helps

Users of amazon_sports by what their histories are like; intervals are not corrected for their number.

![Differences to none by length, age, unlike items and ties](evidence-where.png)

**Fresh histories gain most, stale ones least.** CAPE against `none`, by how long before the target the last purchase
was (to 0 days: on the same day). The length of the history decides nothing that these runs could show.

{rows.by("age", (sports, tin, bst, sasrec), "cape")}

In DIEN this is not shown: {rows.among(dien, fresh, "cape")} on the same day, {rows.among(dien, stale, "cape")} after 92
days. The rest is of DIN:

- **Position is a preference for the newest.** Where the target's category is that of the newest item, `naive` is
  {rows.among(sports, newest_like, "naive")}, CAPE {rows.among(sports, newest_like, "cape")} and `cape_constant`
  {rows.among(sports, newest_like, "cape_constant")}; where more than three unlike items came after the last like one
  {rows.among(sports, older_like, "naive")}, {rows.among(sports, older_like, "cape")} and
  {rows.among(sports, older_like, "cape_constant")}. These are rows that were clicked: what they lose, others that were
  not clicked lose too, and on the whole position gains. In BST on amazon_beauty CAPE is
  {rows.among(BST_BEAUTY, newest_like, "cape")} where it is that of the newest item, and
  {rows.among(BST_BEAUTY, older_like, "cape")} after more than three; in SASRec `naive` is
  {rows.among(SASREC_BEAUTY, newest_like, "naive")} and {rows.among(SASREC_BEAUTY, older_like, "naive")}.
- **Pooled positions harm long histories.** On kuairand_pure `naive` is {rows.among(kuairand, few, "naive")} against
  `none` where histories have up to 7 items, and {rows.among(kuairand, many, "naive")} where they have over 22; CAPE
  {rows.among(kuairand, few, "cape")} and {rows.among(kuairand, many, "cape")}.
- **What encodings gain, they take from the order.** The same trainings, tested on histories in random order, which
  `none` does not notice: `naive` falls below it ({rows.below(unordered, "naive")}), CAPE and `cape_constant` lose their
  gain ({rows.level(unordered, "cape")} and {rows.level(unordered, "cape_constant")}, uncorrected intervals);
  {rows.seeds(unordered)} seeds.
- **Without order they gain nothing.** Where the items of every history are in random order, in training and after,
  `naive` is {rows.below(shuffled, "naive")} against `none`, CAPE {rows.level(shuffled, "cape")} and `cape_constant`
  {rows.level(shuffled, "cape_constant")}; {rows.seeds(shuffled)} seeds. Their intervals end below the gains with order.

![Differences to none with histories in order and in random order](evidence-order.png)

## What it costs

A training step of DIN with an encoding, against one without, at the sizes of AmazonElectronics: `naive`
{rows.speed("encoding.naive.DIN.amazon")}, `rope` {rows.speed("encoding.rope.DIN.amazon")}, `cope`
{rows.speed("encoding.cope.DIN.amazon")}, `cape` {rows.speed("encoding.cape.DIN.amazon")}, `kernel`
{rows.speed("encoding.kernel.DIN.amazon")}, `euler` {rows.speed("encoding.euler.DIN.amazon")}; in SASRec `cape`
{rows.speed("encoding.cape.SASRec.amazon")}, `rope` {rows.speed("encoding.rope.SASRec.amazon")}, `euler`
{rows.speed("encoding.euler.SASRec.amazon")}. Parameters more than `none` on amazon_sports: `naive`
{rows.parameters(sports, "naive")}, `cape` {rows.parameters(sports, "cape")}, `cape_cosine`
{rows.parameters(sports, "cape_cosine")}. The others, and requests: [Performance](performance.md).

## Beside the papers

The CAPE paper reports gains of .001 to .006 gAUC over `none` on two sets, five seeds each, and names context as their
source. Gains of this size are what plain distance brings here. Its epochs were selected on the test rows, as are those
of the sets' published configurations; on KuaiVideo the histories of the published files are the oldest hundred items,
not the newest; and no control without context was run. `ctr-pe benchmark --suite cape_table2` adds that control.
""")


def filled(text: str) -> str:
    """Paragraphs and points in lines of like length, as numbers make them longer; tables and figures stay."""
    blocks = []
    for block in text.strip().split("\n\n"):
        if block.startswith(("#", "|", "!")):
            blocks.append(block)
        elif block.startswith("- "):
            points = block.removeprefix("- ").split("\n- ")
            blocks.append("\n".join(_fill("- ", point, "  ") for point in points))
        else:
            blocks.append(_fill("", block, ""))
    return "\n\n".join(blocks) + "\n"


def _fill(first: str, text: str, indent: str) -> str:
    whole = re.sub(r" (\[[+−].*?\])", lambda found: GLUE + found[1].replace(" ", GLUE), " ".join(text.split()))
    how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(whole, 120, initial_indent=first, subsequent_indent=indent, **how).replace(GLUE, " ")


def draw(rows: Rows, folder: Path) -> None:
    """The page's figures."""
    import matplotlib.pyplot as plt

    places = [f"{model}-amazon_sports" for model in ("DIN", "DIEN", "TIN", "BST", "SASRec")]
    places += [f"{model}-kuairand_pure" for model in ("DIN", "TIN", "BST", "SASRec")]
    places += [f"{model}-ml-1m" for model in ("DIN", "TIN")]
    places += [f"{model}-synthetic_context" for model in ("DIN", "SASRec")]
    places += [f"matching/{MATCHING[1]}/synthetic_context"]
    figure, axes = plt.subplots(3, 5, figsize=(13.5, 8.1), layout="constrained")
    for panel in axes.flat[len(places) :]:
        panel.set_axis_off()
    for panel, place in zip(axes.flat[: len(places)], places, strict=True):
        key = rows.setting(place).key
        _draw_differences(panel, rows, place, f"{_name(key.model)} on\n{key.dataset}")
    figure.supxlabel(GAINS, fontsize=9)
    figure.savefig(folder / "evidence-differences.png", dpi=120)
    plt.close(figure)
    every = {f"{model} on amazon_beauty": f"real_logs_all/{model}/amazon_beauty" for model in MODELS}
    every["DIN on synthetic"] = "all_encodings/DIN/synthetic"
    figure, axes = plt.subplots(1, 4, figsize=(10.8, 6.0), layout="constrained", sharey=True)
    for panel, (title, place) in zip(axes, every.items(), strict=True):
        _draw_differences(panel, rows, place, title, rows.by_gain(EVERY_BEAUTY), of_all=True)
    axes[0].set_ylim(len(rows.by_gain(EVERY_BEAUTY)), -1)  # the axis is shared, and each panel turned it round
    figure.supxlabel(GAINS, fontsize=9)
    figure.savefig(folder / "evidence-every.png", dpi=120)
    plt.close(figure)
    figure, panel = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    changed = {
        f"{name} in SASRec" if name.startswith("kernel_shared=") else name: one
        for name, one in rows.suite(VARIANTS).changes.items()
    }
    _draw_lines(panel, list(changed), changed)
    panel.set_xlabel("gAUC − the encoding by default, 95 % interval", fontsize=9)
    figure.savefig(folder / "evidence-variants.png", dpi=120)
    plt.close(figure)
    figure, axes = plt.subplots(1, 4, figsize=(10.8, 3.8), layout="constrained", sharey=True, sharex=True)
    lengths = rows.suite(LENGTHS).gains
    for panel, kept in zip(axes, (3, 5, 10, 20), strict=True):
        here = {_at_length(name): one for name, one in lengths.items() if f"max_len={kept}" in name.split()}
        _draw_lines(panel, list(here), here)
        panel.set_title(f"newest {kept} items", fontsize=9)
        panel.locator_params(axis="x", nbins=3)
    axes[0].set_ylim(len(here) - 0.5, -0.5)  # the axis is shared, and each panel turned it round
    figure.supxlabel(GAINS, fontsize=9)
    figure.savefig(folder / "evidence-lengths.png", dpi=120)
    plt.close(figure)
    orders = {"in order": "", "shuffled at test time": "_shuffled_test", "shuffled in training too": "_shuffled_all"}
    figure, axes = plt.subplots(1, 3, figsize=(10.8, 2.0), layout="constrained", sharex=True)
    for panel, (title, copy) in zip(axes, orders.items(), strict=True):
        _draw_differences(panel, rows, f"DIN-amazon_sports{copy}", title, ("naive", "cape", "cape_constant"))
    figure.supxlabel(GAINS, fontsize=9)
    figure.savefig(folder / "evidence-order.png", dpi=120)
    plt.close(figure)
    sports = rows.setting("DIN-amazon_sports")
    shown = [pe for pe in where.SHOWN if pe in sports.runs]
    where.draw(rows.bins("DIN-amazon_sports"), shown, folder / "evidence-where.png")


def _at_length(name: str) -> str:
    """cape, 16 wide, for cape max_len=5 position_dim=16."""
    return re.sub(r" position_dim=(\d+)", r", \1 wide", re.sub(r" max_len=\d+", "", name))


def _draw_differences(
    panel: Axes,
    rows: Rows,
    place: str,
    title: str,
    pes: Sequence[str] = (*ENCODINGS, "native", "cape_oracle"),
    of_all: bool = False,
) -> None:
    """The differences to none of one table, those of its encodings that are among ``pes``; ``of_all``: a line for each
    of these, empty where the table lacks it."""
    there = {pe: rows.difference(place, pe) for pe in pes if pe in rows.setting(place).runs}
    _draw_lines(panel, list(pes if of_all else there), there)
    panel.margins(y=0.15)
    panel.set_title(title, fontsize=9)
    panel.locator_params(axis="x", nbins=3)
    panel.tick_params(axis="x", labelsize=8)


def _draw_lines(panel: Axes, shown: Sequence[str], found: Mapping[str, Difference]) -> None:
    """A line for each name, from top to bottom, with the interval of its difference if there is one."""
    for name, one in found.items():
        at = shown.index(name)
        panel.plot([one.low, one.high], [at, at], color="#1f4e79", linewidth=2)
        panel.plot(one.value, at, "s", color="#1f4e79", markersize=5)
    panel.axvline(0, color="#9aa0a6", linewidth=1, zorder=0)
    panel.set_yticks(range(len(shown)), shown)
    panel.invert_yaxis()
    panel.spines[["top", "right"]].set_visible(False)


def main(root: Path = ROOT) -> None:
    rows = Rows(root / "benchmark" / "results")
    (root / "docs" / "evidence.md").write_text(page(rows), encoding="utf-8")
    draw(rows, root / "docs")


if __name__ == "__main__":
    main()
