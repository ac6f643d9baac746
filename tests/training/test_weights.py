"""Weights in a file are numbers and no code: what we write is safetensors, and FuxiCTR's own files run nothing."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fuxictr.pytorch.models import BaseModel
from torch import nn

from ctr_pe.training import load, save
from ctr_pe.utils.errors import UserError
from tests.support.models import Rows, weights_of
from tests.support.models import build as build_model

build = partial(build_model, "DIN")


class Code:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.canary,)


def moved(folder: Path) -> Any:
    """A model whose weights are not those it starts with."""
    model = build(folder)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def same(one: Any, other: Any) -> bool:
    weights = weights_of(other)
    return all(torch.equal(value, weights[name]) for name, value in one.state_dict().items())


def test_weights_come_back_and_others_may_read_the_file(tmp_path: Path) -> None:
    model, again = moved(tmp_path), build(tmp_path)
    mask = os.umask(0o022)
    try:
        model.save_weights(tmp_path / "new" / "weights")
    finally:
        os.umask(mask)
    assert (tmp_path / "new" / "weights").stat().st_mode & 0o777 == 0o644
    again.load_weights(tmp_path / "new" / "weights")
    assert same(model, again)


@pytest.mark.parametrize("zipped", [True, False])
def test_fuxictrs_own_files_are_read(zipped: bool, tmp_path: Path) -> None:
    model, again = moved(tmp_path), build(tmp_path)
    torch.save(model.state_dict(), tmp_path / "DIN.model", _use_new_zipfile_serialization=zipped)
    again.load_weights(tmp_path / "DIN.model")
    assert same(model, again)


def test_the_checkpoint_of_a_training_is_no_pickle(tmp_path: Path) -> None:
    model = build(tmp_path)
    model.fit(Rows(), epochs=1, validation_data=Rows())
    assert [str(file) for file in tmp_path.rglob("*.safetensors")] == [model.checkpoint]
    assert not list(tmp_path.rglob("*.model"))
    again = build(tmp_path)
    again.load_weights(again.checkpoint)
    assert same(model, again)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_file_is_not_run(zipped: bool, tmp_path: Path) -> None:
    canary, file = tmp_path / "CANARY", tmp_path / "DIN.model"
    torch.save({"weight": torch.zeros(1), "code": Code(canary)}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match=r"DIN\.model: not the weights of this model \(UnpicklingError: [^\n]+$"):
        build(tmp_path).load_weights(file)
    assert not canary.exists()
    torch.load(file, weights_only=False)  # it would have run
    assert canary.exists()


@pytest.mark.parametrize("write", [save, lambda model, file: BaseModel.save_weights(model, file)])
def test_a_damaged_file_is_one_line(write: Callable[[Any, Path], None], tmp_path: Path) -> None:
    model, file = build(tmp_path), tmp_path / "weights"
    write(model, file)
    whole = file.read_bytes()
    for content in (b"", whole[:7], whole[:9], whole[:100], whole[:-1], b"\xff" * 8 + whole[8:], b"x" * 100):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"weights: not the weights of this model \([^\n]{1,200}$"):
            load(model, file)
    file.unlink()
    with pytest.raises(UserError, match="weights: no such file"):
        load(model, file)


@pytest.mark.parametrize("changes", [{"embedding_dim": 8}, {"position_encoding": "cape"}, {"dnn_hidden_units": [4]}])
def test_weights_of_another_model_are_one_line(changes: dict[str, Any], tmp_path: Path) -> None:
    save(build(tmp_path), tmp_path / "weights")
    with pytest.raises(UserError, match=r"weights: not the weights of this model \(RuntimeError: [^\n]{1,200}$"):
        load(build(tmp_path, **changes), tmp_path / "weights")


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
def test_weights_of_another_kind_are_one_line_and_change_nothing(dtype: torch.dtype, tmp_path: Path) -> None:
    model, again = moved(tmp_path), build(tmp_path)
    before = {name: x.clone() for name, x in again.state_dict().items()}
    torch.save({name: x.to(dtype) for name, x in model.state_dict().items()}, tmp_path / "weights")
    with pytest.raises(UserError, match=rf"weights: not the weights of this model .ValueError: .* is {str(dtype)[6:]}"):
        load(again, tmp_path / "weights")
    assert all(torch.equal(x, before[name]) for name, x in again.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_of_another_precision_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    model, again = moved(tmp_path), build(tmp_path)
    stored = {name: x.to(dtype) if x.is_floating_point() else x for name, x in model.state_dict().items()}
    torch.save(stored, tmp_path / "weights")
    load(again, tmp_path / "weights")
    assert all(torch.equal(x, stored[name].to(x.dtype)) for name, x in again.state_dict().items())


@pytest.mark.slow
def test_nothing_goes_through_pickle(checkout: Path) -> None:
    """``torch.load`` of FuxiCTR's files alone, and only with ``weights_only``."""
    found = []
    for file in [*(checkout / "ctr_pe").rglob("*.py"), *(checkout / "model_zoo").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {"pickle", "joblib", "cloudpickle", "shelve"}, file
            if isinstance(node, ast.Call):
                call = ast.unparse(node)
                assert not call.startswith("torch.save("), file
                assert not call.startswith("np.load(") or "allow_pickle=False" in call, file
                if call.startswith("torch.load("):
                    found.append((file.name, "weights_only=True" in call))
    assert found == [("weights.py", True)]
