"""Tables whose rows rest while no batch has them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ctr_pe.model_zoo import MODELS
from ctr_pe.training.table_optimizers import RowwiseAdagrad
from ctr_pe.utils.errors import UserError
from tests.support.models import batch, build

NAMES = ["lazy_adam", "rowwise_adagrad"]


def trained(model: Any, steps: list[dict[str, Tensor]], most: float = 10.0) -> Any:
    model._max_gradient_norm = most
    model.train()
    for rows in steps:
        torch.manual_seed(0)
        model.train_step(rows)
    return model


def tables(model: Any) -> list[nn.Embedding]:
    return [table for table in model.embedding_layer.embedding_layers.values() if isinstance(table, nn.Embedding)]


@pytest.mark.parametrize("most", [10.0, 0.05])
def test_lazy_adam_is_adam_while_batches_have_the_same_rows(most: float, tmp_path: Path) -> None:
    rows = batch([3, 0, 6, 1])
    lazy = build("DIN", tmp_path, table_optimizer="lazy_adam", learning_rate=0.01)
    dense = build("DIN", tmp_path, learning_rate=0.01)
    for table in tables(lazy):
        nn.init.normal_(table.weight[1:])
    for group in [*lazy.optimizer.param_groups, *dense.optimizer.param_groups]:
        group["eps"] = 1e-16  # which the two place differently
    dense.load_state_dict(lazy.state_dict())
    trained(lazy, [rows] * 4, most), trained(dense, [rows] * 4, most)
    found = [parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
             for parameter in lazy.parameters() if parameter.grad is not None]  # fmt: skip
    norm = torch.cat([gradient.flatten() for gradient in found]).norm()
    assert norm == pytest.approx(most, rel=1e-3) if most < 1 else most > norm > 0.05
    for (name, ours), theirs in zip(lazy.named_parameters(), dense.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6), name


def test_regularisation_is_adam_s_on_the_rows_of_the_batch(tmp_path: Path) -> None:
    rows = batch([3, 2])
    models = [build("TIN", tmp_path, embedding_regularizer="l1_l2(0.1,0.5)", table_optimizer=name, learning_rate=0.01)
              for name in ("lazy_adam", None)]  # fmt: skip
    for table in tables(models[0]):
        nn.init.normal_(table.weight)
    models[1].load_state_dict(models[0].state_dict())
    before = models[0].embedding_layer.embedding_layers["item_id"].weight.detach().clone()
    lazy, dense = (trained(model, [rows] * 2).embedding_layer.embedding_layers["item_id"].weight for model in models)
    met = torch.cat([rows["item_id"], rows["item_history"][rows["item_history"] != 0]]).unique()
    rest = torch.tensor([row for row in range(1, len(before)) if row not in met.tolist()])
    assert torch.allclose(lazy[met], dense[met], rtol=1e-4, atol=1e-6)
    assert torch.equal(lazy[rest], before[rest])
    assert (dense[rest] != before[rest]).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", sorted(MODELS))
def test_every_model_trains_with_them_and_padding_stays_zero(model: str, name: str, tmp_path: Path) -> None:
    made = build(model, tmp_path, table_optimizer=name, learning_rate=0.05, embedding_regularizer=0.01)
    before = copy.deepcopy(made.state_dict())
    trained(made, [batch([3, 0, 6, 1]), batch([0]), batch([2, 2], seed=3)])
    for table in tables(made):
        assert not table.weight[0].any()
        assert table.weight.isfinite().all()
    changed = [key for key, values in made.state_dict().items() if not torch.equal(values, before[key])]
    assert any("embedding_layers" in key for key in changed)
    assert any("dnn" in key for key in changed)


def test_rowwise_adagrad_by_hand() -> None:
    table = nn.Embedding(5, 2, sparse=True, dtype=torch.float64)
    want, total = table.weight.detach().clone(), torch.zeros(5, dtype=torch.float64)
    optimizer = RowwiseAdagrad([table.weight], lr=0.1)
    for ids in ([1, 3, 1], [3, 4]):
        optimizer.zero_grad()
        (table(torch.tensor(ids)) * torch.tensor([1.0, 2.0])).sum().backward()
        optimizer.step()
        for row in set(ids):
            gradient = torch.tensor([1.0, 2.0], dtype=torch.float64) * ids.count(row)
            total[row] += gradient.square().mean()
            want[row] -= 0.1 * gradient / (total[row].sqrt() + 1e-10)
    assert torch.allclose(table.weight, want)


@pytest.mark.parametrize("name", NAMES)
def test_its_state_can_be_saved_and_loaded(name: str, tmp_path: Path) -> None:
    """Training goes on as if it had not stopped, moments and learning rates included."""
    steps = [batch([3, 0, 6, 1], seed=seed) for seed in range(4)]
    whole = build("DIN", tmp_path, table_optimizer=name, learning_rate=0.01)
    trained(whole, steps[:2])
    whole.lr_decay(0.5)
    state = (copy.deepcopy(whole.state_dict()), copy.deepcopy(whole.optimizer.state_dict()))
    resumed = build("DIN", tmp_path, table_optimizer=name, learning_rate=0.1)
    resumed.load_state_dict(state[0])
    resumed.optimizer.load_state_dict(state[1])
    for model in (whole, resumed):
        trained(model, steps[2:])
    assert all(torch.equal(value, resumed.state_dict()[key]) for key, value in whole.state_dict().items())


def test_the_learning_rate_is_lowered_for_both(tmp_path: Path) -> None:
    model = build("DIN", tmp_path, table_optimizer="rowwise_adagrad", learning_rate=0.01)
    assert [group["lr"] for group in model.optimizer.param_groups] == [0.01, 0.01]
    model.lr_decay(0.1)
    assert [group["lr"] for group in model.optimizer.param_groups] == pytest.approx([0.001, 0.001])


def test_an_unknown_name_says_which_there_are(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="table_optimizer 'lazy_adma' is unknown: did you mean 'lazy_adam'"):
        build("DIN", tmp_path, table_optimizer="lazy_adma")
