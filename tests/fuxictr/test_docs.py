"""docs/fuxictr.md: the model of one's own works as written, and what is said about searching is true."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ctr_pe.config.validation import check
from ctr_pe.config.yaml import model_params
from ctr_pe.pe.cape import CAPE
from tests.support.models import SLOTS, batch, feature_map


@pytest.fixture(scope="module")
def blocks(checkout: Path) -> dict[str, list[str]]:
    """Language -> code blocks, in order."""
    found: dict[str, list[str]] = {}
    text = (checkout / "docs" / "fuxictr.md").read_text(encoding="utf-8")
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        found.setdefault(language, []).append(code)
    return found


@pytest.fixture
def code(blocks: dict[str, list[str]]) -> str:
    """The model of one's own, whose lines that an encoding needs are marked."""
    (found,) = (block for block in blocks["python"] if "# +" in block)
    return found


@pytest.fixture
def mine(code: str, tmp_path: Path) -> Any:
    file = tmp_path / "mine.py"
    file.write_text(code)
    given = {"optimizer": "adam", "loss": "binary_crossentropy", "metrics": ["AUC"], "verbose": 0}
    given |= {"model_root": str(tmp_path), "embedding_dim": 4, "max_len": SLOTS}
    torch.manual_seed(0)
    return runpy.run_path(str(file))["Mine"](feature_map(tmp_path), **given)


def test_it_takes_ten_lines(code: str) -> None:
    assert 0 < sum("# +" in line for line in code.splitlines()) <= 10


def test_a_model_of_ones_own_trains_its_encoding(mine: Any) -> None:
    assert isinstance(mine.attention.pe, CAPE)
    assert torch.count_nonzero(mine.attention.pe.table) == 0  # FuxiCTR's reset has left it alone
    mine._max_gradient_norm = 10.0
    for step in range(3):
        assert mine.train_step(batch([3, 0, 6, 1], seed=step)).isfinite()
    assert torch.count_nonzero(mine.attention.pe.table) > 0


def test_and_is_as_independent_of_padding_as_ours(mine: Any) -> None:
    mine.eval()
    torch.nn.init.normal_(mine.attention.pe.table)
    outputs = [mine(batch([3, 0, 6, 1], **layout))["y_pred"] for layout in ({}, {"slots": 9}, {"left": True})]
    assert torch.allclose(outputs[0], outputs[1], atol=1e-6)
    assert torch.allclose(outputs[0], outputs[2], atol=1e-6)


def test_the_tuner_config_is_right(blocks: dict[str, list[str]], checkout: Path, tmp_path: Path) -> None:
    content = yaml.safe_load(blocks["yaml"][0])
    assert content["tuner_space"].keys() <= model_params("BST", "amazonelectronics_x1").keys()
    file = tmp_path / "tuner.yaml"
    file.write_text(yaml.dump({**content, "base_config": str(checkout / "config")}))
    assert check(file, tmp_path) == ("tuner config", [])
