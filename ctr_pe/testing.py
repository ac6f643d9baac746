"""The battery that every position encoding must pass, in this project's tests and in yours.

    from ctr_pe.testing import check_pe
    check_pe(lambda dim, max_len, num_heads: MyEncoding(dim, max_len, num_heads))

Each check runs the encoding in target attention (every score) and in self-attention (causal and not) and raises
AssertionError with the name of the property, the unit and the size of the difference.

B batch, L history slots, D item dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from ctr_pe.pe.base import PositionEncoding
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.units import SelfAttention, TargetAttention
from ctr_pe.units.scores import SCORES

Factory = Callable[[int, int, int], PositionEncoding]
"""(dim, max_len, num_heads) -> a new encoding."""

SELF_ATTENTION = ("self", "causal")
UNITS = (*SCORES, *SELF_ATTENTION)
DIM, MAX_LEN, HEADS = 8, 6, 2
COUNTS = [3, 0, 6, 1, 5]


@dataclass
class Batch:
    """Targets (B, D), histories (B, L, D), mask (B, L) and ages (B, L) of one batch; ids (B, L + 1) of the items and,
    last, of the target."""

    target: Tensor
    history: Tensor
    mask: Tensor
    age: Tensor
    ids: Tensor

    @classmethod
    def random(cls, counts: list[int], dtype: torch.dtype = torch.float64, seed: int = 0) -> Batch:
        """Histories of ``counts`` items, right-padded with zeros; ages fall from the oldest to the newest item."""
        draw = torch.Generator().manual_seed(seed)
        slots = max(*counts, 1)
        mask = torch.arange(slots) < torch.tensor(counts).unsqueeze(1)
        history = torch.randn(len(counts), slots, DIM, generator=draw, dtype=torch.float64) * mask.unsqueeze(-1)
        gaps = torch.randint(1, 10_000, mask.shape, generator=draw) * mask
        target = torch.randn(len(counts), DIM, generator=draw, dtype=torch.float64)
        ids = torch.randint(1, 4, (len(counts), slots + 1), generator=draw)
        return cls(target.to(dtype), history.to(dtype), mask, gaps.flip(1).cumsum(1).flip(1) * mask, ids)

    def laid_out(self, layout: str) -> Batch:
        """The same items in other slots, with junk in the padding: left, right, mixed, or right and twice as long."""
        count, slots = self.mask.shape
        draw = torch.Generator().manual_seed(0)
        width = 2 * slots + 1 if layout in ("mixed", "doubled") else slots + 3
        mask = torch.arange(width).expand(count, -1) < self.mask.sum(1, keepdim=True)
        if layout == "left":
            mask = mask.flip(1)
        elif layout == "mixed":
            mask = mask.gather(1, torch.rand(mask.shape, generator=draw).argsort(1))
        history = 30 * torch.randn(count, width, DIM, generator=draw, dtype=torch.float64).to(self.history.dtype)
        age = torch.randint(0, 10**9, mask.shape, generator=draw)
        ids = torch.randint(0, 4, (count, width + 1), generator=draw)
        history[mask], age[mask] = self.history[self.mask], self.age[self.mask]
        ids[:, :-1][mask], ids[:, -1] = self.ids[:, :-1][self.mask], self.ids[:, -1]
        return Batch(self.target, history, mask, age, ids)

    def rows(self, index: list[int]) -> Batch:
        return Batch(self.target[index], self.history[index], self.mask[index], self.age[index], self.ids[index])

    def positions(self) -> Positions:
        return Positions.from_mask(self.mask, self.age)

    def items(self, positions: Positions) -> tuple[Items, Items]:
        """History and target as a model has looked them up."""
        ids = positions.pack(self.ids[:, :-1])
        return Items(positions.pack(self.history), (ids,)), Items(self.target, (self.ids[:, -1],))


class Harness(nn.Module):
    """An encoding in one unit: ``forward`` gives states at the real items and what a model would read.

    ``unit`` is a score of target attention, or ``self`` / ``causal`` for self-attention over [history; target]. Its
    weights are the same for every encoding.
    ``draw``: random values for the encoding's parameters, since tables start at zero, which would hide what they do.
    """

    def __init__(self, factory: Factory, unit: str, dtype: torch.dtype = torch.float64, draw: bool = True) -> None:
        super().__init__()
        self.of_target = unit in SCORES
        heads = 1 if self.of_target else HEADS
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # weights are drawn on the CPU
            self.pe = pe = factory(DIM, MAX_LEN if self.of_target else MAX_LEN + 1, heads)
            if not isinstance(pe, PositionEncoding):
                raise AssertionError(f"the factory gave {type(pe).__name__}, not a PositionEncoding")
            torch.default_generator.manual_seed(1)
            self.unit: TargetAttention | SelfAttention = (
                TargetAttention(pe.out_dim, unit, pe)
                if self.of_target
                else SelfAttention(pe.out_dim, heads, pe, unit == "causal")
            )
            for parameter in pe.parameters() if draw else ():
                nn.init.normal_(parameter, std=0.5)
        self.to(dtype)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Interest (B, D) and weights (B, L) of target attention; target states and all states of self-attention."""
        positions = batch.positions()
        target, history = self.pe.embed(batch.target, batch.history, positions)
        if isinstance(self.unit, TargetAttention):
            interest, weights = self.unit(target, history, positions, positions.target_pairs(*batch.items(positions)))
            return interest, weights
        whole, looked_up = self.joined(batch, positions)
        sequence = torch.cat([history, target.unsqueeze(1)], 1)
        states = self.unit(sequence, whole, whole.item_pairs(self.unit.causal, looked_up))
        return states[:, -1], states[:, :-1]

    def joined(self, batch: Batch, positions: Positions) -> tuple[Positions, Items]:
        """Positions and items as looked up of [history; target]."""
        items, target = batch.items(positions)
        ids = (positions.append(items.ids[0], target.ids[0]),)
        return positions.with_target(), Items(positions.append(items.embedding, target.embedding), ids)

    def with_gradients(self, batch: Batch) -> tuple[Tensor, Tensor, list[Tensor]]:
        """``forward``, and the gradients with respect to histories, targets and parameters."""
        history, target = batch.history.clone().requires_grad_(), batch.target.clone().requires_grad_()
        main, other = self(replace(batch, target=target, history=history))
        return main, other, _gradients([main, other], [history, target, *self.parameters()])


