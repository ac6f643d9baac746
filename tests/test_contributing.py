"""The recipes in CONTRIBUTING.md work as written."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from pathlib import Path

from ctr_pe.testing import check_pe


def test_example_encoding_passes_the_battery(checkout: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (checkout / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)
    source = tmp_path / "recency.py"
    source.write_text(textwrap.dedent(blocks[0]), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("recency", source)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    check_pe(module.Recency)
