"""The battery that every position encoding must pass, in this project's tests and in yours.

    from ctr_pe.testing import check_pe
    check_pe(lambda dim, max_len, num_heads: MyEncoding(dim, max_len, num_heads))

Each check runs the encoding in target attention (every score) and in self-attention (causal and not) and raises
AssertionError with the name of the property, the unit and the size of the difference.

B batch, L history slots, D item dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ctr_pe.pe.base import PositionEncoding
from ctr_pe.positions import Positions
from ctr_pe.units import SelfAttention, TargetAttention
from ctr_pe.units.scores import SCORES

Factory = Callable[[int, int, int], PositionEncoding]
"""(dim, max_len, num_heads) -> a new encoding."""

SELF_ATTENTION = ("self", "causal")
UNITS = (*SCORES, *SELF_ATTENTION)
DIM, MAX_LEN, HEADS = 8, 6, 2


@dataclass
class Batch:
    """Targets (B, D), histories (B, L, D), mask (B, L) and ages (B, L) of one batch."""

    target: Tensor
    history: Tensor
    mask: Tensor
    age: Tensor

    @classmethod
    def random(cls, counts: list[int], dtype: torch.dtype = torch.float64, seed: int = 0) -> Batch:
        """Histories of ``counts`` items, right-padded with zeros; ages fall from the oldest to the newest item."""
        draw = torch.Generator().manual_seed(seed)
        slots = max(*counts, 1)
        mask = torch.arange(slots) < torch.tensor(counts).unsqueeze(1)
        history = torch.randn(len(counts), slots, DIM, generator=draw, dtype=torch.float64) * mask.unsqueeze(-1)
        gaps = torch.randint(1, 10_000, mask.shape, generator=draw) * mask
        target = torch.randn(len(counts), DIM, generator=draw, dtype=torch.float64)
        return cls(target.to(dtype), history.to(dtype), mask, gaps.flip(1).cumsum(1).flip(1) * mask)

    def laid_out(self, layout: str, seed: int = 0) -> Batch:
        """The same items in other slots, with junk in the padding: left, right, mixed, or right and twice as long."""
        count, slots = self.mask.shape
        draw = torch.Generator().manual_seed(seed)
        width = 2 * slots + 1 if layout in ("mixed", "doubled") else slots + 3
        mask = torch.zeros(count, width, dtype=torch.bool)
        for row, items in enumerate(self.mask.sum(1).tolist()):
            if layout == "left":
                mask[row, width - items :] = True
            elif layout == "mixed":
                mask[row, torch.randperm(width, generator=draw)[:items]] = True
            else:
                mask[row, :items] = True
        history = 30 * torch.randn(count, width, DIM, generator=draw, dtype=torch.float64).to(self.history.dtype)
        age = torch.randint(0, 10**9, mask.shape, generator=draw)
        history[mask], age[mask] = self.history[self.mask], self.age[self.mask]
        return Batch(self.target.clone(), history, mask, age)

    def rows(self, index: Tensor) -> Batch:
        return Batch(self.target[index], self.history[index], self.mask[index], self.age[index])


class Harness(nn.Module):
    """An encoding in one unit: ``forward`` gives states at the real items and what a model would read.

    ``unit`` is a score of target attention, or ``self`` / ``causal`` for self-attention over [history; target].
    ``draw``: random values for the encoding's parameters, since tables start at zero, which would hide what they do.
    """

    def __init__(
        self, factory: Factory, unit: str, dtype: torch.dtype = torch.float64, seed: int = 0, draw: bool = True
    ) -> None:
        super().__init__()
        self.of_target = unit in SCORES
        heads = 1 if self.of_target else HEADS
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # weights are drawn on the CPU
            pe = factory(DIM, MAX_LEN if self.of_target else MAX_LEN + 1, heads)
            if not isinstance(pe, PositionEncoding):
                raise AssertionError(f"the factory gave {type(pe).__name__}, not a PositionEncoding")
            width = pe.out_dim
            self.unit = (
                TargetAttention(width, unit, pe)
                if self.of_target
                else SelfAttention(width, heads, pe, unit == "causal")
            )
            self.pe = pe
            for parameter in pe.parameters() if draw else ():
                nn.init.normal_(parameter, std=0.5)
        self.to(dtype)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Interest (B, D) and weights (B, L) of target attention; target states and all states of self-attention."""
        positions = Positions.from_mask(batch.mask, batch.age)
        target, history = self.pe.embed(batch.target, batch.history, positions)
        if self.of_target:
            interest, weights = self.unit(target, history, positions)
            return interest, weights
        assert target is not None
        states = self.unit(torch.cat([history, target.unsqueeze(1)], 1), positions.with_target())
        return states[:, -1], states[:, :-1]


def _close(got: Tensor, want: Tensor, what: str, tolerance: float = 1e-9) -> None:
    worst = (got - want).abs().max().item() if got.numel() else 0.0
    if not worst <= tolerance:  # also when NaN
        raise AssertionError(f"{what}: off by {worst:.3g} (at most {tolerance:.0e})")