def _gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the sum of squares; zero for leaves that it does not depend on."""
    total = torch.stack([output.square().sum() for output in outputs]).sum()
    return list(torch.autograd.grad(total, [x for x in leaves if x.requires_grad], materialize_grads=True))


def _close(got: Tensor, want: Tensor | float, what: str, tolerance: float = 1e-9) -> None:
    worst = (got - want).abs().max().item() if got.numel() else 0.0
    if not worst <= tolerance:  # also when NaN
        raise AssertionError(f"{what}: off by {worst:.3g} (at most {tolerance:.0e})")


def check_padding(factory: Factory, unit: str) -> None:
    """Side, amount and content of padding change nothing: outputs, weights, gradients; padding has zero weight."""
    batch = Batch.random(COUNTS)
    for training in (False, True):
        plain: list[Tensor] = []
        harness = Harness(factory, unit).train(training)
        for layout in ("plain", "left", "right", "mixed", "doubled"):
            laid = batch if layout == "plain" else batch.laid_out(layout)
            main, other, (history, *gradients) = harness.with_gradients(laid)
            what = f"{layout} padding, {unit}, {'training' if training else 'evaluation'}"
            _close(other[~laid.mask], 0.0, f"{what}: output at padding", 0.0)
            _close(history[~laid.mask], 0.0, f"{what}: gradient into padding", 0.0)
            found = [main, other[laid.mask], history[laid.mask], *gradients]
            plain = plain or found
            for tensor, reference in zip(found, plain, strict=True):
                _close(tensor, reference, what)


def _finite(factory: Factory, unit: str, counts: list[int], what: str) -> tuple[Tensor, Tensor]:
    """The outputs for histories of ``counts`` items; they and the gradients must be finite."""
    main, other, gradients = Harness(factory, unit).with_gradients(Batch.random(counts))
    if not all(bool(tensor.isfinite().all()) for tensor in (main, other, *gradients)):
        raise AssertionError(f"{what}, {unit}, counts {counts}: value or gradient is not finite")
    return main, other


def check_empty(factory: Factory, unit: str) -> None:
    """Empty histories, one or all of the batch: zero interest, finite values and gradients."""
    for counts in ([0], [0, 0, 0], [0, 4]):
        interest, _ = _finite(factory, unit, counts, "empty history")
        if unit in SCORES:
            _close(interest[0], 0.0, f"empty history, {unit}: interest", 0.0)


def check_one_item(factory: Factory, unit: str) -> None:
    """One real item of target attention has weight 1."""
    _, weights = Harness(factory, unit)(Batch.random([1, 1]).laid_out("mixed"))
    _close(weights.sum(1), 1.0, f"one item, {unit}: weight")


def check_longer_than_table(factory: Factory, unit: str) -> None:
    """A history longer than max_len gives finite values and gradients, and weights that sum to 1."""
    _, weights = _finite(factory, unit, [MAX_LEN + 5, 2], "history longer than the table")
    if unit in SCORES:
        _close(weights.sum(1), 1.0, f"history longer than the table, {unit}: weights")


def check_batch(factory: Factory, unit: str) -> None:
    """Rows do not see each other: permuted batches and batches of one row give the same."""
    batch, harness = Batch.random(COUNTS), Harness(factory, unit).eval()
    together = harness(batch)
    for rows in ([4, 2, 0, 1, 3], [0], [1], [2], [3], [4]):
        for result, whole in zip(harness(batch.rows(rows)), together, strict=True):
            _close(result, whole[rows], f"{'batch of one row' if len(rows) == 1 else 'permuted batch'}, {unit}")


def check_causal(factory: Factory, unit: str) -> None:
    """In causal self-attention no state sees a later item, nor the target."""
    batch = Batch.random([6, 6])
    harness = Harness(factory, unit).eval()
    _, states = harness(batch)
    for first in range(6):
        history, age, ids = batch.history.clone(), batch.age.clone(), batch.ids.clone()
        history[:, first:] = torch.randn_like(history[:, first:])
        age[:, first:] //= 3  # later items were later still
        ids[:, first:] = ids[:, first:] % 3 + 1
        _, changed = harness(Batch(torch.randn_like(batch.target), history, batch.mask, age, ids))
        _close(changed[:, :first], states[:, :first], f"causality, states before item {first}")


def check_newest(factory: Factory, unit: str) -> None:
    """In self-attention the newest item's state is the same when no other is computed."""
    batch, results = Batch.random([3, 0, 6, 1, MAX_LEN + 5]), []
    given = batch.target.requires_grad_(), batch.history.requires_grad_()
    for alone in (True, False):
        harness = Harness(factory, unit).eval()
        assert isinstance(harness.unit, SelfAttention)
        positions = batch.positions()
        target, items = harness.pe.embed(given[0], positions.pack(given[1]), positions)
        sequence, (whole, looked_up) = positions.append(items, target), harness.joined(batch, positions)
        if alone:
            newest = harness.unit.newest(sequence, whole, whole.newest_pairs(harness.unit.causal, looked_up))
        else:
            pairs = whole.item_pairs(harness.unit.causal, looked_up)
            newest = harness.unit(sequence, whole, pairs)[whole.newest]
        results.append([newest, *_gradients([newest], [*given, *harness.parameters()])])
    for got, want in zip(*results, strict=True):
        _close(got, want, f"newest item alone, {unit}")


