"""A benchmark that the revision in store/about.json finished counts as finished: it is read, and nothing is trained.

A run is found by its key. What must stay for that, or be translated when an old store is read:

- ``results.jsonl``, a line of JSON per run, is read, whatever form new runs are stored in; ``scores/*.npy`` (float32),
  ``scores/rows-DATA_HASH.npz`` and ``users/DATA_HASH.npz``, from which tables are made;
- the key: model, dataset (its id), protocol, config_hash, data_hash, pe, seed, device. Revision, versions, threads and
  the processor are no part of it;
- ``config_hash``: blake2b (8 bytes) of ``json.dumps(params, sort_keys=True, default=str)``, where ``params`` are the
  packaged configuration of the model with ``--set`` on top, as they are written there, without the keys that the
  benchmark sets itself. A default that is added, a number that becomes a float (0 to 0.0), a list that becomes
  a tuple of another text or a key that is renamed changes it;
- ``data_hash``: blake2b (16 bytes) over names and hashes of ``feature_map.json``, ``feature_vocab.json`` and the three
  parquet files, of their bytes: the writer must write the same bytes (pyarrow puts its version into them, so that
  the tests here need the same one);
- the names of the files of scores, which are ``MODEL-PE-SEED-`` and a blake2b (8 bytes) of the key as JSON, on the CPU
  without the device.
"""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

from ctr_pe.data.dataset import Dataset
from tests.support.golden_losses import build_impressions, command
from tests.support.golden_store import STORE, arguments, rows_of_csv, rows_of_markdown

ABOUT = json.loads((STORE / "about.json").read_text())


pytestmark = pytest.mark.skipif(
    version("pyarrow") != ABOUT["pyarrow"], reason=f"the bytes of data sets are those of pyarrow {ABOUT['pyarrow']}"
)


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    return build_impressions(tmp_path)


def test_the_data_set_of_the_store_has_the_hash_that_it_had(data: Dataset) -> None:
    assert data.data_hash == ABOUT["data_hash"]


def test_a_finished_benchmark_is_found_finished_and_gives_the_same_table(
    data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(STORE, out)
    for name in ("table.md", "table.csv"):
        (out / name).unlink()
    printed = command(*arguments(data.path, out))
    told = capsys.readouterr().err
    assert "all 4 runs are there already" in told
    assert "[1/4]" not in told
    assert rows_of_markdown(out) == rows_of_markdown(STORE)
    want, found = rows_of_csv(STORE), rows_of_csv(out)
    assert len(found) == len(want)
    for one, other in zip(found, want, strict=True):
        for column, value in other.items():
            assert one[column] == value or float(one[column]) == pytest.approx(float(value), rel=1e-6, abs=1e-6), column
    shown = [line.split() for line in printed.splitlines()]
    for line in ABOUT["printed"][:6]:  # the title, and the table between its rules; below it are notes
        assert line.split() in shown
