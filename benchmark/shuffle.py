"""Copies a data set with the items of every history in random order: the control without which a gain of a position
encoding may be something else.

With all splits shuffled there is no order to learn, and an encoding should gain nothing; with test alone it is shown
what trained encodings take from the order. Ages stay where they are. Neighbouring rows of the same history, as those of
one request, get the same order.

example:
  python -m benchmark.shuffle data/amazon_sports --splits test
  ctr-pe benchmark --pe none,naive,cape --dataset amazon_sports_shuffled_test
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import polars as pl

from ctr_pe.config.field_groups import Group
from ctr_pe.config.yaml import load_json
from ctr_pe.data.dataset import SPLITS, Dataset, open_dataset
from ctr_pe.data.writer import Content, DatasetWriter, make_dataset
from ctr_pe.utils.errors import exit_code


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return exit_code("shuffle.py", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    which = list(SPLITS) if args.splits == "all" else [args.splits]
    dataset = open_dataset(str(args.dataset))
    made = shuffled(dataset, dataset.path.with_name(f"{dataset.path.name}_shuffled_{args.splits}"), which, args.seed)
    print(f"{made.path}: histories of {', '.join(which)} are in random order")
    return 0


def shuffled(dataset: Dataset, out: Path, splits: list[str], seed: int = 0) -> Dataset:
    """A copy of the data set in which the histories of some splits have lost their order.

    Raises:
        UserError: ``out`` exists.
    """
    feature_map = load_json(dataset.path / "feature_map.json")
    features = {name: spec for one in feature_map["features"] for name, spec in one.items()}
    vocabs = load_json(dataset.path / "feature_vocab.json")

    def source(writer: DatasetWriter) -> Content:
        rng = np.random.default_rng(seed)
        for split in dataset.rows:
            rows = pl.read_parquet(dataset.split(split))
            for group in dataset.groups if split in splits else ():
                rows = _in_random_order(rows, group, rng)
            writer.add(split, rows.to_arrow())
        report = {"shuffled": {"from": dataset.data_hash, "splits": splits, "seed": seed}}
        return Content(dataset.label, dataset.group_id, features, dataset.groups, vocabs, report)

    return make_dataset(source, out)


def _in_random_order(rows: pl.DataFrame, group: Group, rng: np.random.Generator) -> pl.DataFrame:
    lengths = rows[group.history[0]].list.len().to_numpy().astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    same = np.ones(len(rows), np.bool_)
    for name in group.history:
        same &= (rows[name] == rows[name].shift(1)).fill_null(False).to_numpy()
    first = np.maximum.accumulate(np.where(same, 0, np.arange(len(rows))))  # of each row, that of its run of equals
    slot = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    key = rng.random(lengths.sum())[np.repeat(starts[first], lengths) + slot]
    order = np.lexsort((key, np.repeat(np.arange(len(rows)), lengths)))
    columns = []
    for name in group.history:
        flat = rows[name].list.explode(keep_nulls=False, empty_as_null=False).gather(order)
        offsets = np.append(starts, lengths.sum())
        columns.append(_as_lists(flat, offsets).alias(name))
    return rows.with_columns(columns)


def _as_lists(flat: pl.Series, offsets: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pl.Series:
    import pyarrow as pa

    found = pl.from_arrow(pa.LargeListArray.from_arrays(pa.array(offsets), flat.to_arrow()))
    assert isinstance(found, pl.Series)
    return found


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("shuffle.py", description=__doc__, formatter_class=form)
    parser.add_argument("dataset", type=Path, metavar="DATASET", help="folder of a data set; the copy is put beside it")
    parser.add_argument("--splits", choices=["all", "test"], default="all", help="of which splits (default: all)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random order (default: 0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
