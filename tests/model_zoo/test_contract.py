"""Every model with every encoding: what must hold whatever the encoding and the backbone are."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ctr_pe.model_zoo import MODELS
from ctr_pe.pe import available_pes
from ctr_pe.pe.base import PositionEncoding
from tests.support.models import batch, build, some_pairs

ENCODINGS = [*available_pes(), "native", "rope+cape", "cape+kernel", "time_bias+cape"]
FOR_POOLING = {
    "kernel": {"lower"},
    "cape+kernel": {"encodings.1.lower"},
    "pdm": {"table", "query.weight", "key.weight"},
}
"""Parameters that act on pooled values. DIEN pools none: it takes target attention's weights and nothing else."""


PAIRS = [(name, encoding) for name in MODELS for encoding in ENCODINGS]


def turn(name: str, encoding: str) -> int:
    return [*MODELS].index(name) + ENCODINGS.index(encoding)


@cache
def _built(folder: Path, name: str, encoding: str, **params: Any) -> tuple[Any, torch.Tensor]:
    model = build(name, folder, position_encoding=encoding, learning_rate=0.05, **params)
    return model, torch.get_rng_state()


@pytest.fixture
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, torch.Tensor]]:
    """``built(name, encoding, **params)`` is a model, only to be read, and the random stream's state after it."""
    return partial(_built, tmp_path_factory.getbasetemp())


@pytest.fixture
def fresh(built: Callable[..., tuple[Any, torch.Tensor]]) -> Callable[..., Any]:
    """``fresh(name, encoding, **params)`` is a model that was just built: each is built once, then copied. The random
    stream goes on where building it left off."""

    def copied(name: str, encoding: str, **params: Any) -> Any:
        model, state = built(name, encoding, **params)
        torch.set_rng_state(state)
        return deepcopy(model)

    return copied


def randomised(model: Any) -> Any:
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=draw)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.zeros_(module.weight[0])
    return model.double()


LAYOUTS: list[dict[str, Any]] = [{"slots": 11}, {"left": True}, {"left": True, "slots": 9}]


