"""The recurrent units: against loops over single rows, at the ends of the attention's range, and on any padding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ctr_pe import Positions
from ctr_pe.testing import DIM, Batch
from ctr_pe.units import GRU, AttentionGRU
from ctr_pe.units.gru import by_step, last_state

COUNTS, STATE = [3, 0, 6, 1, 5, 6], 5
ATTENTION = ["AIGRU", "AGRU", "AUGRU"]
every_gate = pytest.mark.parametrize("gate", ATTENTION)
Unit = Callable[[Tensor, Positions], Tensor]


def attention_gru(gate: str, seed: int = 0) -> AttentionGRU:
    torch.manual_seed(seed)
    unit = AttentionGRU(DIM, STATE, gate).double()
    for bias in (unit.bias_ih, unit.bias_hh):
        nn.init.normal_(bias)
    return unit


def attended(unit: AttentionGRU, attention: float | None = None) -> Unit:
    """The unit as a function of items: each item's attention is ``attention``, or a function of its vector."""

    def run(items: Tensor, positions: Positions) -> Tensor:
        weights = items[:, 0].sigmoid() if attention is None else torch.full_like(items[:, 0], attention)
        return unit(items, weights, positions)

    return run


UNITS: dict[str, Callable[[], Unit]] = {"GRU": lambda: GRU(DIM, STATE).double()} | {
    gate: partial(lambda gate: attended(attention_gru(gate)), gate) for gate in ATTENTION
}
every_unit = pytest.mark.parametrize("name", UNITS)


def states_of(unit: Unit, batch: Batch) -> Tensor:
    positions = Positions.from_mask(batch.mask)
    return unit(positions.pack(batch.history), positions)


