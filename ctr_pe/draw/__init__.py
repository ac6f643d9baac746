"""``ctr-pe draw``: a picture of what encodings do to attention, before and after training."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctr_pe.draw.measure import UNITS, Attention, measure, units_of
from ctr_pe.draw.panels import AFTER, BEFORE, INITIAL, RINGS, Image, Lines, Panel, attention, of_links
from ctr_pe.draw.runs import Drawn, Wanted, drawn, some_requests
from ctr_pe.errors import UserError, nearest

SUFFIXES = (".png", ".svg", ".pdf")
REQUESTS = 1000
LONGEST = 100


def picture(out: Path, wanted: Wanted) -> None:
    """Draw what encodings do into the file ``out``.

    Raises:
        UserError: Matplotlib is not installed, an unknown kind of picture, an unknown name, missing runs, weights
            or data.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("ctr-pe draw needs Matplotlib: pip install 'ctr_pe[draw]'") from None
    suffix = Path(out).suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"--out {out}: no such kind of picture: {nearest(suffix, SUFFIXES)}")
    from ctr_pe.draw.figure import draw

    dataset, found = drawn(wanted)
    batch = some_requests(dataset, found[0].before, REQUESTS)
    longest = _longest(found[0].before.groups[0], batch)
    measured = {}
    for one in found:
        moments = {INITIAL: one.before} if one.after is None else {BEFORE: one.before, AFTER: one.after}
        measured[one.pe] = [(when, measure(model, batch, longest)) for when, model in moments.items()]
    sections = {pe: of_links(moments) for pe, moments in measured.items()}
    if len(found) == 1:
        pe = found[0].pe
        sections[pe].insert(0, attention("Attention by position", measured[pe]))
    else:
        side_by_side: list[Panel] = [attention(pe, moments) for pe, moments in measured.items()]
        sections = {"Attention by position": side_by_side, **{pe: own for pe, own in sections.items() if own}}
    title = f"{found[0].run.model} on {dataset.dataset_id}, seed {found[0].run.seed}"
    first = {pe: moments[0][1] for pe, moments in measured.items()}
    panels = [panel for of_section in sections.values() for panel in of_section]
    draw(out, title, _notes(found, first, panels, len(batch[dataset.label])), sections)
    print(f"{out}: {title}", file=sys.stderr)


def _longest(group: Any, batch: Any) -> int:
    """Largest offset from the query that is shown: the length that nine in ten histories do not exceed."""
    counts = (batch[group.history[0]] != 0).sum(1).clamp(max=group.max_len)
    return max(2, min(LONGEST, int(counts.float().quantile(0.9))))


def _notes(
    found: list[Drawn], first: Mapping[str, list[Attention]], panels: Sequence[Panel], requests: int
) -> list[str]:
    """What the reader must know; ``first``: what each encoding does at the first moment."""
    at_first = "before training" if (trained := found[0].after is not None) else "as initialised"
    when = "Dashed: before training, solid: after." if trained else "As initialised."
    lines = [f"{when} {requests:,} test requests; the query is the newest of its sequence."]
    effects = {pe: [one for unit in units for one in unit.effects if one is not None] for pe, units in first.items()}
    if any(one.pe.num_heads > 1 for of_pe in effects.values() for one in of_pe):
        lines[0] += " Heads are averaged where they are not named."
    if (count := len(units_of(found[0].before))) > UNITS:
        lines.append(f"Shown: the lowest {UNITS} of {count} attentions.")
    gauc = {one.pe: one.result.metrics.get("gAUC") for one in found if one.result is not None}
    if scores := [f"{pe} {value:.4f}" for pe, value in gauc.items() if value is not None]:
        lines.append(f"gAUC on test: {', '.join(scores)}.")
    if idle := [pe for pe, of_pe in effects.items() if pe != "none" and not any(one.visible for one in of_pe)]:
        lines.append(f"No effect {at_first}, they start as none: {', '.join(idle)}.")
    if any(isinstance(panel, Lines) and panel.diagonal for panel in panels):
        lines.append("Contextual positions: a line per user; dotted: plain distance.")
    if any(isinstance(panel, Image) and panel.kind == "density" for panel in panels):
        lines.append(f"Phases: where the keys of up to {RINGS} items back are, the nearest on the innermost ring.")
    return lines
