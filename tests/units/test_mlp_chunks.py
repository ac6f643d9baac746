"""The score's MLP in pieces gives what it gives layer by layer: values, gradients, statistics, random numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ctr_pe.units import DINScore, mlp_chunks

LENGTHS = [7, 0, 1, 30, 2, 11, 150, 3]
CASES = [
    # hidden units, activation, dropout, output activation
    ([5], "Dice", 0.0, None),
    ([12, 7], "Dice", 0.3, None),
    ([6, 9, 4], "Dice", 0.5, "Dice"),
    ([12, 7], "ReLU", 0.3, None),
    ([8], "GELU", 0.1, "Sigmoid"),
    ([7, 5], "prelu", 0.2, None),  # has parameters: layer by layer,
    ([7, 5], "RReLU", 0.2, None),  # as is what draws anew each time
    ([6], "Dice", 1.0, None),
]


def both(
    monkeypatch: pytest.MonkeyPatch, score: DINScore, call: Callable[[], Tensor], inputs: list[Tensor]
) -> list[list[Tensor]]:
    """In pieces and layer by layer, from the same random numbers: values, gradients and buffers."""
    found = []
    start = {name: values.clone() for name, values in score.state_dict().items()}
    for supports in (mlp_chunks.supports, lambda layers, items: False):
        monkeypatch.setattr(mlp_chunks, "supports", supports)
        score.load_state_dict(start)
        torch.manual_seed(5)
        values = call()
        drawn = torch.rand(1)  # the stream goes on where it would
        leaves = [leaf for leaf in (*inputs, *score.parameters()) if leaf.requires_grad]
        slope = torch.linspace(-1, 1, len(values), dtype=values.dtype)
        gradients = torch.autograd.grad((values * slope).sum(), leaves, allow_unused=True)
        zeros = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(leaves, gradients, strict=True)
        ]
        found.append([values.detach(), drawn, *zeros, *(buffer.clone() for buffer in score.buffers())])
    return found


def made(dtype: torch.dtype, lengths: list[int], dim: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    target = torch.randn(len(lengths), dim, dtype=dtype, requires_grad=True)
    items = torch.randn(sum(lengths), dim, dtype=dtype, requires_grad=True)
    return target, items, torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.long))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", [1, 2**18])  # pieces of 64 pairs, or one
@pytest.mark.parametrize(("units", "activation", "dropout", "last"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_layer_by_layer(
    dtype: torch.dtype,
    units: list[int],
    activation: str,
    dropout: float,
    last: str | None,
    size: int,
    training: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(mlp_chunks, "SIZE", size)
    score = DINScore(6, units, activation, dropout, last).to(dtype).train(training)
    for name, tensor in score.state_dict().items():
        if "alpha" in name or "running_mean" in name:
            nn.init.normal_(tensor)
        elif "running_var" in name:
            nn.init.uniform_(tensor, 0.5, 2.0)
    target, items, rows = made(dtype, LENGTHS)
    ours, plain = both(monkeypatch, score, lambda: score(target, items, rows), [target, items])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance * max(1.0, float(theirs.abs().max())))
    assert plain[0].std() > 0 or dropout == 1


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", ["Dice", "ReLU"])
@pytest.mark.parametrize("lengths", [[], [0, 0], [1], [0, 1, 0], [2], [64], [65]])
def test_few_pairs_or_none(
    lengths: list[int], activation: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(mlp_chunks, "SIZE", 1)
    score = DINScore(6, [8, 5], activation, 0.2).double().train(training)
    target, items, rows = made(torch.float64, lengths)
    ours, plain = both(monkeypatch, score, lambda: score(target, items, rows), [target, items])
    assert all(torch.allclose(*pair, atol=1e-12) for pair in zip(ours, plain, strict=True))
    assert all(part.isfinite().all() for part in ours)


def test_targets_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(mlp_chunks, "SIZE", 1)
    score = DINScore(6, [8, 5], "Dice", 0.2).double()
    target, items, rows = made(torch.float64, LENGTHS)
    ours, plain = both(monkeypatch, score, lambda: score(target[rows], items, None), [target, items])
    assert all(torch.allclose(*pair, atol=1e-12) for pair in zip(ours, plain, strict=True))
    monkeypatch.undo()
    shared = both(monkeypatch, score.eval(), lambda: score(target, items, rows), [target, items])[0]
    own = both(monkeypatch, score, lambda: score(target[rows], items, None), [target, items])[0]
    assert all(torch.allclose(*pair, atol=1e-12) for pair in zip(shared, own, strict=True))


def test_what_needs_no_gradient_gets_none() -> None:
    score = DINScore(6, [8], "Dice").double()
    target, items, rows = made(torch.float64, LENGTHS)
    score(target, items.detach(), rows).sum().backward()
    assert target.grad is not None
    with torch.no_grad():
        assert not score(target, items, rows).requires_grad


def test_gradients_are_those_of_differences() -> None:
    torch.manual_seed(0)
    score = DINScore(3, [5, 4], "Dice").double()
    nn.init.normal_(score.mlp[1].alpha)
    target, items, rows = made(torch.float64, [3, 1, 4], dim=3)
    assert torch.autograd.gradcheck(lambda t, h: score(t, h, rows), (target, items))


def test_half_precision_goes_layer_by_layer() -> None:
    score = DINScore(6, [8], "ReLU")
    target, items, rows = made(torch.float32, LENGTHS)
    with torch.autocast("cpu", torch.bfloat16):
        assert not mlp_chunks.supports(list(score.mlp)[1:], items)
        assert torch.allclose(score(target, items, rows).float(), score.float()(target, items, rows).float(), atol=0.05)
    assert mlp_chunks.supports(list(score.mlp)[1:], items)


def test_only_a_piece_s_pairs_are_alive_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the layers' results, no tensor of all pairs is made in the forward pass."""
    seen: list[int] = []
    forward = mlp_chunks.Activated.forward

    def watched(self: mlp_chunks.Activated, piece: slice) -> tuple[Tensor, Tensor]:
        found = forward(self, piece)
        seen.append(len(self.x))
        return found

    monkeypatch.setattr(mlp_chunks, "SIZE", 1)
    monkeypatch.setattr(mlp_chunks.Activated, "forward", watched)
    score = DINScore(6, [8], "Dice")
    score(*made(torch.float32, LENGTHS))
    assert seen == [64, 64, 64, 12]
