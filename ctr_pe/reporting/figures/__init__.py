"""``ctr-pe draw``: a picture of what encodings do to attention, before and after training."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ctr_pe.evaluation.paired import mean_sd
from ctr_pe.reporting.figures.measure import UNITS, Attention, measure, units_of
from ctr_pe.reporting.figures.panels import (
    AFTER,
    BEFORE,
    FEWEST,
    INITIAL,
    KINDS,
    MEAN,
    RINGS,
    Image,
    Lines,
    Panel,
    attention,
    merged,
    of_links,
)
from ctr_pe.reporting.figures.runs import Drawn, Wanted, drawn, some_requests
from ctr_pe.utils.errors import UserError, counted, nearest

SUFFIXES = (".png", ".svg", ".pdf")
SIZES = {"page": 7.0, "column": 3.35}
"""Inches: the width of the text on a paper's page, and of one of its two columns."""
REQUESTS = 1000
DPI = 300
LONGEST = 100


def picture(
    out: Path,
    wanted: Wanted,
    only: Sequence[str] = (),
    size: str = "page",
    longest_histories: int | None = None,
    dpi: int = DPI,
) -> None:
    """Draw what encodings do into the file ``out``: a grid with an encoding per column, a kind of panel per row.

    ``only``: kinds of panels, of ``KINDS``; all by default. ``size``: of ``SIZES``. ``longest_histories``: measured on
    so many test rows, those with the longest histories; by default on ``REQUESTS`` random ones. ``dpi``: pixels of an
    inch.

    Raises:
        UserError: Matplotlib is not installed, an unknown kind of picture, panel or size, an unknown name, missing
            runs, weights or data.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("ctr-pe draw needs Matplotlib: pip install 'ctr_pe[draw]'") from None
    suffix = Path(out).suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"--out {out}: no such kind of picture: {nearest(suffix, SUFFIXES)}")
    named: list[tuple[str, str, Iterable[str]]] = [("size", size, SIZES), *(("only", name, KINDS) for name in only)]
    for option, name, choices in named:
        if name not in choices:
            what = "panel" if option == "only" else option
            raise UserError(f"--{option} {name}: no such {what}: {nearest(name, choices)}")
    from ctr_pe.reporting.figures.figure import draw

    dataset, found = drawn(wanted)
    model = found[0].before
    batch = some_requests(dataset, model, longest_histories or REQUESTS, longest_histories is not None)
    longest = _longest(model.groups[0], batch)
    units = len(units_of(model))
    by_seed: dict[str, list[list[Panel]]] = {}
    first: dict[str, list[list[Attention]]] = {}
    for one in (replace(one) for one in found):  # a copy keeps its models no longer than its turn
        moments = [(INITIAL if one.weights is None else BEFORE, measure(one.before, batch, longest))]
        if one.weights is not None:
            moments.append((AFTER, measure(one.after, batch, longest)))
        by_seed.setdefault(one.pe, []).append([attention(moments), *of_links(moments)])
        first.setdefault(one.pe, []).append(moments[0][1])
    columns = {pe: merged(of_seeds) for pe, of_seeds in by_seed.items()}
    if only:
        there = {panel.name for panels in columns.values() for panel in panels}
        for name in only:
            if name not in there:
                raise UserError(f"--only {name}: {', '.join(columns)} have no such panel: {nearest(name, there)}")
        columns = {pe: [panel for panel in panels if panel.name in only] for pe, panels in columns.items()}
    seeds = list(dict.fromkeys(one.run.seed for one in found))
    title = f"{found[0].run.model} on {dataset.dataset_id}, " + (
        f"mean of {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    )
    panels = [panel for of_column in columns.values() for panel in of_column]
    requests = len(batch[dataset.label])
    places = _places(panels, requests, longest)
    notes = _notes(found, first, panels, requests, seeds, units)
    draw(out, title, [*notes[:1], *places, *notes[1:]], columns, SIZES[size], dpi)
    print("\n  ".join([f"{out}: {title}", *places]), file=sys.stderr)


def _longest(group: Any, batch: Any) -> int:
    """Largest offset from the query that is shown: the length that nine in ten histories do not exceed."""
    counts = batch.lengths[group.history[0]].clamp(max=group.max_len)
    return max(2, min(LONGEST, int(counts.float().quantile(0.9))))


def _places(panels: Sequence[Panel], requests: int, longest: int) -> list[str]:
    """How many requests have an item at a place, and why the curves end where they do."""
    beyond = "one request in ten reaches further" if longest < LONGEST else "no further places are shown"
    found = [(of.curves[0].x, of.requests) for of in panels if isinstance(of, Lines) and of.requests is not None]
    if not found:
        return [f"Shown up to {longest} items back: {beyond}."]
    x, rows = found[0]
    if requests == 1:
        return [f"Its newest {x[-1]} items." if x[-1] >= LONGEST else f"Its {x[-1]} items."]
    counts = ", ".join(f"{rows[index]:,} at {x[index]}" for index in dict.fromkeys([0, len(x) // 2, len(x) - 1]))
    few = f"fewer than {min(FEWEST, requests)} of {requests:,} requests reach further"
    return [
        f"Requests with an item at a place: {counts}. Cut off after {x[-1]}: {beyond if x[-1] >= longest else few}."
    ]


def _notes(
    found: Sequence[Drawn],
    first: Mapping[str, Sequence[Sequence[Attention]]],
    panels: Sequence[Panel],
    requests: int,
    seeds: Sequence[int],
    units: int,
) -> list[str]:
    """What the reader must know; ``first``: what each encoding does at the first moment, by seed."""
    at_first = "before training" if (trained := found[0].weights is not None) else "as initialised"
    when = "Dashed: before training, solid: after." if trained else "As initialised."
    lines = [f"{when} {counted(requests, 'test request')}; items are counted back from the newest, the query."]
    if len(seeds) > 1:
        row = list(seeds) == list(range(seeds[0], seeds[-1] + 1))
        named = f"{seeds[0]} to {seeds[-1]}" if row else ", ".join(map(str, seeds))
        lines[0] += f" Bands: ± one standard deviation over seeds {named}."
    effects = {
        pe: [one for of_seed in seeds for unit in of_seed for one in unit.effects if one is not None]
        for pe, seeds in first.items()
    }
    if any(one.pe.num_heads > 1 for of_pe in effects.values() for one in of_pe):
        lines[0] += " Heads are averaged where they are not named."
    if left_out := sum(one.left_out for one in found):
        lines.append(
            f"Not drawn: {counted(left_out, 'run')} of other seeds, which not every encoding has with weights."
        )
    if units > UNITS:
        lines.append(f"Shown: the lowest {UNITS} of {units} attentions.")
    scores: dict[str, list[float]] = {}
    for one in found:
        if one.result is not None and "gAUC" in one.result.metrics:
            scores.setdefault(one.pe, []).append(one.result.metrics["gAUC"])
    if means := ", ".join(f"{pe} {mean_sd(values)[0]:.4f}" for pe, values in scores.items()):
        lines.append(f"gAUC (AUC within users) on test: {means}.")
    if idle := [pe for pe, of_pe in effects.items() if pe != "none" and not any(one.visible for one in of_pe)]:
        lines.append(f"No effect {at_first}, they start as none: {', '.join(idle)}.")
    if biases := [panel for panel in panels if isinstance(panel, Lines) and panel.name == "bias"]:
        mean = any(curve.label == MEAN for panel in biases for curve in panel.curves)
        text = "Mean: over requests, with their middle 80 %. " * mean
        lines.append(f"{text}Content-free bias: what is added to the logit if all vectors are 0.")
    if any(isinstance(panel, Lines) and panel.diagonal for panel in panels):
        lines.append("Contextual positions: a line per user; dotted: plain distance.")
    if any(isinstance(panel, Image) and panel.kind == "density" for panel in panels):
        of_seed = f" Of seed {seeds[0]}." if len(seeds) > 1 else ""
        lines.append(f"Phases: of the keys of up to {RINGS} items back, the nearest on the innermost ring.{of_seed}")
    return lines