def check_gradients(factory: Factory, unit: str) -> None:
    """gradcheck in float64, with respect to target, real items and the encoding's parameters; nothing is NaN.

    Of two random weighted sums of all outputs, along four random directions of all inputs together: an error in any
    entry of the Jacobian shows in them, at a small part of the time that entry by entry takes.
    """
    batch = Batch.random([3, 0, 5, 1])
    harness = Harness(factory, unit).eval()
    parameters = dict(harness.pe.named_parameters(prefix="pe"))  # unit.pe has the same
    leaves = [x.detach() for x in (batch.target, batch.history[batch.mask], *parameters.values())]
    draw = torch.Generator().manual_seed(2)
    directions = [torch.randn(4, *x.shape, generator=draw, dtype=x.dtype) for x in leaves]

    def run(steps: Tensor) -> Tensor:
        moved = [x + torch.tensordot(steps, along, 1) for x, along in zip(leaves, directions, strict=True)]
        history = torch.zeros_like(batch.history).index_put((batch.mask,), moved[1])
        values = dict(zip(parameters, moved[2:], strict=True))
        given = Batch(moved[0], history, batch.mask, batch.age, batch.ids)
        main, other = torch.func.functional_call(harness, values, (given,))
        outputs = torch.cat([main.flatten(), other[batch.mask].flatten()])
        return torch.randn(2, len(outputs), generator=draw.manual_seed(3), dtype=outputs.dtype) @ outputs

    steps = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    try:
        torch.autograd.gradcheck(run, steps, eps=1e-6, atol=1e-6, rtol=1e-7)
    except RuntimeError as error:
        raise AssertionError(f"gradients, {unit}: {str(error).splitlines()[0]}") from None


def check_precision(factory: Factory, unit: str) -> None:
    """float32 agrees with float64, and bfloat16 autocast stays finite and near."""
    exact, _ = Harness(factory, unit).eval()(Batch.random(COUNTS))
    for name, half, tolerance in (("float32", False, 1e-4), ("bfloat16 autocast", True, 0.3)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            got, _ = Harness(factory, unit, torch.float32).eval()(Batch.random(COUNTS, torch.float32))
        _close(got.double(), exact, f"{name}, {unit}", tolerance)


def check_packed(factory: Factory, unit: str) -> None:
    """A packed history (N, D), which models use, gives what the padded one gives."""
    batch = Batch.random(COUNTS).laid_out("mixed")
    harness = Harness(factory, unit).eval()
    positions = batch.positions()
    target, items = harness.pe.embed(batch.target, positions.pack(batch.history), positions)
    if harness.of_target:
        pairs = positions.target_pairs(*batch.items(positions))
        for packed, padded in zip(harness.unit(target, items, positions, pairs), harness(batch), strict=True):
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


def checks(factory: Factory) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """(name of the check, unit, call) for every check and each unit that it is for, to be run one by one."""
    for name, check in CHECKS.items():
        for unit in UNITS_OF.get(name, UNITS):
            yield name, unit, partial(check, factory, unit)


def check_pe(factory: Factory) -> None:
    """Run the whole battery on an encoding.

    Args:
        factory: called with (dim, max_len, num_heads); gives a new encoding with any initial weights.

    Raises:
        AssertionError: the first property that does not hold.
    """
    for _, _, call in checks(factory):
        call()
