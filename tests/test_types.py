"""The type check reads every folder of ours and fails on a name that does not exist."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

FOLDERS = ("benchmark", "config", "ctr_pe", "docs", "model_zoo", "tests")
WRONG = "\n\ndef wrong() -> int:\n    import torch\n\n    return torch.cuda.devicecount()\n"


@pytest.mark.slow
def test_an_attribute_that_does_not_exist_is_found_in_every_folder(checkout: Path, tmp_path: Path) -> None:
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(checkout / folder, tmp_path / folder, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy2(checkout / name, tmp_path)
    if (checkout / ".mypy_cache").is_dir():  # of what does not change; without it the check takes minutes
        shutil.copytree(checkout / ".mypy_cache", tmp_path / ".mypy_cache")
    files = ["ctr_pe/commands/export.py", "model_zoo/tin.py", "benchmark/soak.py"]  # which few import
    files += ["docs/site/encodings.py", "setup.py", "tests/conftest.py"]
    for name in files:
        with (tmp_path / name).open("a") as file:
            file.write(WRONG)
    run = subprocess.run([sys.executable, "-m", "mypy"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 1, run.stdout + run.stderr
    found = {line.partition(":")[0] for line in run.stdout.splitlines() if '"devicecount"' in line}
    assert found == {name.replace("model_zoo/", "ctr_pe/model_zoo/") for name in files}, run.stdout