def check_padding(factory: Factory, unit: str) -> None:
    """Side, amount and content of padding change nothing: outputs, weights, gradients; padding has zero weight."""
    batch = Batch.random([3, 0, 6, 1, 5])
    for training in (False, True):
        results = []
        for layout in ("plain", "left", "right", "mixed", "doubled"):
            laid = batch if layout == "plain" else batch.laid_out(layout)
            laid = Batch(laid.target.requires_grad_(), laid.history.detach().requires_grad_(), laid.mask, laid.age)
            harness = Harness(factory, unit).train(training)
            main, other = harness(laid)
            (main.square().sum() + other[laid.mask].square().sum()).backward()
            what = f"{layout} padding, {unit}, {'training' if training else 'evaluation'}"
            _close(other[~laid.mask], torch.zeros_like(other[~laid.mask]), f"{what}: output at padding", 0.0)
            grad = laid.history.grad
            assert grad is not None
            _close(grad[~laid.mask], torch.zeros_like(grad[~laid.mask]), f"{what}: gradient into padding", 0.0)
            parameters = [p.grad for p in harness.parameters() if p.grad is not None]
            results.append((what, [main, other[laid.mask], grad[laid.mask], *parameters]))
            laid.target.grad = None
        for what, tensors in results[1:]:
            for tensor, reference in zip(tensors, results[0][1], strict=True):
                _close(tensor, reference, what)


def check_empty(factory: Factory, unit: str) -> None:
    """Empty histories, one or all of the batch: zero interest, finite values and gradients."""
    for counts in ([0], [0, 0, 0], [0, 4]):
        batch = Batch.random(counts)
        batch.target.requires_grad_(), batch.history.requires_grad_()
        harness = Harness(factory, unit)
        main, other = harness(batch)
        (main.square().sum() + other.square().sum()).backward()
        tensors = [main, other, *(p.grad for p in harness.parameters() if p.grad is not None)]
        tensors += [x.grad for x in (batch.target, batch.history) if x.grad is not None]
        if not all(bool(tensor.isfinite().all()) for tensor in tensors):
            raise AssertionError(f"empty history, {unit}, counts {counts}: value or gradient is not finite")
        if harness.of_target:
            _close(main[0], torch.zeros_like(main[0]), f"empty history, {unit}: interest", 0.0)


def check_one_item(factory: Factory, unit: str) -> None:
    """One real item of target attention has weight 1."""
    _, weights = Harness(factory, unit)(Batch.random([1, 1]).laid_out("mixed"))
    _close(weights.sum(1), torch.ones(2, dtype=weights.dtype), f"one item, {unit}: weight")


def check_longer_than_table(factory: Factory, unit: str) -> None:
    """A history longer than max_len gives finite values and gradients, and weights that sum to 1."""
    batch = Batch.random([MAX_LEN + 5, 2])
    batch.history.requires_grad_()
    harness = Harness(factory, unit)
    main, other = harness(batch)
    (main.square().sum() + other.square().sum()).backward()
    grads = [x.grad for x in (batch.history, *harness.parameters()) if x.grad is not None]
    if not all(bool(tensor.isfinite().all()) for tensor in (main, other, *grads)):
        raise AssertionError(f"history longer than the table, {unit}: value or gradient is not finite")
    if harness.of_target:
        _close(other.sum(1), torch.ones(2, dtype=other.dtype), f"history longer than the table, {unit}: weights")


def check_batch(factory: Factory, unit: str) -> None:
    """Rows do not see each other: permuted batches and batches of one row give the same."""
    batch = Batch.random([3, 0, 6, 1, 5])
    harness = Harness(factory, unit).eval()
    main, other = harness(batch)
    order = torch.tensor([4, 2, 0, 1, 3])
    for result, whole in zip(harness(batch.rows(order)), (main, other), strict=True):
        _close(result, whole[order], f"permuted batch, {unit}")
    for row in range(len(order)):
        for result, whole in zip(harness(batch.rows(torch.tensor([row]))), (main, other), strict=True):
            _close(result, whole[[row]], f"batch of one row, {unit}")


def check_causal(factory: Factory, unit: str) -> None:
    """In causal self-attention no state sees a later item, nor the target."""
    batch = Batch.random([6, 6])
    harness = Harness(factory, unit).eval()
    _, states = harness(batch)
    for first in range(6):
        history, age = batch.history.clone(), batch.age.clone()
        history[:, first:] = torch.randn_like(history[:, first:])
        age[:, first:] //= 3  # later items were later still
        _, changed = harness(Batch(torch.randn_like(batch.target), history, batch.mask, age))
        _close(changed[:, :first], states[:, :first], f"causality, states before item {first}")


