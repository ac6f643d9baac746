"""Types of keys: what is refused, by every way in, and in which words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest

from ctr_pe import CTRRanker
from ctr_pe.config.schema import ExperimentSection, Positive, Validated, check, words
from ctr_pe.evaluation.metrics import monitor_mode
from ctr_pe.fuxictr.experiment import run
from ctr_pe.model_zoo import DIN
from ctr_pe.models.sections import check_params
from ctr_pe.pe import build_pe
from ctr_pe.pe.rope import RoPE
from ctr_pe.utils.errors import UserError

WRONG: dict[str, Any] = {
    "epochs": 1.7,
    "batch_size": 1.5,
    "net_dropout": math.nan,
    "amp": "maybe",
    "eval_steps": 0,
    "learning_rate": math.inf,
    "embedding_regularizer": "l2(abc)",
    "net_regularizer": -1,
    "dnn_hidden_units": [-64],
    "seed": 2**70,
    "rope_base": 0,
    "max_len": -5,
    "metrics": [],
}


@pytest.mark.parametrize("key", WRONG)
def test_every_way_in_refuses_it_in_the_same_line(key: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^{key} must be .*, got ") as said:
        check_params("DIN", {key: WRONG[key]})
    ways: list[Any] = [
        lambda: DIN(None, **{key: WRONG[key]}),
        lambda: run({"model": "DIN", "dataset_id": "mine", "model_root": str(tmp_path / "root"), key: WRONG[key]}),
    ]
    if key not in ("seed", "max_len", "epochs"):  # parameters of its own
        ways.append(lambda: CTRRanker(**{key: WRONG[key]})._params())
    for way in ways:
        with pytest.raises(UserError) as error:
            way()
        assert str(error.value) == str(said.value)
    assert not (tmp_path / "root").exists()


def test_an_encoding_refuses_its_own() -> None:
    with pytest.raises(ValueError, match="rope_base must be a positive number, got 0"):
        RoPE(8, 4, rope_base=0)
    with pytest.raises(UserError, match="'rope': rope_base must be a positive number, got 0"):
        build_pe("rope", 8, 4, rope_base=0)
    assert build_pe("cape", 8, 4, position_dim=np.int64(4)).table.shape == (5, 4)  # type: ignore[union-attr, attr-defined]


@pytest.mark.parametrize("name", ["../../../x", "a/b", "..", "", "x" * 300, 5])
def test_a_name_stays_in_its_folder(name: Any, tmp_path: Path) -> None:
    for key in ("model_id", "dataset_id"):
        params = {"model": "DIN", "dataset_id": "mine", "model_root": str(tmp_path / "a" / "b" / "root"), key: name}
        with pytest.raises(UserError, match=f"{key} must be a name"):
            run(params)
    assert not list(tmp_path.iterdir())


def test_all_keys_of_fuxictr_say_what_they_want() -> None:
    fields = ExperimentSection.model_fields
    silent = {key for key, field in fields.items() if words(Annotated[field.annotation, field]) is None}
    assert silent == {"feature_cols", "feature_specs", "label_col", "use_features"}


def test_right_values_are_taken() -> None:
    check(
        ExperimentSection, {"learning_rate": "1e-3", "embedding_regularizer": 0, "net_regularizer": "l1_l2(1e-3, .5)"}
    )
    check(ExperimentSection, {"monitor": {"AUC": 1, "logloss": -1}, "eval_steps": None, "gpu": -1, "seed": 2**32 - 1})


@pytest.mark.parametrize(
    ("monitor", "mode"),
    [
        ("AUC", "max"),
        ("gAUC", "max"),
        ("logloss", "min"),
        ({"AUC": 1, "logloss": -0.5}, "max"),
        ({"logloss": 2}, "min"),
    ],
)
def test_the_mode_follows_from_the_monitor(monitor: Any, mode: str) -> None:
    other = "min" if mode == "max" else "max"
    assert monitor_mode(monitor) == monitor_mode(monitor, mode) == mode
    with pytest.raises(UserError, match=f"'{other}' contradicts monitor .*: leave it out, or write {mode}"):
        monitor_mode(monitor, other)


def test_a_monitor_without_a_better_way() -> None:
    for monitor in ({"AUC": 1, "logloss": 1}, {"AUC": 0}):
        with pytest.raises(UserError, match=r"monitor .*: less is better of one part"):
            monitor_mode(monitor)


def test_a_constructor_runs_whole_and_is_checked_in_a_class_with_a_mixin() -> None:
    class Base(Validated):
        def __init__(self, low: Positive = 1.0) -> None:
            self.low = low

    class Wide(Base):
        def __init__(self, high: Positive = 2.0, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.high = high

    class Mixin(Base):
        pass

    class Plain:
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)

    class Mixed(Mixin, Wide):
        pass

    class OfAnother(Plain, Wide):
        pass

    for cls in (Wide, Mixed, OfAnother):
        made = cls(low=3.0, high=4.0)
        assert (made.low, made.high) == (3.0, 4.0)
        for key in ("low", "high"):
            with pytest.raises(UserError, match=key):
                cls(**{key: -1.0})
