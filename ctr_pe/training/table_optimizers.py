"""``table_optimizer``: a training step reads and updates only the rows of embedding tables that its batch has.

Off by default, because the mathematics is another. With a dense optimiser every row moves at every step, by its
momentum and its regularisation; here a row rests while no batch has it, and the size of the table does not matter.

V rows of a table, D their width, U rows in a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from ctr_pe.config.schema import TableOptimizer, valid


class RowwiseAdagrad(Optimizer):
    """Adagrad with one number per row: x_r -= lr g_r / (sqrt(s_r) + eps), s_r the sum of mean(g_r²) so far.

    Its state is (V,), where Adam's is twice (V, D). For sparse gradients.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2, eps: float = 1e-10) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is None:
                    continue
                gradient = table.grad.coalesce()
                rows, values = gradient.indices()[0], gradient.values()
                state = self.state[table]
                if not state:
                    state["sum"] = table.new_zeros(len(table))
                state["sum"].index_add_(0, rows, values.square().mean(1))
                root = state["sum"][rows].sqrt().add_(group["eps"]).unsqueeze(1)
                table.index_add_(0, rows, values / root, alpha=-group["lr"])


OPTIMIZERS: dict[str, type[Optimizer]] = {"lazy_adam": SparseAdam, "rowwise_adagrad": RowwiseAdagrad}


class LazyTables(Optimizer):
    """An optimiser for tables, whose gradients become sparse, and ``others``, that of all other parameters, as one.

    ``regularizer``: (p, λ) of each term λ / p Σ |x|^p over the rows that a batch has. Raises UserError for an unknown
    ``name``.
    """

    def __init__(
        self,
        name: str,
        tables: Sequence[nn.Embedding],
        others: Optimizer,
        lr: float,
        regularizer: Sequence[tuple[int, float]],
    ) -> None:
        kind = OPTIMIZERS[valid("table_optimizer", TableOptimizer, name)]
        for table in tables:
            table.sparse = True
        self.tables = [table.weight for table in tables]
        self.regularizer = regularizer
        self.each = {"others": others, "tables": kind(self.tables, lr=lr)}  # type: ignore[call-arg]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.each.values() for group in optimizer.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.each.values():
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.each.values():
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {name: optimizer.state_dict() for name, optimizer in self.each.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, optimizer in self.each.items():
            optimizer.load_state_dict(state_dict[name])

    @torch.no_grad()
    def regularize(self) -> None:
        """Add the rows' regularisation to their gradients."""
        for table in self.tables:
            if table.grad is not None:
                gradient = table.grad.coalesce()
                rows, values = gradient.indices(), gradient.values()
                own = table[rows[0]]
                for power, weight in self.regularizer:
                    values = values.add(own if power == 2 else own.sign(), alpha=weight)
                known: dict[str, Any] = {"is_coalesced": True, "check_invariants": False}
                table.grad = torch.sparse_coo_tensor(rows, values, table.shape, **known)
