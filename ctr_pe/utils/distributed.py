"""Several processes that train one model, each on its slice of every batch: process group, all-gather, broadcast.

``torchrun`` starts them, and :func:`process_group` connects them; outside of it, and in a process that was started
alone, every function here is the identity. Gradients are averaged by torch's DistributedDataParallel. So a loss is
divided by the ``average`` number of rows or pairs of the processes, not by a process' own: then the average of the
losses is the loss of the whole batch.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from ctr_pe.utils.errors import UserError

T = TypeVar("T")
Number = TypeVar("Number", Tensor, float)

_group: dist.ProcessGroup | None = None  # not DistributedDataParallel's, whose messages come in an order of their own
_calls = count()


def launched() -> bool:
    """Whether torchrun has started this process as one of several."""
    return dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1


def refuse(command: str) -> None:
    """Raises UserError in processes of torchrun: ``command`` trains in its own."""
    if launched():
        with process_group():
            raise UserError(f"{command}: torchrun is for model_zoo/run_expid.py and scripts that call ctr_pe.training")


def processes() -> int:
    """How many are connected; 1 alone."""
    return 1 if _group is None else _group.size()


def is_first() -> bool:
    """Whether this is the one process that writes and prints."""
    return _group is None or _group.rank() == 0


def rank_slice() -> slice:
    """Which rows of a batch, or which batches, are this process' own."""
    return slice(None) if _group is None else slice(_group.rank(), None, _group.size())


def rank_seed(seed: int) -> int:
    """The seed of random numbers that differ between the processes, as dropout's: ``seed`` itself in the first."""
    return seed if _group is None else seed + _group.rank() * 0x9E3779B9  # torch reads the lower 32 bits alone


def rank_gpu(gpu: int) -> int:
    """The GPU of this process where ``gpu`` is one: each of a machine's processes has its own."""
    if _group is None or gpu < 0:
        return gpu
    own, there = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
    if (here := int(os.environ["LOCAL_WORLD_SIZE"])) > there:
        raise UserError(f"gpu {gpu}: {here} processes and {there} GPUs (torchrun --nproc-per-node {max(there, 1)})")
    torch.get_device_module().set_device(own)
    return own


def average(x: Number) -> Number:
    """Of a number, or of tensors of one shape, over the processes; a tensor's gradient is averaged likewise."""
    if _group is None:
        return x
    if not isinstance(x, Tensor):
        return float(average(torch.tensor(x, dtype=torch.float64)))
    found: Tensor = _Average.apply(x)  # type: ignore[no-untyped-call]
    return found


class _Average(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y, group=_group)
        return y.div_(processes())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return average(grad)


def all_gather(value: T) -> list[T]:
    """That of every process, in their order."""
    if _group is None:
        return [value]
    found: list[Any] = [None] * processes()
    dist.all_gather_object(found, value, group=_group)
    return found


def broadcast(make: Callable[[], T]) -> T:
    """What ``make`` gives in the first process, the only one that calls it, in all."""
    if _group is None:
        return make()
    found: list[Any] = [make() if is_first() else None]
    dist.broadcast_object_list(found, 0, group=_group)
    value: T = found[0]
    return value


def broadcast_weights(model: nn.Module) -> None:
    """The model has the weights and running statistics of the first process'."""
    if _group is not None:
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0, group=_group)


def loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """A model's loss of its share of a batch. After ``backward`` all processes have the gradients of the whole batch.

    Raises UserError for sparse gradients on a GPU, which cannot be averaged.
    """
    if _group is None:
        return _loss(model, batch)
    if "_averaged" not in vars(model):
        if model.device.type != "cpu" and getattr(model.optimizer, "tables", ()):
            raise UserError("table_optimizer: several GPUs cannot average sparse gradients: leave it out, or --gpu -1")
        # In vars: not a part of the model, which it has as a part.
        vars(model)["_averaged"] = DistributedDataParallel(_Loss(model), find_unused_parameters=True)
    found: Tensor = vars(model)["_averaged"](batch)
    return found


class _Loss(nn.Module):
    """A model's loss as a module, which DistributedDataParallel asks for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.unused = nn.Parameter(torch.zeros(()))  # without one such torch warns that there may be none

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return _loss(self.model, batch)


def _loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    found: Tensor = model.compute_loss(model.forward(batch), model.get_labels(batch))
    return found


@contextmanager
def process_group() -> Iterator[None]:
    """Connect the processes that torchrun has started, until the end; nothing where they are, or where there is one.

    If one of them ends with a UserError, or is killed, they all end, and one of them raises a UserError.
    """
    global _group
    if _group is not None or not launched():
        yield
        return
    store, rank, size = next(iter(rendezvous("env://")))
    # With names of its own, so that nothing of an earlier call is taken for this one's.
    store = dist.PrefixStore(f"ctr_pe/{next(_calls)}", store)  # type: ignore[attr-defined]
    old = signal.signal(signal.SIGTERM, _ended)  # from torchrun, after the end of another process
    try:
        dist.init_process_group(store=store, rank=rank, world_size=size)
        _group = dist.new_group()
        if rank:
            logging.disable()
        yield
    except (UserError, RuntimeError) as error:
        # Of a process that does not answer; gloo has no class of its own for that.
        lost = isinstance(error, dist.DistError) or "gloo" in str(error)
        if not (lost or isinstance(error, UserError)):
            raise
        old = signal.SIG_IGN  # what torchrun sends would come between this and the line about it
        signal.signal(signal.SIGTERM, old)
        if store.add("said", 1) > 1:
            sys.exit(2)  # another has said why
        if not lost:
            raise
        raise UserError(f"one of {size} processes has ended: the same command goes on from the last epoch") from None
    finally:
        _group = None
        logging.disable(logging.NOTSET)
        signal.signal(signal.SIGTERM, old)
        if dist.is_initialized():
            dist.destroy_process_group()


def _ended(signum: int, frame: FrameType | None) -> NoReturn:
    raise dist.DistNetworkError("ended by torchrun")
