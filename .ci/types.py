"""mypy over the package, its tests and the benchmark: python .ci/types.py [options of mypy]

Modules are checked under the names by which they are imported, which are not those of their folders: model_zoo/ is
installed as ctr_pe.model_zoo (setup.py), and tests import their helpers from the folders of pytest's ``pythonpath``. So
the sources are copied to the paths of their names, mypy runs there, and its messages name the files of the checkout.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]


def moves() -> dict[str, str]:
    """Path of a file or folder of the checkout -> path of its module's name, where the two differ."""
    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
    moved = {"model_zoo": "ctr_pe/model_zoo", "config": "ctr_pe/configs"}
    for folder in settings["tool"]["pytest"]["ini_options"]["pythonpath"]:
        for path in sorted((CHECKOUT / folder).glob("*")):
            helper = path.suffix == ".py" and not path.name.startswith(("test_", "conftest"))
            if helper or (path / "__init__.py").exists():
                moved[path.relative_to(CHECKOUT).as_posix()] = path.name
    return moved


def main(options: list[str]) -> int:
    moved = moves()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for folder in ("ctr_pe", "tests"):
            shutil.copytree(CHECKOUT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        for name in ("setup.py", "pyproject.toml"):
            shutil.copy2(CHECKOUT / name, root)
        for source, target in moved.items():
            (root / source).unlink(missing_ok=True)
            copy = shutil.copytree if (CHECKOUT / source).is_dir() else shutil.copy2
            copy(CHECKOUT / source, root / target)
        command = [sys.executable, "-m", "mypy", f"--cache-dir={CHECKOUT / '.mypy_cache'}", *options, "."]
        run = subprocess.run(command, cwd=root, text=True, stdout=subprocess.PIPE)
    for line in run.stdout.splitlines():
        for source, target in moved.items():
            if line.startswith((f"{target}:", f"{target}/")):
                line = source + line.removeprefix(target)
                break
        print(line)
    return run.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
