"""Do trained gates tell like items from unlike ones? In contextual positions (CoPE, CAPE and their forms) the gate of
an item is how far it pushes older items away. CAPE's idea is a gate near 1 at items unlike the target, near 0 at like
ones.

Of a benchmark that kept its weights: per model, encoding, unit and head the mean gate of like and of unlike items, and
how often an unlike item has the larger gate of the two (AUC; .5: the gate does not tell). Like items share the target's
last field, its category. A row per seed goes to RESULTS/gates.csv.

example:
  ctr-pe benchmark --pe cape,cape_cosine --keep-weights --out results/gates
  python -m benchmark.gates results/gates
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from ctr_pe.commands.options import Parser, plugins_option
from ctr_pe.data.dataset import Dataset
from ctr_pe.reporting.figures.measure import measure
from ctr_pe.reporting.figures.runs import Wanted, drawn, some_requests
from ctr_pe.sequence.batch import JaggedBatch
from ctr_pe.study.rendering import Table, as_text
from ctr_pe.study.store import Store
from ctr_pe.utils.errors import UserError, exit_code

FILE = "gates.csv"
REQUESTS = 1000
GROUP = ["model", "dataset", "encoding", "unit", "head"]


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return exit_code("gates.py", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    store = Store(args.results)
    kept = sorted({(key.model, key.dataset, key.pe) for key in store.read() if store.weights(key).exists()})
    lines = [line for one in kept for line in gates(args.results, *one, args.data_root)]
    if not lines:
        raise UserError(f"{args.results}: no run of cope, cape or another with gates has its weights: --keep-weights")
    rows = pl.DataFrame(lines)
    rows.write_csv(args.results / FILE, float_precision=6)
    print(as_text(table(rows)))
    return 0


def gates(results: Path, model: str, dataset: str, pe: str, root: Path | None) -> Iterator[dict[str, Any]]:
    """A line per seed, unit and head: mean gates, and AUC of unlike against like; none where there are no gates."""
    data, runs = drawn(Wanted([pe], results, model, Path(dataset).name, data_root=root))
    for one in runs:
        batch = some_requests(data, one.after, REQUESTS)
        like = likeness(data, batch)
        for unit in measure(one.after, batch, like.shape[1] - 1):
            for effects in unit.effects:
                if effects is None or effects.positions is None:
                    continue
                for head in range(effects.positions.shape[1]):
                    positions = effects.positions[:, head]
                    # Suffix sums, from the newest item on: the item's own gate is the step to it.
                    own = positions - torch.cat([torch.zeros(len(positions), 1), positions[:, :-1]], 1).nan_to_num()
                    known = positions.isfinite() & (torch.arange(positions.shape[1]) > 0)
                    gate, alike = own[known].double().numpy(), like[known].numpy()
                    yield {
                        "model": model,
                        "dataset": data.dataset_id,
                        "encoding": pe,
                        "unit": unit.label,
                        "head": head,
                        "seed": one.run.seed,
                        "like": float(gate[alike].mean()),
                        "unlike": float(gate[~alike].mean()),
                        "auc": float(roc_auc_score(~alike, gate)),
                    }


def likeness(dataset: Dataset, batch: JaggedBatch) -> Tensor:
    """(B, L + 1) bool by distance from the target: whether that item shares the target's last field."""
    (group, *_) = dataset.groups
    history, target = batch[group.history[-1]], batch[group.target[-1]]
    before = batch.lengths[group.history[-1]].unsqueeze(1) - torch.arange(history.shape[1])
    rows, slots = (before > 0).nonzero(as_tuple=True)
    distance = before[rows, slots]
    like = torch.zeros(len(history), history.shape[1] + 1, dtype=torch.bool)
    like[rows, distance] = (history == target[:, None])[rows, slots]
    return like


def table(rows: pl.DataFrame) -> Table:
    """Means over the seeds."""
    lines, cells = [], []
    for name, of in rows.group_by(GROUP, maintain_order=True):
        line: dict[str, Any] = dict(zip(GROUP, name, strict=True))
        cell: dict[str, str | None] = {key: str(value) for key, value in line.items()}
        for key in ("like", "unlike", "auc"):
            values = of[key].to_numpy()
            line[key] = values.mean()
            cell[key] = f"{values.mean():.3f}" + (f" ± {values.std(ddof=1):.3f}" if len(values) > 1 else "")
        lines.append(line)
        cells.append(cell)
    notes = [
        f"Gates at {REQUESTS:,} test rows: mean at items of the target's category (like) and at others (unlike); auc: "
        "how often an unlike item has the larger gate. Mean ± standard deviation over the seeds."
    ]
    return Table("Gates after training", lines, cells, notes)


def _parser() -> Parser:
    parser = Parser(prog="gates.py", description=__doc__)
    parser.add_argument("results", type=Path, metavar="RESULTS", help="folder of a benchmark with --keep-weights")
    parser.add_argument("--data-root", type=Path, metavar="DIR", help="data sets (default: data, or $CTR_PE_DATA)")
    plugins_option(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
