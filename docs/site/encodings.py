"""The table of all encodings, made from their classes: ``python -m docs.site.encodings > docs/encodings.md``."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ctr_pe.pe import FROM_DATA, REGISTRY, build_pe, encoding_class, options_of
from ctr_pe.testing import Batch, Harness, check_causal
from ctr_pe.units.causality import keeps_causality

# Sizes that tell the axes of a parameter apart.
SIZES = {"D": 132, "d": 66, "d/2": 33, "H": 2, "K": 100, "T": 101, "P": 16}

HEAD = """# Encodings

One row per encoding that `build_pe` takes. The table is made from the classes:
`python -m docs.site.encodings > docs/encodings.md`.

D item dim, H heads, d = D / H, L keys of a query, K = max_len, T = K + 1 table rows, P = position_dim, D_j distance of
item j from the target (1 = the most recent of n items), s_j the unit's own logit, t target, h_j item. In self-attention
read query for t and the offset between query and key for D_j.

- **parameters**: with default options; a self-attention over [history; target] has K one larger.
- **cost**: multiply-adds per query and head, beside those of the attention.
- **needs**: event times; or, to do all it can, the fields of the item embedding (`field_dims`).
- **starts as none**: a new encoding changes nothing; what it does is learned.
- **causal**: in causal self-attention no state sees a later item (all must; `ctr_pe.testing`).
- **prefix**: states of causal self-attention stay as they are when items are appended, as
  [next-item models](next_item.md) need; with `position_index=rank` and `kernel_anchor=start` all do.
- **extrapolates**: histories longer than max_len, or than any in training.

"""
COLUMNS = "encoding|equation|parameters|cost|needs|starts as none|causal|prefix|extrapolates|paper".split("|")


def encodings_page() -> str:
    """docs/encodings.md."""
    lines = [_line(COLUMNS), "|" + " --- |" * len(COLUMNS)]
    for name in REGISTRY:
        cls = encoding_class(name)
        wants = ["event times"] * cls.about.needs_age + ["fields"] * bool(set(FROM_DATA) & set(options_of(cls)))
        found = ["yes" if test(name) else "no" for test in (_starts_as_none, _is_causal, _is_prefix_stable)]
        cells = [f"`{name}`", cls.about.equation, _parameters(name), cls.about.cost, ", ".join(wants) or "–", *found]
        lines.append(_line([*cells, cls.about.extrapolates, cls.about.paper]))
    return HEAD + "\n".join(lines) + "\n"


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
