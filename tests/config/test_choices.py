"""What a config may name: closed lists, so that no text of a config is ever run."""

from __future__ import annotations

import inspect
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ctr_pe import model_zoo
from ctr_pe.cli import main
from ctr_pe.commands.run_expid import main as run_expid
from ctr_pe.config.schema import (
    ACTIVATIONS,
    FUSED,
    LOSSES,
    OPTIMIZERS,
    Activation,
    Loss,
    Metric,
    Monitor,
    OptimizerName,
    valid,
)
from ctr_pe.config.validation import check
from ctr_pe.data.dataset import Dataset
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.fuxictr.csv import FeatureColumn
from ctr_pe.model_zoo import DIEN, DIN, DMIN, MODELS
from ctr_pe.models.sections import model_section
from ctr_pe.units.activations import make_activation
from ctr_pe.utils.errors import UserError

SMALL: dict[str, Any] = {"embedding_dim": 4, "attention_hidden_units": [8], "dnn_hidden_units": [8]}
SECTION = {"model": "DIN", "dataset_id": "mine", "position_encoding": "cape", **SMALL}
FREE = {"dataset_id", "model_id", "data_root", "model_root", "train_data", "valid_data", "test_data"}
"""Keys that hold a name or a path of the user's own."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("data")
    return generate(folder / "mine", users=10, valid_users=5, test_users=5)


def new(data: Dataset, cls: Any = DIN, **changes: Any) -> Any:
    fields = {"target_field": [["item_id", "cate_id"]], "sequence_field": [["item_history", "cate_history"]]}
    return cls(data.feature_map(4), gpu=-1, **{**SMALL, **fields, **changes})


def problems(data: Dataset, tmp_path: Path, **changes: Any) -> list[str]:
    file = tmp_path / "given.yaml"
    file.write_text(yaml.dump({"X": {**SECTION, **changes}}))
    return [line.removeprefix(f"{file}: X: ") for line in check(file, data.path.parent)[1]]


def canaries(file: Path) -> list[str]:
    """Texts that make a file if anything runs them: alone, or after a prefix such as ``losses.``."""
    touch = f"__import__('pathlib').Path({str(file)!r}).touch()"
    return [touch, f"x if {touch} else x", f"x({touch})", f"ReLU({touch})", f"l2({touch})", f"nn.Linear({touch}, 1)"]


def keys_of_text() -> list[str]:
    """Keys of all models that take text, by their signatures, and those of a data set."""
    fields = {key: one for name in MODELS for key, one in model_section(getattr(model_zoo, name)).model_fields.items()}
    keys = {key for key, one in fields.items() if "str" in str(one.annotation) or "Literal" in str(one.annotation)}
    return sorted(keys | FREE | {"model", "position_encoding"})


def is_closed(key: str) -> bool:
    """Whether FuxiCTR or this package looks the value up in a list, whatever else the config says."""
    closed = "learning_rate_schedule loss metrics monitor monitor_mode optimizer table_optimizer task model"
    return key in {*closed.split(), "position_encoding"} or "activation" in key or key.endswith("regularizer")


@pytest.mark.slow
@pytest.mark.parametrize("key", keys_of_text())
def test_no_text_of_a_config_is_run(key: str, data: Dataset, tmp_path: Path) -> None:
    """FuxiCTR runs ``loss`` as code, already when a model is built."""
    file = tmp_path / "canary"
    texts = canaries(file) if is_closed(key) else canaries(file)[:2]
    model = next((cls for cls in (DIN, DIEN, DMIN) if key in model_section(cls).model_fields), DIN)
    for value in (*texts, [texts[1]]):
        found = problems(data, tmp_path, **{"model": model.__name__, key: value})
        assert found or not is_closed(key)
        with suppress(UserError, ValueError, TypeError, KeyError, AttributeError):
            new(data, model, **{key: value})
        assert not file.exists(), (key, value)


def test_no_text_of_feature_cols_is_run(data: Dataset, tmp_path: Path) -> None:
    entry = {"name": "item_id", "dtype": "str", "type": "categorical"}
    for key in FeatureColumn.model_fields:
        for text in canaries(tmp_path / "canary"):
            problems(data, tmp_path, data_format="csv", feature_cols=[{**entry, key: text}], target_field="item_id")
            assert not (tmp_path / "canary").exists(), (key, text)


def test_the_canaries_sing_in_fuxictr(tmp_path: Path) -> None:
    from fuxictr.pytorch.torch_utils import get_loss

    for text in canaries(tmp_path / "canary"):
        with pytest.raises(NotImplementedError):
            get_loss(text)
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("key", ["loss", "optimizer", "dnn_activations", "metrics", "monitor", "net_regularizer"])
def test_every_way_to_train_refuses_them(
    key: str, data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    text = canaries(tmp_path / "canary")[1]
    given = ["--set", f'{key}="{text}"', "--data-root", str(data.path.parent)]
    for command in ("benchmark --jobs 1 --repeats 1 --out b", "tune --trials 1 --out t"):
        assert main([*command.split(), "--dataset", "mine", *given]) != 0
    (tmp_path / "config").mkdir()
    section = {**SECTION, "data_root": str(data.path.parent)}
    (tmp_path / "config" / "model_config.yaml").write_text(yaml.dump({"X": section}))
    assert run_expid(["--expid", "X", "--set", f'{key}="{text}"']) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adamm"}, "optimizer 'adamm' is unknown: did you mean 'Adam'?"),
        ({"optimizer": "LBFGS"}, "optimizer 'LBFGS' is unknown"),
        ({"loss": "foo"}, "loss 'foo' is unknown"),
        ({"loss": "binary_crosentropy"}, "did you mean 'binary_crossentropy'?"),
        ({"dnn_activations": "foo"}, "dnn_activations 'foo' is unknown"),
        ({"attention_hidden_activations": "Rellu"}, "did you mean 'ReLU'?"),
        ({"metrics": ["foo"]}, "metrics 'foo' is unknown: (AUC, HR@10, MRR, MRR@10, NDCG@10, avgAUC, "),
        ({"monitor": "foo"}, "monitor 'foo' is unknown"),
        ({"monitor": {"foo": 1.0}}, "monitor 'foo' is unknown"),
        (
            {"net_regularizer": "l2(much)"},
            "l1(x), l2(x) or l1_l2(x,y), got 'l2(much)'",
        ),
        ({"table_optimizer": "lazy"}, "did you mean 'lazy_adam'?"),
    ],
)
def test_a_wrong_name_is_one_line(changes: dict[str, Any], message: str, data: Dataset, tmp_path: Path) -> None:
    (found,) = problems(data, tmp_path, **changes)
    assert message in found
    with pytest.raises(UserError) as error:
        new(data, **changes)
    assert "is unknown" in str(error.value) or message in str(error.value)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "adam", "sgd", "RMSPROP"])
def test_every_optimizer_takes_a_step(name: str, data: Dataset, tmp_path: Path) -> None:
    assert problems(data, tmp_path, optimizer=name) == []
    model = new(data, optimizer=name, learning_rate=0.01)
    (batch,) = _batches(data, model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        loss = model.train_step(batch)
    assert torch.isfinite(loss)
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert type(model.optimizer).__name__.lower() == name.lower()
    fused = [group["fused"] for group in model.optimizer.param_groups if "fused" in group]
    assert all(fused) == bool(type(model.optimizer).__name__ in FUSED or not fused)


def _batches(data: Dataset, model: Any) -> list[dict[str, torch.Tensor]]:
    from ctr_pe.data.loader import BatchLoader

    model._max_gradient_norm = 10.0
    return [next(iter(BatchLoader(model.feature_map, data.split("train"), batch_size=16)))]


def test_the_optimizers_are_those_that_need_only_a_rate() -> None:
    """What torch has more needs other gradients, a closure, or weights of one shape."""
    there = {name for name, cls in vars(torch.optim).items() if inspect.isclass(cls) and name != "Optimizer"}
    assert set(OPTIMIZERS) <= there
    assert there - set(OPTIMIZERS) <= {"LBFGS", "Muon", "SparseAdam"}
    for name in OPTIMIZERS:
        assert ("fused" in inspect.signature(getattr(torch.optim, name)).parameters) == (name in FUSED)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_computed(name: str, data: Dataset, tmp_path: Path) -> None:
    assert problems(data, tmp_path, loss=name) == []
    model = new(data, loss=name)
    (batch,) = _batches(data, model)
    assert torch.isfinite(model.train_step(batch))


@pytest.mark.parametrize("name", [*ACTIVATIONS, "relu", "dice", "gelu"])
def test_every_activation_is_built(name: str, data: Dataset, tmp_path: Path) -> None:
    assert problems(data, tmp_path, dnn_activations=name, attention_hidden_activations=name) == []
    new(data, dnn_activations=name)
    assert make_activation(name, 4)(torch.randn(3, 4)).shape == (3, 4)


def test_names_as_torch_writes_them() -> None:
    assert valid("optimizer", OptimizerName, "sgd") == "SGD"
    assert valid("dnn_activations", list[Activation], ["relu", "DICE"]) == ["ReLU", "Dice"]
    assert valid("monitor", Monitor, {"AUC": 1.0, "gAUC": 2.0}) == {"AUC": 1.0, "gAUC": 2.0}
    assert valid("metrics", list[Metric], list(METRICS)) == list(METRICS)
    assert valid("attention_output_activation", Activation | None, None) is None
    with pytest.raises(UserError, match="monitor 'auc' is unknown: did you mean 'AUC'"):
        valid("monitor", Monitor, "auc")
    with pytest.raises(UserError, match="loss must be text, got None"):
        valid("loss", Loss, None)
