"""Modules of one kind, each with a tensor of its own: on an accelerator they are computed as one.

H modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ctr_pe.ops import step_seeds
from ctr_pe.utils import distributed


def each(call: Callable[..., Tensor], modules: Iterable[nn.Module], *own: Sequence[Tensor]) -> list[Tensor]:
    """``call(module, x, …)`` for each module and what it has of ``own``, H tensors each; all calls give one shape.

    Off the CPU there is one call for all, with stacked weights, unless several processes train. It sees one module in
    place of them (:func:`torch.func.vmap`), so it may keep nothing that it computes.
    """
    modules = list(modules)
    if own[0][0].is_cpu or distributed.processes() > 1:
        return [call(*some) for some in zip(modules, *own, strict=True)]
    one = _Called(call, modules[0])
    names = [name for name, _ in (*one.named_parameters(), *one.named_buffers())]
    states = {name: [attrgetter(name.removeprefix("module."))(module) for module in modules] for name in names}
    stacked = {name: torch.stack(tensors) for name, tensors in states.items()}
    inputs = [torch.stack(list(some)) for some in own]
    seeds, numbers = step_seeds.active(), torch.arange(len(modules), device=own[0][0].device)

    def called(state: dict[str, Tensor], number: Tensor, *x: Tensor) -> Tensor:
        with nullcontext() if seeds is None else seeds.of_module(number):
            found: Tensor = functional_call(one, state, x)
        return found

    found: Tensor = vmap(called, randomness="different")(stacked, numbers, *inputs)
    running = [name for name, _ in one.named_buffers()] if one.training else []
    if running:
        moved = [x for name in running for x in stacked[name].unbind()]
        torch._foreach_copy_([x for name in running for x in states[name]], moved)
    return list(found.unbind())


class _Called(nn.Module):
    def __init__(self, call: Callable[..., Tensor], module: nn.Module) -> None:
        super().__init__()
        self.call, self.module, self.training = call, module, module.training

    def forward(self, *x: Tensor) -> Tensor:
        return self.call(self.module, *x)
