"""Whole training steps as CUDA graphs: forward, loss, backward, clipping and optimiser are one launch.

Launched one by one, the kernels of a step take a GPU less time to compute than its host to launch. So batches are
filled up to few sizes (:mod:`ctr_pe.sequence.filled`), the kernels of a size are captured as a CUDA graph, and later
steps of that size copy their batch to where the first one was and launch the graph.

A graph repeats what the host did when it was captured. What must not be repeated is given to it in tensors: the batch,
the seed of the step's random numbers (:mod:`ctr_pe.ops.step_seeds`), and learning rates.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ctr_pe.ops import step_seeds
from ctr_pe.pe.base import PositionEncoding
from ctr_pe.sequence.transfer import PinnedTransfer, pinned
from ctr_pe.training.divergence import Gradients
from ctr_pe.training.steps import one_by_one
from ctr_pe.utils import distributed
from ctr_pe.utils.cuda_graphs import capture, run_aside
from ctr_pe.utils.errors import one_line
from ctr_pe.utils.random_generators import RandomGenerators

SWITCH = "CTR_PE_CUDA_GRAPHS"
"""0 in this environment variable launches training steps kernel by kernel."""
MOST = 32
"""Graphs at most; steps of other sizes are launched kernel by kernel."""
CAPTURABLE = ("Adam", "AdamW")
"""Optimisers whose whole state can be on the device."""

Sizes = tuple[Any, ...]
Replay = Callable[[PinnedTransfer[Any], list[Tensor]], Tensor]


def unsupported(model: Any) -> str | None:
    """Why steps of a model cannot be captured; None if they can."""
    if distributed.processes() > 1:
        return "several processes train"
    if not vars(type(model)).get("fillable"):
        return f"{type(model).__name__} does not say that its batches may be filled up"
    if (name := type(model.optimizer).__name__) not in CAPTURABLE:
        return f"optimizer {name}" if model.table_optimizer is None else f"table_optimizer {model.table_optimizer}"
    for module in model.modules():
        if isinstance(module, PositionEncoding) and module.loss_names:
            return f"the {module.loss_names[0]} loss of {type(module).__name__}"
    masked = [model.dnn, *(one for one in model.modules() if getattr(one, "masked", False))]
    known = {id(one) for owner in masked for one in owner.modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and id(module) not in known:
            return f"{name} has statistics over items"
    return None


class StepGraphs:
    """The training steps of a model on a GPU: a CUDA graph for each size of its batches.

    The first step of a size is launched kernel by kernel, the second is captured. If that fails, a line in the log says
    why, and all steps are launched kernel by kernel.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.generators = RandomGenerators(torch.initial_seed())
        self.works = model.fills = True
        self._seen: Counter[Sizes] = Counter()
        self._graphs: dict[Sizes, Replay] = {}
        self._names: list[str] = []
        self._pool: Any = None  # memory of all graphs: one runs at a time

    @classmethod
    def of(cls, model: Any) -> StepGraphs | None:
        """None, with a line that says why, where steps cannot be captured, or are not to be."""
        if model.device.type != "cuda" or os.environ.get(SWITCH) == "0":
            return None
        if (why := unsupported(model)) is not None:
            logging.info("Training steps are launched kernel by kernel: %s cannot be captured", why)
            return None
        return cls(model)

    def close(self) -> None:
        """Batches are no longer filled up."""
        self.model.fills = False
        self._graphs.clear()

    def state_dict(self) -> dict[str, Any]:
        return self.generators.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generators.load_state_dict(state)

    def __call__(self, batch: Mapping[str, Tensor], max_gradient_norm: float) -> Tensor:
        """One step -> its loss, a scalar on the model's device that later steps leave as it is. The norm of gradients
        is clipped as in the first step of a size."""
        planned = self.model.planned(batch)
        if not self.works:
            return one_by_one(self.model, planned, max_gradient_norm)
        transfer, step = planned.transfer, partial(self._step, type(planned), max_gradient_norm)
        sizes, numbers = (transfer.sizes, transfer.content.sizes), self._numbers()
        self._seen[sizes] += 1
        try:
            if sizes not in self._graphs and self._seen[sizes] > 1 and len(self._graphs) < MOST:
                self._graphs[sizes] = self._replay_of(transfer, numbers, step)
            if sizes in self._graphs:
                values = self._graphs[sizes](transfer, numbers)
            else:
                there = [pinned(x, self.model.device).to(self.model.device, non_blocking=True) for x in numbers]
                values = run_aside(lambda: step(transfer.unpack(), *there), self.model.device)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            self.works = self.model.fills = False
            self._graphs.clear()
            why = one_line(f"{type(error).__name__}: {error}")[:200]
            logging.warning("Training steps are launched kernel by kernel: capturing one failed (%s)", why)
            return one_by_one(self.model, planned, max_gradient_norm)
        planned.stay()
        return self._results(values)

    def _numbers(self) -> list[Tensor]:
        """What of a step is neither batch nor state: its seed (1,) int64, and the learning rates of the groups of
        parameters, float32."""
        rates = [float(group["lr"]) for group in self.model.optimizer.param_groups]
        return [torch.tensor([self.generators.next().initial_seed()]), torch.tensor(rates, dtype=torch.float32)]

    def _step(self, planned: Any, max_gradient_norm: float, plan: Any, seed: Tensor, rates: Tensor) -> Tensor:
        """A step on a plan that is on the device -> its loss, penalty, norm of gradients, norm of each and further
        losses, in one tensor."""
        model = self.model
        batch = planned({}, plan, torch.device("cpu"))  # nothing of it has to be sent
        with step_seeds.of_step(seed), self._capturable(rates):
            loss = one_by_one(model, batch, max_gradient_norm).detach()
        penalty = loss.new_zeros(()) if isinstance(model.penalty, float) else model.penalty
        parts = model.auxiliary_parts
        self._names = [*model.gradients.norms]
        found = [loss, penalty, model.gradients.norm, *model.gradients.norms.values(), *parts.values()]
        self._parts = [*parts]
        return torch.stack([x.to(loss.dtype) for x in found])

    def _results(self, values: Tensor) -> Tensor:
        """The model's records of the last step, from what :meth:`_step` gave -> the loss."""
        loss, penalty, norm = values[:3].unbind()
        end = 3 + len(self._names)
        self.model.penalty, self.model.gradients = penalty, Gradients(norm, _Norms(self._names, values[3:end]))
        self.model.auxiliary_parts = dict(zip(self._parts, values[end:].unbind(), strict=True))
        return loss

    @contextmanager
    def _capturable(self, rates: Tensor) -> Iterator[None]:
        """The optimiser has the learning rates that are on the device."""
        groups = self.model.optimizer.param_groups
        before = [{key: group[key] for key in ("lr", "capturable")} for group in groups]
        for group, rate in zip(groups, rates.unbind(), strict=True):
            group |= {"lr": rate, "capturable": True}
        try:
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                group |= values

    def _replay_of(self, transfer: PinnedTransfer[Any], numbers: list[Tensor], step: Callable[..., Tensor]) -> Replay:
        """A graph of steps with batches of this size."""
        device = self.model.device
        inputs = [x.to(device) for x in (*transfer.buffers, *numbers)]
        content, given = transfer.unpack(inputs[: -len(numbers)]), inputs[-len(numbers) :]
        graph, values = capture(lambda: step(content, *given), device, self._pool)
        self._pool = graph.pool()

        def replay(transfer: PinnedTransfer[Any], numbers: list[Tensor]) -> Tensor:
            for into, x in zip(inputs, (*transfer.buffers, *numbers), strict=True):
                into.copy_(pinned(x, device), non_blocking=True)
            graph.replay()
            return values.clone()  # the next one overwrites them

        return replay


class _Norms(Mapping[str, Tensor]):
    """The norm of each gradient by the name of its parameter, of (G,) norms."""

    def __init__(self, names: Sequence[str], norms: Tensor) -> None:
        self.index, self.norms = {name: index for index, name in enumerate(names)}, norms

    def __getitem__(self, name: str) -> Tensor:
        return self.norms[self.index[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.index)

    def __len__(self) -> int:
        return len(self.index)
