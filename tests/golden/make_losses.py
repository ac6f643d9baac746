"""Makes losses.json: python -m tests.golden.make_losses, in a checkout of the revision whose results are to be kept.

The environment variable OMP_NUM_THREADS has to be 1.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from tests.support.golden_losses import BUILT_IN, CELLS, about, build, build_impressions, built_in, hashes, measure


def revision() -> str:
    """The newest commit of the checkout that changed anything else than tests."""
    git = ["git", "-C", str(Path(__file__).parents[2]), "rev-list", "-1", "HEAD", "--", ".", ":!tests"]
    return subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        clicks = build(folder)
        rows = {"clicks": hashes(clicks), "shown": hashes(build_impressions(folder))}
        rows |= {name: hashes(built_in(name, folder / "data")) for name in BUILT_IN}
        cells = {f"{model} {encoding}": measure(clicks, model, encoding, folder) for model, encoding in CELLS}
    parts = [
        f'{{"about": {json.dumps(about(revision()))},\n "rows": {{\n',
        ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in rows.items()),
        '\n },\n "cells": {\n',
        ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in cells.items()),
        "\n }}\n",
    ]
    Path(__file__).with_name("losses.json").write_text("".join(parts))


if __name__ == "__main__":
    main()