@pytest.mark.parametrize(
    ("name", "encoding", "everything"),
    [(*pair, False) for pair in PAIRS if turn(*pair) % 2 == 0]
    + [pytest.param(*pair, True, marks=pytest.mark.slow) for pair in PAIRS],
)
def test_padding_changes_nothing(name: str, encoding: str, everything: bool, fresh: Callable[..., Any]) -> None:
    """By default every second pair in one layout and one mode: every model and every encoding meets each of these."""
    model, cell = randomised(fresh(name, encoding)), turn(name, encoding)
    for training in [False, True] if everything else [cell // 2 % 2 == 1]:
        outputs, gradients = [], []
        model.train(training)
        for layout in [{}, *(LAYOUTS if everything else [LAYOUTS[cell % 3]])]:
            torch.manual_seed(0)
            outputs.append(model(batch([3, 0, 6, 1, 5], **layout))["y_pred"])
            model.zero_grad()
            outputs[-1].square().sum().backward()
            gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        for output, gradient in zip(outputs[1:], gradients[1:], strict=True):
            assert torch.allclose(output, outputs[0], atol=1e-12)
            for ours, first in zip(gradient, gradients[0], strict=True):
                assert torch.allclose(ours, first, atol=1e-9)


@some_pairs(MODELS, ENCODINGS, 0, of=3)
def test_rows_do_not_see_each_other(name: str, encoding: str, fresh: Callable[..., Any]) -> None:
    model = randomised(fresh(name, encoding)).eval()
    rows, order = batch([3, 0, 6, 1, 5]), torch.tensor([4, 2, 0, 1, 3])
    whole = model(rows)["y_pred"]
    assert torch.allclose(model({key: value[order] for key, value in rows.items()})["y_pred"], whole[order], atol=1e-12)
    for row in range(5):
        alone = model({key: value[[row]] for key, value in rows.items()})["y_pred"]
        assert torch.allclose(alone, whole[[row]], atol=1e-12)


@some_pairs(MODELS, ENCODINGS, 1, of=3)
def test_empty_histories_and_batches_of_one_row(name: str, encoding: str, fresh: Callable[..., Any]) -> None:
    model = fresh(name, encoding).train()
    model._max_gradient_norm = 10.0
    for counts in ([0], [0, 0, 0], [1]):
        assert model.train_step(batch(counts)).isfinite()
        assert all(parameter.isfinite().all() for parameter in model.parameters())


@some_pairs(MODELS, ENCODINGS, 2, of=3)
def test_every_parameter_of_the_encoding_learns_within_five_steps(
    name: str, encoding: str, fresh: Callable[..., Any]
) -> None:
    model = fresh(name, encoding).train()
    model._max_gradient_norm = 10.0
    parameters = {
        f"{prefix}.{key}": parameter
        for prefix, module in model.named_modules()
        if isinstance(module, PositionEncoding)
        for key, parameter in module.named_parameters()
    }
    with torch.no_grad():
        for key, parameter in parameters.items():
            if key.endswith("threshold"):  # of fire, which acts on histories shorter than it; at first 1.5 items here
                parameter.fill_(5.0)
    still = set(parameters)
    for step in range(5):
        if still:
            model.train_step(batch([3, 0, 6, 1, 5, 4], seed=step))
            still -= {key for key, p in parameters.items() if p.grad is not None and p.grad.abs().max() > 0}
    unread = FOR_POOLING.get(encoding, set()) if name == "DIEN" else set()
    assert still == {f"attentions.0.pe.{key}" for key in unread}


@some_pairs(MODELS, ENCODINGS, 0, of=3)
def test_backbones_are_paired_with_none(
    name: str, encoding: str, built: Callable[..., tuple[Any, torch.Tensor]]
) -> None:
    """At one seed the backbone's weights are those that it has without encoding, and the random stream goes on at the
    same place. (Where an encoding widens the items, weights differ in shape.)"""

    def start(position_encoding: str, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        model, state = built(name, position_encoding, seed=seed)
        torch.set_rng_state(state)
        modules = model.named_modules(remove_duplicate=False)  # layers may share an encoding
        inside = {key for prefix, module in modules if isinstance(module, PositionEncoding)
                  for key in module.state_dict(prefix=f"{prefix}.")}  # fmt: skip
        return {key: value for key, value in model.state_dict().items() if key not in inside}, torch.rand(3)

    (ours, after), (theirs, after_none), (other, _) = start(encoding, 7), start("none", 7), start(encoding, 8)
    assert ours.keys() == theirs.keys()
    if all(value.shape == theirs[key].shape for key, value in ours.items()):
        assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
        assert torch.equal(after, after_none)
    assert not torch.equal(ours["dnn.mlp.0.weight"], other["dnn.mlp.0.weight"])


@some_pairs(MODELS, ENCODINGS, 1, of=3)
def test_mixed_precision_is_near(name: str, encoding: str, fresh: Callable[..., Any]) -> None:
    """Loss and gradients too; what leaves the model is float32."""
    losses, scores = [], []
    for amp in (False, True):
        model = randomised(fresh(name, encoding, amp=amp)).float().train()
        rows = batch([3, 0, 6, 1, 5])
        outputs = model(rows)
        loss = model.compute_loss(outputs, model.get_labels(rows))
        loss.backward()
        assert outputs["y_pred"].dtype == torch.float32
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        losses.append(loss)
        scores.append(outputs["y_pred"])
    assert torch.allclose(scores[1], scores[0], atol=0.02)
    assert torch.allclose(losses[1], losses[0], atol=0.02)
    if name != "TIN":  # its dot scores are sums of products, which autocast leaves in float32
        assert not torch.equal(scores[1], scores[0])
