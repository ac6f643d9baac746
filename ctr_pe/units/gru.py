"""Recurrent units over histories: a GRU, and one whose steps are gated by attention (DIEN).

They run over real items only, one step for the oldest item of every row, one for the second oldest, and so on. Rows
are taken in order of length, so that each step computes just the rows that still have an item.

B batch, L history slots, N real items of the batch, n rows of one step, D item dim, S state dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.nn.functional import linear
from torch.nn.utils.rnn import PackedSequence

from ctr_pe.errors import nearest
from ctr_pe.positions import Positions


class GRU(nn.GRU):
    """A gated recurrent unit with the parameters of ``torch.nn.GRU``; the first state is zero.

    r, z = σ(W x + U h), c = tanh(W x + r ⊙ U h), h' = (1 - z) ⊙ c + z ⊙ h, each W and U with a bias.
    """

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    bias_ih_l0: Tensor
    bias_hh_l0: Tensor

    def __init__(self, dim: int, state_dim: int) -> None:
        super().__init__(dim, state_dim)

    def forward(self, items: Tensor, positions: Positions) -> Tensor:  # type: ignore[override]
        """Packed items (N, D) -> the state after each item, packed (N, S)."""
        if positions.every_slot:
            of_items = linear(items, self.weight_ih_l0, self.bias_ih_l0)
            return over_slots(
                _gru, of_items, torch.ones_like(items[:, :1]), positions, self.weight_hh_l0, self.bias_hh_l0
            )
        order, sizes = by_step(positions)
        items = items.index_select(0, order)
        if sizes and (items.is_cuda or not torch.is_grad_enabled()):
            with torch.autocast(items.device.type, enabled=False):  # states keep their precision
                packed = PackedSequence(items.to(self.weight_hh_l0.dtype), torch.tensor(sizes))
                states: Tensor = super().forward(packed)[0].data
        else:  # on a CPU torch's own takes up to several times as long for the gradients
            of_items = linear(items, self.weight_ih_l0, self.bias_ih_l0)
            weights = torch.ones_like(of_items[:, :1])
            states = recur(_gru, of_items, weights, sizes, self.weight_hh_l0, self.bias_hh_l0)
        return torch.empty_like(states).index_copy(0, order, states)

    def step(self, items: Tensor, states: Tensor) -> Tensor:
        """The states (B, S) after one more item (B, D)."""
        of_items = linear(items, self.weight_ih_l0, self.bias_ih_l0)
        of_states = linear(states, self.weight_hh_l0, self.bias_hh_l0)
        return _gru(of_items, of_states, states, torch.ones_like(states[:, :1]))


class AttentionGRU(nn.Module):
    """A GRU whose steps are gated by the attention a_j that item j gets (DIEN, equations 5 to 7), from a zero state.

    With u, r = σ(W x + U h) and c = tanh(W x + r ⊙ U h):

    - ``AIGRU``: x = a_j b_j, h' = (1 - u) ⊙ h + u ⊙ c
    - ``AGRU``: x = b_j, h' = (1 - a_j) h + a_j c, without u
    - ``AUGRU``: x = b_j, h' = (1 - a_j u) ⊙ h + a_j u ⊙ c

    Parameters ``weight_ih (3 S, D)``, ``weight_hh (3 S, S)``, ``bias_ih``, ``bias_hh (3 S,)``: the rows of u, r and c,
    as in FuxiCTR's ``x2h`` and ``h2h``; AGRU has those of r and c.

    Raises:
        ValueError: an unknown gate.
    """

    def __init__(self, dim: int, state_dim: int, gate: str = "AUGRU") -> None:
        super().__init__()
        if gate not in GATES:
            raise ValueError(f"attention gate '{gate}' is unknown: {nearest(gate, GATES)}")
        self.gate = gate
        width = (2 if gate == "AGRU" else 3) * state_dim
        self.weight_ih = nn.Parameter(nn.init.xavier_normal_(torch.empty(width, dim)))
        self.weight_hh = nn.Parameter(nn.init.xavier_normal_(torch.empty(width, state_dim)))
        self.bias_ih = nn.Parameter(torch.zeros(width))
        self.bias_hh = nn.Parameter(torch.zeros(width))

    def forward(self, items: Tensor, weights: Tensor, positions: Positions) -> Tensor:
        """Packed items b (N, D), their attention a packed (N,) -> the state after each item, packed (N, S).

        K targets of one history have their own attention (N, K) and states (N, K, S).
        """
        if positions.every_slot:
            of_items, weights = self._gated(items, weights)
            return over_slots(GATES[self.gate], of_items, weights, positions, self.weight_hh, self.bias_hh)
        order, sizes = by_step(positions)
        of_items, weights = self._gated(items.index_select(0, order), weights.index_select(0, order))
        states = recur(GATES[self.gate], of_items, weights, sizes, self.weight_hh, self.bias_hh)
        return torch.empty_like(states).index_copy(0, order, states)

    def _gated(self, items: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Item terms W x (N, k S), or (N, K or 1, k S) for K targets, and attention (N, 1) or (N, K, 1)."""
        weights = weights.unsqueeze(-1)
        if weights.dim() == 3:
            items = items.unsqueeze(1)
        if self.gate == "AIGRU":
            items, weights = weights * items, torch.ones_like(weights)
        return linear(items, self.weight_ih, self.bias_ih), weights


