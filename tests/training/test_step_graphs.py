"""Which training steps can be CUDA graphs; the graphs themselves are tested on a device that is not there
(``tests/support/on_pretended_device.py``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ctr_pe.model_zoo import DIN
from ctr_pe.training.step_graphs import StepGraphs, unsupported
from tests.support.models import PARAMS, SMALL, build, feature_map


@pytest.mark.parametrize("name", SMALL)
def test_steps_of_every_backbone_can(name: str, tmp_path: Path) -> None:
    assert unsupported(build(name, tmp_path, position_encoding="cape")) is None


@pytest.mark.parametrize(
    ("name", "params", "why"),
    [
        ("DIN", {"optimizer": "SGD"}, "optimizer SGD"),
        ("DIN", {"table_optimizer": "lazy_adam"}, "table_optimizer lazy_adam"),
        ("SASRec", {"position_encoding": "euler", "euler_contrast": 0.1}, "the phase contrast loss of Euler"),
        ("SASRec", {"ffn_activation": "Dice"}, "has statistics over items"),
    ],
)
def test_others_say_why_not(name: str, params: dict[str, Any], why: str, tmp_path: Path) -> None:
    found = unsupported(build(name, tmp_path, **params))
    assert found is not None
    assert why in found


def test_a_model_of_one_s_own_says_so_itself(tmp_path: Path) -> None:
    class Own(DIN):
        pass

    model = Own(feature_map(tmp_path), **PARAMS | {"model_root": str(tmp_path)})
    assert unsupported(model) == "Own does not say that its batches may be filled up"
    Own.fillable = True
    assert unsupported(model) is None


def test_on_a_cpu_there_are_none(tmp_path: Path) -> None:
    model = build("DIN", tmp_path)
    assert StepGraphs.of(model) is None
    assert not model.fills


def test_every_step_has_a_seed_of_its_own_and_one_that_goes_on_has_the_same(tmp_path: Path) -> None:
    torch.manual_seed(3)
    graphs, other = (StepGraphs(build("DIN", tmp_path)) for _ in range(2))
    first = [int(graphs._numbers()[0]) for _ in range(50)]
    state = graphs.state_dict()
    rest = [int(graphs._numbers()[0]) for _ in range(50)]
    assert len({*first, *rest}) == 100
    other.load_state_dict(state)
    assert [int(other._numbers()[0]) for _ in range(50)] == rest
