"""Makes store/: python -m tests.golden.make_store, in a checkout of the revision whose store is to be kept.

The environment variable OMP_NUM_THREADS has to be 1. Figures and LaTeX are left out, because tables make them again.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.golden.make_losses import revision
from tests.support.golden_losses import build_impressions, command
from tests.support.golden_store import STORE, arguments


def main() -> None:
    shutil.rmtree(STORE, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        dataset, out = build_impressions(Path(scratch)), Path(scratch) / "out"
        printed = command(*arguments(dataset.path, out))
        for file in (*out.glob("forest.*"), out / "table.tex"):
            file.unlink()
        shutil.copytree(out, STORE)
    made_with = {"revision": revision(), "pyarrow": version("pyarrow"), "data_hash": dataset.data_hash}
    about = {**made_with, "printed": printed.strip().rpartition("\n\n")[0].splitlines()}
    (STORE / "about.json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
