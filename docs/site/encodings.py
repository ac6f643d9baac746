"""Cards and the table of all encodings, from their classes: ``python -m docs.site.encodings > docs/encodings.md``."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ctr_pe.pe import FROM_DATA, REGISTRY, build_pe, encoding_class, options_of
from ctr_pe.testing import Batch, Harness, check_causal
from ctr_pe.units.causality import keeps_causality

DOCS = Path(__file__).parents[1]
PERFORMANCE = DOCS / "performance.md"
DPI = 90
# Sizes that tell the axes of a parameter apart.
SIZES = {"D": 132, "D/2": 66, "d": 44, "d/2": 22, "H": 3, "2 H": 6, "16 H": 48, "K": 100, "T": 101, "P": 16}

HEAD = """# Encodings

A card per encoding that `build_pe` takes: what it does, when to use it, what it costs, and what a trained one does to a
history. Equations, parameters and the table at the end are made from the classes, costs from
[Performance](performance.md): `python -m docs.site.encodings > docs/encodings.md`.

**Equations.** t is the target, h_j an item and D_j its distance from the target (1 = the most recent of n items); s_j
is the unit's own logit, `score` how the unit makes it. In self-attention read query for t and the offset between query
and key for D_j. D item dim, H heads, d = D / H, L keys of a query, K = max_len, T = K + 1 table rows, P = position_dim.

**When.** What [the evidence](evidence.md) shows on logs of purchases, a log of impressions and built-in sets. A log of
yours may differ; `ctr-pe benchmark` measures it.

**Cost.** A training step with the encoding over one without, on two CPU cores.

**Pictures.** DIN on the history of one test row, the longest of a built-in set: its attention, where 1 is what every
item would get if all got the same, and what the encoding adds or changes by distance. Dashed is before training, solid
after it. Five epochs of one seed show what an encoding does and are too few to compare encodings by. Under each picture
is its command, which needs the runs of

- `ctr-pe benchmark --pe @NAMES@ --repeats 1 --set epochs=5 --keep-weights --out results/encodings`
- `ctr-pe benchmark --dataset synthetic_time --pe @TIMES@ --repeats 1 --set epochs=5 --keep-weights --out results/timed`

"""
TABLE = """## All facts

- **parameters**: with default options; a self-attention over [history; target] has K one larger.
- **cost**: multiply-adds per query and head, beside those of the attention.
- **needs**: event times; or, to do all it can, the fields of the item embedding (`field_dims`).
- **starts as none**: a new encoding changes nothing; what it does is learned.
- **causal**: in causal self-attention no state sees a later item (all must; `ctr_pe.testing`).
- **prefix**: states of causal self-attention stay as they are when items are appended, as
  [next-item models](next_item.md) need; with `position_index=rank` and `kernel_anchor=start` all do.
- **extrapolates**: histories longer than max_len, or than any in training.