def row_by_row(batch: Batch, step: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """States (N, S) of ``step(item (D,), state (S,)) -> state``, one row and one item after the other."""
    states = []
    for history, mask in zip(batch.history, batch.mask, strict=True):
        state = torch.zeros(STATE, dtype=torch.float64)
        for item in history[mask]:
            state = step(item, state)
            states.append(state)
    return torch.stack(states)


class TestAgainstLoops:
    @every_gate
    def test_attention_gru(self, gate: str) -> None:
        """DIEN's equations 2 to 7, written out for one item of one row."""
        unit, batch = attention_gru(gate), Batch.random(COUNTS).laid_out("mixed")

        def step(item: Tensor, state: Tensor) -> Tensor:
            a = item[0].sigmoid()
            x = a * item if gate == "AIGRU" else item
            of_item = [w @ x + b for w, b in zip(unit.weight_ih.split(STATE), unit.bias_ih.split(STATE), strict=True)]
            of_state = [
                u @ state + b for u, b in zip(unit.weight_hh.split(STATE), unit.bias_hh.split(STATE), strict=True)
            ]
            r = torch.sigmoid(of_item[-2] + of_state[-2])
            c = torch.tanh(of_item[-1] + r * of_state[-1])
            if gate == "AGRU":
                return (1 - a) * state + a * c
            u = torch.sigmoid(of_item[0] + of_state[0]) * (a if gate == "AUGRU" else 1)
            return (1 - u) * state + u * c

        assert torch.allclose(states_of(attended(unit), batch), row_by_row(batch, step), rtol=0, atol=1e-13)

    def test_gru_is_torch_s(self) -> None:
        """Values and gradients; without gradients, and on a GPU, it runs torch's own kernel."""
        batch = Batch.random(COUNTS).laid_out("mixed")
        positions = Positions.from_mask(batch.mask)
        gru = GRU(DIM, STATE).double()
        order, sizes = by_step(positions)

        def by_torch(items: Tensor) -> Tensor:
            return nn.GRU.forward(gru, PackedSequence(items[order], torch.tensor(sizes)))[0].data[order.argsort()]

        results = []
        for run in (lambda items: gru(items, positions), by_torch):
            gru.zero_grad()
            items = positions.pack(batch.history).requires_grad_()
            states = run(items)
            states.square().sum().backward()
            results.append([states.detach(), items.grad, *(p.grad.clone() for p in gru.parameters())])
        for ours, theirs in zip(*results, strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
        with torch.no_grad():
            assert torch.allclose(gru(positions.pack(batch.history), positions), results[0][0], rtol=0, atol=1e-12)
        rows = positions.item_rows
        for row in rows.unique():
            alone, _ = nn.GRU.forward(gru, positions.pack(batch.history)[rows == row])
            assert torch.allclose(results[0][0][rows == row], alone, rtol=0, atol=1e-12)


class TestAttention:
    def test_augru_without_attention_stays_where_it_is(self) -> None:
        unit, batch = attention_gru("AUGRU"), Batch.random(COUNTS)
        assert states_of(attended(unit, 0.0), batch).abs().max() == 0
        positions = Positions.from_mask(batch.mask)
        ignored = (positions.pack(positions.distance) != 2).double()  # each row's last item but one
        states = unit(positions.pack(batch.history), ignored, positions)
        skipped, before = ((positions.pack(positions.distance) == d).nonzero().squeeze(1) for d in (2, 3))
        assert torch.equal(states[skipped], states[before])

    def test_agru_without_attention_stays_where_it_is(self) -> None:
        assert states_of(attended(attention_gru("AGRU"), 0.0), Batch.random(COUNTS)).abs().max() == 0

    @pytest.mark.parametrize("gate", ["AIGRU", "AUGRU"])
    def test_with_full_attention_it_is_a_gru(self, gate: str) -> None:
        """torch's z is 1 - u: its rows of z are ours of u with the other sign."""
        unit, batch, gru = attention_gru(gate), Batch.random(COUNTS), GRU(DIM, STATE).double()
        with torch.no_grad():
            for theirs, ours in zip(gru.parameters(), unit.parameters(), strict=True):
                update, reset, new = ours.chunk(3)
                theirs.copy_(torch.cat([reset, -update, new]))
        assert torch.allclose(states_of(attended(unit, 1.0), batch), states_of(gru, batch), rtol=0, atol=1e-13)

    def test_agru_with_full_attention_is_its_candidate(self) -> None:
        unit, batch = attention_gru("AGRU"), Batch.random(COUNTS)

        def candidate(item: Tensor, state: Tensor) -> Tensor:
            reset, new = (unit.weight_ih @ item + unit.bias_ih).split(STATE)
            of_reset, of_new = (unit.weight_hh @ state + unit.bias_hh).split(STATE)
            return torch.tanh(new + torch.sigmoid(reset + of_reset) * of_new)

        assert torch.allclose(states_of(attended(unit, 1.0), batch), row_by_row(batch, candidate), rtol=0, atol=1e-13)

    def test_aigru_without_attention_sees_no_item(self) -> None:
        unit, batch = attended(attention_gru("AIGRU"), 0.0), Batch.random(COUNTS)
        states = states_of(unit, batch)
        batch.history.mul_(3)
        assert torch.equal(states_of(unit, batch), states)
        assert states.abs().max() > 0

    def test_agru_has_no_update_gate(self) -> None:
        """FuxiCTR computes one and does not use it."""
        shapes = {gate: [tuple(p.shape) for p in attention_gru(gate).parameters()] for gate in ATTENTION}
        assert shapes["AGRU"] == [(2 * STATE, DIM), (2 * STATE, STATE), (2 * STATE,), (2 * STATE,)]
        assert shapes["AUGRU"] == shapes["AIGRU"] == [(3 * STATE, DIM), (3 * STATE, STATE), (3 * STATE,), (3 * STATE,)]


class TestRows:
    @every_unit
    @pytest.mark.parametrize("layout", ["left", "mixed", "doubled"])
    def test_padding_changes_nothing(self, name: str, layout: str) -> None:
        batch, unit = Batch.random(COUNTS), UNITS[name]()
        assert torch.equal(states_of(unit, batch.laid_out(layout)), states_of(unit, batch))

    @every_unit
    def test_an_item_changes_later_states_of_its_row_only(self, name: str) -> None:
        batch, unit = Batch.random(COUNTS), UNITS[name]()
        before = states_of(unit, batch)
        batch.history[2, 3] += 1
        moved = (states_of(unit, batch) - before).abs().amax(1) > 0
        rows, _, slots = Positions.from_mask(batch.mask).real_pairs()
        assert torch.equal(moved, (rows == 2) & (slots >= 3))

    @every_unit
    @pytest.mark.parametrize("counts", [[0], [0, 0, 0], [1], [6]])
    def test_empty_histories_and_single_rows(self, name: str, counts: list[int]) -> None:
        batch = Batch.random(counts)
        with torch.no_grad():
            assert states_of(UNITS[name](), batch).shape == (sum(counts), STATE)
        batch.history.requires_grad_()
        positions = Positions.from_mask(batch.mask)
        states = states_of(UNITS[name](), batch)
        assert states.shape == (sum(counts), STATE)
        last = last_state(states, positions)
        assert last.shape == (len(counts), STATE)
        last.sum().backward()
        assert batch.history.grad is not None
        assert batch.history.grad.isfinite().all()

    def test_last_state_is_that_of_the_most_recent_item(self) -> None:
        batch = Batch.random(COUNTS).laid_out("mixed")
        positions = Positions.from_mask(batch.mask)
        states = states_of(UNITS["AUGRU"](), batch)
        last, of_row = last_state(states, positions), states.split(COUNTS)
        for row, count in enumerate(COUNTS):
            assert torch.equal(last[row], of_row[row][-1] if count else torch.zeros(STATE).double())

    def test_steps_hold_real_items_only(self) -> None:
        positions = Positions.from_mask(Batch.random(COUNTS).laid_out("mixed").mask)
        order, sizes = by_step(positions)
        assert sizes == [5, 4, 4, 3, 3, 2]
        rows = positions.item_rows[order].split(sizes)
        assert [step.tolist() for step in rows] == [[2, 5, 4, 0, 3], *[[2, 5, 4, 0]] * 2, *[[2, 5, 4]] * 2, [2, 5]]


@every_unit
def test_gradients(name: str) -> None:
    torch.manual_seed(0)
    positions = Positions.from_mask(Batch.random([3, 0, 1]).mask)
    module = GRU(DIM, STATE).double() if name == "GRU" else attention_gru(name)
    names = [key for key, _ in module.named_parameters()]
    items = positions.pack(Batch.random([3, 0, 1]).history).requires_grad_()
    weights = torch.rand(4, dtype=torch.float64, requires_grad=name != "GRU")

    def run(items: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        inputs = (items, positions) if name == "GRU" else (items, weights, positions)
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), inputs)

    leaves = [p.detach().clone().requires_grad_() for p in module.parameters()]
    assert torch.autograd.gradcheck(run, (items, weights, *leaves))


@pytest.mark.parametrize("gradients", [True, False])
@every_unit
def test_states_keep_their_precision_under_autocast(name: str, gradients: bool) -> None:
    batch, module = Batch.random([100, 60], torch.float32), (GRU(DIM, STATE) if name == "GRU" else attention_gru(name))
    unit: Unit = attended(module.float()) if isinstance(module, AttentionGRU) else module
    exact = states_of(unit, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(gradients):
        half = states_of(unit, batch)
    assert half.dtype == torch.float32
    assert (half - exact).abs().max() < 0.02


def test_unknown_gate() -> None:
    with pytest.raises(ValueError, match="attention gate 'AUGUR' is unknown: did you mean 'AUGRU'"):
        AttentionGRU(4, 4, "AUGUR")