def check_newest(factory: Factory, unit: str) -> None:
    """In self-attention the newest item's state is the same when no other is computed."""
    batch, results = Batch.random([3, 0, 6, 1, MAX_LEN + 5]), []
    for alone in (True, False):
        harness = Harness(factory, unit).eval()
        positions, whole = (p := Positions.from_mask(batch.mask, batch.age)), p.with_target()
        given = batch.target.detach().requires_grad_(), positions.pack(batch.history).requires_grad_()
        target, items = harness.pe.embed(*given, positions)
        assert target is not None
        sequence = positions.append(items, target)
        assert isinstance(harness.unit, SelfAttention)
        newest = harness.unit.newest(sequence, whole) if alone else harness.unit(sequence, whole)[whole.newest]
        newest.square().sum().backward()
        results.append([newest, *(x.grad for x in (*given, *harness.parameters()) if x.grad is not None)])
    for got, want in zip(*results, strict=True):
        _close(got, want, f"newest item alone, {unit}")


def check_gradients(factory: Factory, unit: str) -> None:
    """gradcheck in float64, with respect to target, real items and the encoding's parameters; nothing is NaN.

    Of two random weighted sums of all outputs, along four random directions of all inputs together: an error in any
    entry of the Jacobian shows in them, at a small part of the time that entry by entry takes.
    """
    batch = Batch.random([3, 0, 5, 1])
    harness = Harness(factory, unit).eval()
    parameters = dict(harness.pe.named_parameters())
    leaves = [x.detach() for x in (batch.target, batch.history[batch.mask], *parameters.values())]
    draw = torch.Generator().manual_seed(2)
    directions = [torch.randn(4, *x.shape, generator=draw, dtype=x.dtype) for x in leaves]

    def run(steps: Tensor) -> Tensor:
        moved = [x + torch.tensordot(steps, along, 1) for x, along in zip(leaves, directions, strict=True)]
        history = torch.zeros_like(batch.history).index_put((batch.mask,), moved[1])
        values = dict(zip(parameters, moved[2:], strict=True))
        values = {f"{prefix}.{name}": value for prefix in ("pe", "unit.pe") for name, value in values.items()}
        main, other = torch.func.functional_call(harness, values, (Batch(moved[0], history, batch.mask, batch.age),))
        outputs = torch.cat([main.flatten(), other[batch.mask].flatten()])
        return torch.randn(2, len(outputs), generator=draw.manual_seed(3), dtype=outputs.dtype) @ outputs

    steps = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    try:
        torch.autograd.gradcheck(run, steps, eps=1e-6, atol=1e-6, rtol=1e-7)
    except RuntimeError as error:
        raise AssertionError(f"gradients, {unit}: {str(error).splitlines()[0]}") from None


def check_precision(factory: Factory, unit: str) -> None:
    """float32 agrees with float64, and bfloat16 autocast stays finite and near."""
    counts = [3, 0, 6, 1, 5]
    exact, _ = Harness(factory, unit).eval()(Batch.random(counts))
    single_harness = Harness(factory, unit, torch.float32).eval()
    single, _ = single_harness(Batch.random(counts, torch.float32))
    _close(single.double(), exact, f"float32, {unit}", 1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half, _ = single_harness(Batch.random(counts, torch.float32))
    _close(half.double(), exact, f"bfloat16 autocast, {unit}", 0.3)


def check_packed(factory: Factory, unit: str) -> None:
    """A packed history (N, D), which models use, gives what the padded one gives."""
    batch = Batch.random([3, 0, 6, 1, 5]).laid_out("mixed")
    harness = Harness(factory, unit).eval()
    positions = Positions.from_mask(batch.mask, batch.age)
    target, items = harness.pe.embed(batch.target, positions.pack(batch.history), positions)
    if harness.of_target:
        for packed, padded in zip(harness.unit(target, items, positions), harness(batch), strict=True):
            _close(packed, padded, f"packed history, {unit}")
    else:
        _, padded = harness.pe.embed(batch.target, batch.history, positions)
        _close(items, positions.pack(padded), f"packed history, {unit}: embed")


CHECKS: dict[str, Callable[[Factory, str], None]] = {
    "padding": check_padding,
    "empty history": check_empty,
    "one item": check_one_item,
    "history longer than the table": check_longer_than_table,
    "batch": check_batch,
    "packed": check_packed,
    "causality": check_causal,
    "newest item alone": check_newest,
    "gradients": check_gradients,
    "precision": check_precision,
}


UNITS_OF: dict[str, tuple[str, ...]] = {
    "one item": tuple(SCORES),
    "causality": ("causal",),
    "newest item alone": SELF_ATTENTION,
}


def units_of(check: str) -> tuple[str, ...]:
    """The units that a check of CHECKS is for."""
    return UNITS_OF.get(check, UNITS)


def checks(factory: Factory) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """(name of the check, unit, call) for every check and each unit that it is for, to be run one by one."""
    for name, check in CHECKS.items():
        for unit in units_of(name):
            yield name, unit, lambda check=check, unit=unit: check(factory, unit)  # type: ignore[misc]


def check_pe(factory: Factory) -> None:
    """Run the whole battery on an encoding.

    Args:
        factory: called with (dim, max_len, num_heads); gives a new encoding with any initial weights.

    Raises:
        AssertionError: the first property that does not hold.
    """
    for _, _, call in checks(factory):
        call()
