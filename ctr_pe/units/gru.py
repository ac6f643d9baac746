"""Recurrent units over histories: a GRU, and one whose steps are gated by attention (DIEN).

They run over real items only, one step for the oldest item of every row, one for the second oldest, and so on. Rows
are taken in order of length, so that each step computes just the rows that still have an item.

B batch, L history slots, N real items of the batch, n rows of one step, D item dim, S state dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.nn.functional import linear
from torch.nn.utils.rnn import PackedSequence

from ctr_pe.ops.recurrence import attention_gru
from ctr_pe.ops.recurrence.reference import Step, agru, augru, gru, recur
from ctr_pe.sequence.filled import Filled
from ctr_pe.sequence.jagged import gather_rows, scatter_rows
from ctr_pe.sequence.positions import Positions
from ctr_pe.utils.errors import nearest


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
        if positions.dense:
            of_items = linear(items, self.weight_ih_l0, self.bias_ih_l0)
            return over_slots(
                gru, of_items, torch.ones_like(items[:, :1]), positions, self.weight_hh_l0, self.bias_hh_l0
            )
        steps = _Steps(positions)
        items, sizes = steps.split(items), steps.sizes
        if sizes and not (items.is_cpu and torch.is_grad_enabled()):
            with torch.autocast(items.device.type, enabled=False):  # states keep their precision
                packed = PackedSequence(items.to(self.weight_hh_l0.dtype), torch.tensor(sizes))
                states: Tensor = super().forward(packed)[0].data
        else:  # on a CPU torch's own takes up to several times as long for the gradients
            of_items = linear(items, self.weight_ih_l0, self.bias_ih_l0)
            weights = torch.ones_like(of_items[:, :1])
            states = recur(gru, of_items, weights, sizes, self.weight_hh_l0, self.bias_hh_l0)
        return steps.join(states)


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
        if positions.dense:
            of_items, weights = self._gated(items, weights)
            return over_slots(GATES[self.gate], of_items, weights, positions, self.weight_hh, self.bias_hh)
        steps = _Steps(positions)
        of_items, weights = self._gated(steps.split(items), steps.split(weights))
        return steps.join(attention_gru(of_items, weights, steps.sizes, self.weight_hh, self.bias_hh))

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


class _Steps:
    """Packed items (N, ...) by step, ``sizes`` rows each, and states back; of a filled batch all rows take all steps,
    so that no size depends on lengths."""

    def __init__(self, positions: Positions) -> None:
        self.filled = positions if isinstance(positions, Filled) else None
        if self.filled is None:
            self.order, self.sizes = by_step(positions)
        else:
            rows, slots = positions.mask.shape
            self.sizes = [rows] * slots

    def split(self, packed: Tensor) -> Tensor:
        return gather_rows(packed, self.order) if self.filled is None else self.filled.by_step(packed)

    def join(self, states: Tensor) -> Tensor:
        if self.filled is None:
            return scatter_rows(states, self.order, len(states))
        return self.filled.from_steps(states)


def by_step(positions: Positions) -> tuple[Tensor, list[int]]:
    """The order (N,) of packed items by step, within a step by length of history, longest first; and rows per step."""
    lengths = positions.lengths_cpu
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    step = torch.arange(len(rows)) - (lengths.cumsum(0) - lengths)[rows] + 1
    longest_first = lengths.argsort(descending=True, stable=True)
    rank = scatter_rows(torch.arange(len(lengths)), longest_first, len(lengths))
    return positions.to_device((step * len(lengths) + rank[rows]).argsort()), step.bincount()[1:].tolist()


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


GATES: dict[str, Step] = {"AIGRU": augru, "AGRU": agru, "AUGRU": augru}
