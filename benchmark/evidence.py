"""Writes docs/evidence.md: what the published runs say, every number taken from their rows (make tables).

A sentence that compares names its claim, and the build fails where the runs do not bear it out: ``above`` and ``below``
need a difference with p < .05, corrected for the number of encodings in its table; ``level`` needs that there is none.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ctr_pe.evaluation.paired import LEVEL, Difference
from ctr_pe.study.differences import BASELINES, Runs, Setting, between, settings
from ctr_pe.study.store import Store

ROOT = Path(__file__).resolve().parents[1]


class NotBorneOut(Exception):
    """A sentence of the page that its runs do not support."""


@dataclass
class Rows:
    """Numbers of the folder of results. A place is FOLDER, or FOLDER/MODEL/DATASET where it has several tables."""

    results: Path
    _read: dict[str, list[Setting]] = field(default_factory=dict)

    def setting(self, place: str) -> Setting:
        folder, *rest = place.split("/")
        if folder not in self._read:
            self._read[folder] = settings(Store(self.results / folder))
        found = [one for one in self._read[folder] if not rest or [one.key.model, one.key.dataset] == rest]
        if len(found) != 1:
            raise NotBorneOut(f"{place}: {len(found)} tables of this name, not one")
        return found[0]

    def runs(self, place: str, pe: str) -> Runs:
        """Raises NotBorneOut if there are none."""
        of_pe = self.setting(place).runs.get(pe)
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

    def seeds(self, place: str) -> int:
        """Of each encoding. Raises NotBorneOut if they have different numbers of them."""
        counts = {len(runs) for runs in self.setting(place).runs.values()}
        if len(counts) > 1:
            raise NotBorneOut(f"{place}: encodings of {' and '.join(map(str, sorted(counts)))} seeds")
        return counts.pop()

    def difference(self, place: str, ours: str, theirs: str = "none") -> Difference:
        """In gAUC; p corrected for the table's encodings if ``theirs`` is a baseline of tables."""
        mine, others = self.runs(place, ours), self.runs(place, theirs)
        setting = self.setting(place)
        if theirs in BASELINES and ours not in BASELINES[: BASELINES.index(theirs)]:
            return setting.differences(theirs)[ours]["gAUC"]
        return between(setting.statistics, {0: (mine, others)})[0]["gAUC"]

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

    def detectable(self, place: str, pes: Iterable[str]) -> str:
        """.0017: the largest of the smallest differences to none that the runs would show."""
        return short(max(self.difference(place, pe).detectable for pe in pes))

    def table(self, places: Sequence[str], pes: Sequence[str]) -> str:
        """A row per place, a column per encoding: its difference to none, bold where p < .05, corrected."""
        lines = [["model and data set", "seeds", "none", *pes], ["---"] * (3 + len(pes))]
        for place in places:
            setting = self.setting(place)
            cells = [f"{setting.key.model} on {setting.key.dataset}", str(self.seeds(place)), self.mean(place, "none")]
            for pe in pes:
                found = self.difference(place, pe) if pe in setting.runs else None
                cells.append("–" if found is None else _bold(interval(found), found.p_holm < LEVEL))
            lines.append(cells)
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

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


def _bold(text: str, is_bold: bool) -> str:
    return f"**{text}**" if is_bold else text


def page(rows: Rows) -> str:
    """The text of docs/evidence.md."""
    return ""


def main(root: Path = ROOT) -> None:
    (root / "docs" / "evidence.md").write_text(page(Rows(root / "benchmark" / "results")), encoding="utf-8")


if __name__ == "__main__":
    main()
