"""``ctr-pe draw``: a picture of what encodings do to attention, before and after training."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctr_pe.errors import UserError, nearest

if TYPE_CHECKING:
    from ctr_pe.draw.measure import Attention, Effects
    from ctr_pe.draw.runs import Drawn, Wanted

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
    from ctr_pe.draw.figure import Section, draw
    from ctr_pe.draw.panels import attention, notes, of_links
    from ctr_pe.draw.runs import drawn, some_requests

    dataset, found = drawn(wanted)
    batch = some_requests(dataset, found[0].before, REQUESTS)
    longest = _longest(found[0], batch)
    measured = {one.pe: _measured(one, batch, longest) for one in found}
    side_by_side = [attention(pe, moments) for pe, moments in measured.items()]
    own = {pe: of_links(moments) for pe, moments in measured.items()}
    if len(found) == 1:
        pe = found[0].pe
        sections = [Section(pe, [attention("Attention by position", measured[pe]), *own[pe]])]
    else:
        sections = [Section("Attention by position", side_by_side)]
        sections += [Section(pe, panels) for pe, panels in own.items() if panels]
    title = f"{found[0].run.model} on {dataset.dataset_id}, seed {found[0].run.seed}"
    panels = [panel for section in sections for panel in section.panels]
    draw(out, title, [*_about(found, measured, len(batch[dataset.label])), *notes(panels)], sections)
    print(f"{out}: {title}", file=sys.stderr)


def _longest(one: Drawn, batch: Any) -> int:
    """Largest offset from the query that is shown: the length that nine in ten histories do not exceed."""
    group = one.before.groups[0]
    counts = (batch[group.history[0]] != 0).sum(1).clamp(max=group.max_len)
    return max(2, min(LONGEST, int(counts.float().quantile(0.9))))


def _measured(one: Drawn, batch: Any, longest: int) -> list[tuple[str, list[Attention]]]:
    from ctr_pe.draw.measure import measure
    from ctr_pe.draw.panels import AFTER, BEFORE, INITIAL

    before = measure(one.before, batch, longest)
    if one.after is None:
        return [(INITIAL, before)]
    return [(BEFORE, before), (AFTER, measure(one.after, batch, longest))]


def _about(found: list[Drawn], measured: Mapping[str, Any], requests: int) -> list[str]:
    from ctr_pe.draw.measure import UNITS, all_units

    trained = found[0].after is not None
    when = "Dashed: before training, solid: after." if trained else "As initialised."
    lines = [f"{when} {requests:,} test requests; the query is the newest of its sequence."]
    if any(effects.pe.num_heads > 1 for moments in measured.values() for effects in _effects(moments)):
        lines[0] += " Heads are averaged where they are not named."
    if (count := len(all_units(found[0].before))) > UNITS:
        lines.append(f"Shown: the lowest {UNITS} of {count} attentions.")
    gauc = {one.pe: one.result.metrics.get("gAUC") for one in found if one.result is not None}
    if scores := [f"{pe} {value:.4f}" for pe, value in gauc.items() if value is not None]:
        lines.append(f"gAUC on test: {', '.join(scores)}.")
    acts = {
        pe: any(effects.visible for effects in _effects(moments)) for pe, moments in measured.items() if pe != "none"
    }
    flat = [pe for pe, visible in acts.items() if not visible]
    if flat:
        at_first = "before training" if trained else "as initialised"
        lines.append(f"No effect {at_first}, they start as none: {', '.join(flat)}.")
    return lines


def _effects(moments: Sequence[tuple[str, Sequence[Attention]]]) -> list[Effects]:
    """At the first moment, in all units."""
    return [effects for unit in moments[0][1] for effects in unit.effects if effects is not None]
