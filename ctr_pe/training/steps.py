"""One training step: the loss, its gradient, clipped, and the optimiser."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ctr_pe.config.schema import FUSED, FUSED_ON_CPU_ALONE, OptimizerName, valid
from ctr_pe.training.divergence import Gradients
from ctr_pe.training.table_optimizers import LazyTables
from ctr_pe.utils import distributed


def make_optimizer(model: Any, name: str, lr: float, table_optimizer: str | None = None) -> Optimizer:
    """The optimiser ``name`` of torch for a model's parameters, with its fused step where it has one.

    ``table_optimizer``: embedding tables get one of their own (:mod:`ctr_pe.training.table_optimizers`). Raises
    UserError for an unknown name.
    """
    name = valid("optimizer", OptimizerName, name)
    layers = {} if table_optimizer is None else model.embedding_layer.embedding_layers
    lazy = [one for one in dict.fromkeys(layers.values()) if type(one) is nn.Embedding and one.weight.requires_grad]
    tables = {layer.weight for layer in lazy}
    rest = [parameter for parameter in model.parameters() if parameter not in tables]
    optimizer: Optimizer = getattr(torch.optim, name)(rest, lr=lr)
    if name in FUSED and (model.device.type == "cpu" or name not in FUSED_ON_CPU_ALONE):
        for group in optimizer.param_groups:  # the same update in one pass, a third of the time or less
            group["fused"] = True
    if table_optimizer is None or not lazy:
        return optimizer
    return LazyTables(table_optimizer, lazy, optimizer, lr, model.regularizer_terms())


def train_step(model: Any, batch: Mapping[str, Tensor], max_gradient_norm: float) -> Tensor:
    """One step of ``model.optimizer`` on a batch -> its loss, a scalar on the model's device.

    Several processes have a share of the batch each, and get the same loss and weights.
    """
    graphs = getattr(model, "step_graphs", None)
    compute = partial(one_by_one, model) if graphs is None else graphs
    loss: Tensor = compute(batch, max_gradient_norm)
    return loss


def one_by_one(model: Any, batch: Mapping[str, Tensor], max_gradient_norm: float) -> Tensor:
    """:func:`train_step` without a CUDA graph."""
    model.optimizer.zero_grad()
    loss = distributed.loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    if isinstance(model.optimizer, LazyTables):
        model.optimizer.regularize()
    model.gradients = clip(dict(model.named_parameters()), max_gradient_norm)
    model.optimizer.step()
    return distributed.average(loss)


def clip(parameters: Mapping[str, Tensor], most: float) -> Gradients:
    """torch's ``clip_grad_norm_``, also of sparse gradients, which multiplies by 1 where there is nothing to clip. To
    know that is free on a CPU; a GPU would have to be waited for."""
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    parts = [gradient.values() if gradient.is_sparse else gradient for gradient in gradients.values()]
    norms = torch._foreach_norm(parts)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if norm.device.type != "cpu" or not norm + 1e-6 <= most:
        torch._foreach_mul_(parts, (most / (norm + 1e-6)).clamp(max=1.0))
    return Gradients(norm, dict(zip(gradients, norms, strict=True)))