def last_state(states: Tensor, positions: Positions) -> Tensor:
    """Packed states (N, ..., S) -> those after the newest item of each row (B, ..., S), zero for an empty history."""
    return positions.newest_of(states)


def by_step(positions: Positions) -> tuple[Tensor, list[int]]:
    """The order (N,) of packed items by step, within a step by length of history, longest first; and rows per step."""
    mask, count = positions.mask_here, positions.count_here
    rows, slots = mask.nonzero(as_tuple=True)
    step = mask.cumsum(1)[rows, slots]
    longest_first = count.argsort(descending=True, stable=True)
    rank = torch.empty_like(count).index_copy(0, longest_first, torch.arange(len(count)))
    return positions.sent((step * len(count) + rank[rows]).argsort()), step.bincount()[1:].tolist()


# of_item (n, k S), of_state (n, k S), state (n, S), weight (n, 1) -> state (n, S); with another axis for K targets
Step = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def recur(
    step: Step, of_items: Tensor, weights: Tensor, sizes: list[int], weight_hh: Tensor, bias_hh: Tensor
) -> Tensor:
    """Item terms W x (N, k S) and attention (N, 1), ordered by step -> states (N, S) in this order.

    For K targets of one history: item terms (N, K or 1, k S) and attention (N, K, 1) -> states (N, K, S).
    """
    dtype = weight_hh.dtype  # states stay in it under autocast: rounding would add up over the steps
    of_items, weights = of_items.to(dtype), weights.to(dtype)
    if not sizes:
        return of_items[..., : weight_hh.shape[1]] * weights  # no item, but the gradient's graph
    state = of_items.new_zeros(sizes[0], *weights.shape[1:-1], weight_hh.shape[1])
    states = []
    for of_item, weight, rows in zip(torch.split(of_items, sizes), torch.split(weights, sizes), sizes, strict=True):
        state = state[:rows]
        state = step(of_item, linear(state, weight_hh, bias_hh).to(dtype), state, weight)
        states.append(state)
    return torch.cat(states)


def over_slots(
    step: Step, of_items: Tensor, weights: Tensor, positions: Positions, weight_hh: Tensor, bias_hh: Tensor
) -> Tensor:
    """Where every slot counts as an item, item terms (B L, k S) and attention (B L, 1) -> states (B L, S). For K
    targets item terms (B L, K or 1, k S) and attention (B L, K, 1) -> states (B L, K, S).

    The state is zero up to the first real item. In a graph the steps are a loop, as many as the batch has slots.
    """
    dtype = weight_hh.dtype
    rows, slots = positions.mask.shape
    real = positions.mask.to(dtype).view(rows, slots, *[1] * (weights.dim() - 1))
    xs = [x.to(dtype).view(rows, slots, *x.shape[1:]).transpose(0, 1) for x in (of_items, weights)]
    xs.append(real.transpose(0, 1))

    def advance(state: Tensor, x: list[Tensor]) -> tuple[Tensor, Tensor]:
        of_item, weight, there = x
        state = step(of_item, linear(state, weight_hh, bias_hh).to(dtype), state, weight) * there
        return state, state.clone()

    state = of_items.new_zeros(rows, *weights.shape[1:-1], weight_hh.shape[1], dtype=dtype)
    if torch.compiler.is_compiling():
        states: Tensor = scan(advance, state, xs)[1]
    else:
        found = []
        for x in zip(*xs, strict=True):
            state, _ = advance(state, list(x))
            found.append(state)
        states = torch.stack(found)
    return states.transpose(0, 1).flatten(0, 1)


def _gru(of_item: Tensor, of_state: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    keep, new = _gate_and_new(of_item, of_state, reset_first=True)
    return torch.lerp(new, state, keep)


def _augru(of_item: Tensor, of_state: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    update, new = _gate_and_new(of_item, of_state)
    return torch.lerp(state, new, weight * update)


def _agru(of_item: Tensor, of_state: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    (reset, new), (of_reset, of_new) = of_item.chunk(2, -1), of_state.chunk(2, -1)
    new = torch.addcmul(new, torch.sigmoid(reset + of_reset), of_new).tanh()
    return torch.lerp(state, new, weight)


def _gate_and_new(of_item: Tensor, of_state: Tensor, reset_first: bool = False) -> tuple[Tensor, Tensor]:
    widths = [2 * of_item.shape[-1] // 3, of_item.shape[-1] // 3]
    (gates, new), (of_gates, of_new) = torch.split(of_item, widths, -1), torch.split(of_state, widths, -1)
    first, second = torch.sigmoid(gates + of_gates).chunk(2, -1)
    gate, reset = (second, first) if reset_first else (first, second)
    return gate, torch.addcmul(new, reset, of_new).tanh()


GATES: dict[str, Step] = {"AIGRU": _augru, "AGRU": _agru, "AUGRU": _augru}