"""
COLUMNS = "encoding|parameters|cost|needs|starts as none|causal|prefix|extrapolates".split("|")
WHEN = {
    "none": "The baseline. DIN without an encoding is one to three thousandths of gAUC below the best on purchases; "
    "BST and SASRec are far below every encoding there. On impressions BST is best with it, and nothing is shown to "
    "be above it in TIN and SASRec.",
    "naive": "The usual baseline; good in BST and SASRec on purchases. In DIN, BST and SASRec on impressions it "
    "did harm; DIN pools its vectors with the items. In TIN on MovieLens 1M it brought much, "
    "and much of that with histories in random order, too.",
    "sinusoidal": "Where no parameters are wanted and histories may be longer than in training. In DIN on a small log "
    "of purchases it was below none, uncorrected.",
    "rope": "DIEN, where it brought as much as any on purchases. Not TIN, whose score has no projections that could "
    "use a rotation, nor DIN and BST on impressions, where it did harm.",
    "cope": "To compare with cape: it was not shown to bring more in any model, and on impressions it brought nothing.",
    "cape": "The paper's method. In DIN it was level with cape_constant on both logs: its gates have shown no context "
    "there. In BST on impressions it did harm, as all that were tried; in SASRec it brought nothing.",
    "cape_additive": "The paper's ablation, to compare: the position is added to the item and not to the logit.",
    "cape_cosine": "Where it matters what lies between an item and the target, and not only how much: long histories "
    "of several kinds of items in turn. Compare it with cape_constant, which knows distance alone, and with "
    "cape_constant+likeness, which knows the match beside it: what it has above both is context.",
    "cape_constant": "Start here: distance alone, learned. On the larger log of purchases none was shown to bring "
    "DIN, BST or SASRec more, but for BST's own, and in BST likeness beside it.",
    "cape_oracle": "A control for the built-in sets: its gates are told which items share the target's category.",
    "likeness": "Beside distance, as cape_constant+likeness, in models that lack a match of item and target: on the "
    "larger log of purchases it brought TIN and BST more than cape_constant alone, DIN no more. It knows no order.",
    "t5": "A free value per distance, few parameters. In BST and SASRec on a small log it brought more than biases of "
    "a given form.",
    "alibi": "Where nothing may be learned: a slope per head. With a single head it is nearly flat (`alibi_slope`).",
    "kerple_log": "Two learned numbers per head, and histories longer than in training. On a small log it brought "
    "less than t5.",
    "kerple_power": "As kerple_log, with a power of the distance.",
    "fire": "Where distance shall count relative to the history's length. On a small log it brought most of the "
    "biases of a given form.",
    "dape": "Where the bias shall depend on the logits. Among the best in BST on a small log; slow in SASRec.",
    "fox": "Where what is forgotten shall depend on the items. On a small log it brought little.",
    "xlnet": "Relative positions as in Transformer-XL, to compare.",
    "kernel": "To add positions to a model that is trained already (`attach`), for it starts as none. Among the best "
    "in BST on a small log.",
    "euler": "Next-item models, as in its paper. In BST nothing that it adds to its learned vectors was shown to "
    "matter.",
    "dif": "Items of several fields: each field and the position have scores of their own. Among the best in BST and "
    "SASRec on a small log.",
    "pdm": "To compare: items and positions have attentions of their own. Its contrastive loss did harm, and is off "
    "by default.",
    "time_bias": "Where the order within a day or a session is not known: equal times have equal biases.",
    "time_rope": "Where both order and elapsed time shall count.",
    "cape_time": "Where there are sessions: the items of one count as about one position.",
}
"""Encoding -> when to use it, as far as the evidence goes."""
MODELS = ("DIN", "BST", "SASRec")


def encodings_page() -> str:
    """docs/encodings.md."""
    of_time = [name for name in REGISTRY if encoding_class(name).about.needs_age]
    others = [name for name in REGISTRY if name not in of_time]
    head = HEAD.replace("@NAMES@", ",".join(others)).replace("@TIMES@", ",".join(["none", *of_time]))
    costs = _costs()
    cards = [_card(name, costs.get(name)) for name in REGISTRY]
    lines = [_line(COLUMNS), "|" + " --- |" * len(COLUMNS)]
    for name in REGISTRY:
        cls = encoding_class(name)
        wants = ["event times"] * cls.about.needs_age + ["fields"] * bool(set(FROM_DATA) & set(options_of(cls)))
        found = ["yes" if test(name) else "no" for test in (_starts_as_none, _is_causal, _is_prefix_stable)]
        cells = [f"`{name}`", _parameters(name), cls.about.cost, ", ".join(wants) or "–", *found]
        lines.append(_line([*cells, cls.about.extrapolates]))
    return head + "\n".join(cards) + "\n" + TABLE + "\n".join(lines) + "\n"


def _card(name: str, costs: list[str] | None) -> str:
    about = encoding_class(name).about
    runs = "results/timed" if about.needs_age else "results/encodings"
    costs = ["1"] * len(MODELS) if name == "none" else costs
    steps = ", ".join(f"{model} {cost} ×" for model, cost in zip(MODELS, costs or (), strict=bool(costs)))
    when = [WHEN[name]] * (name in WHEN) + ["Event times are needed."] * about.needs_age
    paper = "" if about.paper == "–" else f" ({about.paper})"
    picture = f"""
![{name}: attention and what is added, over one history](drawn/{name}.png)

`ctr-pe draw {name} --run {runs} --longest 1 --dpi {DPI} --out docs/drawn/{name}.png`
"""
    return f"""## {name}

`{about.equation}`{paper}

**When.** {" ".join(when) or "Not shown yet."}

**Cost.** {steps or "Not measured yet"}.
{picture * (DOCS / "drawn" / f"{name}.png").exists()}"""


def _costs() -> dict[str, list[str]]:
    """Encoding -> a step with it over one without, in ``MODELS``, from the rows of docs/performance.md."""
    text = PERFORMANCE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ((?:\**[\d.]+\** \| ){6})", text, re.MULTILINE)
    return {name: [cell.strip(" *") for cell in cells.split("|")[:6:2]] for name, cells in rows}


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _parameters(name: str) -> str:
    pe = build_pe(name, SIZES["D"], SIZES["K"], SIZES["H"], position_dim=SIZES["P"])
    symbols = {size: symbol for symbol, size in SIZES.items()}
    shapes = [
        f"{key} ({', '.join(symbols.get(size, str(size)) for size in parameter.shape)})"
        for key, parameter in pe.named_parameters()
    ]
    return ", ".join(shapes) or "–"


def _starts_as_none(name: str) -> bool:
    """In target attention and in self-attention, as built."""

    def outputs(pe: str, unit: str) -> Tensor:
        harness = Harness(partial(build_pe, pe), unit, draw=False).eval()
        return torch.cat([output.flatten() for output in harness(Batch.random([5, 0, 3]))])

    return all(torch.allclose(outputs(name, unit), outputs("none", unit), atol=1e-12) for unit in ("dot", "causal"))


def _is_causal(name: str) -> bool:
    try:
        check_causal(partial(build_pe, name), "causal")
    except AssertionError:
        return False
    return True


def _is_prefix_stable(name: str) -> bool:
    return keeps_causality(build_pe(name, SIZES["D"], SIZES["K"], SIZES["H"], position_dim=SIZES["P"]))


if __name__ == "__main__":
    print(encodings_page(), end="")
