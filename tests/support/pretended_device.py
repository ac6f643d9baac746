"""A device that is not there: its tensors say that they are elsewhere, and compute on the CPU.

Without an accelerator it shows what would crash on one, and counts what a step would ask of it:

    with elsewhere() as counted:
        model.train_step(batch)
    print(counted.launches, counted.waits)

Inside the block torch has one accelerator, so that ``gpu=0`` means it. It is registered with torch at the first use and
stays known to the process. The first use must come before the first backward: torch makes a queue per device then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial, partialmethod
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

NAME = "elsewhere"
ALLOCATES = frozenset("empty empty_like empty_strided new_empty new_empty_strided _unsafe_view".split())
"""What starts no kernel and is no view either."""
READS = frozenset("_local_scalar_dense is_nonzero equal item".split())
"""What gives the host a value."""
SIZES = frozenset("bincount masked_select nonzero unique_consecutive unique_dim _unique _unique2".split())
"""Those whose result has a size that depends on values, which the host has to wait for."""
INDEXING = frozenset("index index_put index_put_ _index_put_impl_ _unsafe_index".split())
COPIES = frozenset("_to_copy copy_ copy".split())
KERNELS = frozenset(("aten", "prims"))
"""Namespaces of operators that an accelerator has."""
OURS = frozenset("recurrence recurrence_back".split())
"""Operators of this package that an accelerator has; others have a kernel for the CPU alone."""

_LIBRARY = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]


@dataclass
class Counted:
    """What was asked of the device, by operator: kernels (views and allocations are none), waits of the host for it,
    and transfers to it."""

    kernels: Counter[str] = field(default_factory=Counter)
    waited: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)

    @property
    def launches(self) -> int:
        return self.kernels.total()

    @property
    def waits(self) -> int:
        return self.waited.total()


class Elsewhere(Tensor):
    """``here`` has the values."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> Elsewhere:
        how: dict[str, Any] = {"dtype": here.dtype, "strides": here.stride(), "storage_offset": here.storage_offset()}
        found: Elsewhere = Tensor._make_wrapper_subclass(cls, here.shape, device=torch.device(NAME, 0), **how)
        found.here = here
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {}, Counted())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch asks no kernel of a new device for attention, which is one on any other."""
        if func is nn.functional.scaled_dot_product_attention:
            return _attend(*args, **(kwargs or {}))
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{NAME}: {self.here!r}"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.cpu().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # as if read with map_location="cpu"


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operators that have no tensor there yet: those that make one, or send one."""

    def __init__(self, counted: Counted) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted = counted

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled: torch need not import its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self.counted)


class _Module:
    """What ``torch.elsewhere`` has, as ``torch.cuda``. Its random numbers are the CPU's, seeded there."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def manual_seed_all(self, seed: int) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False


class _Hook(torch._C._acc.PrivateUse1Hooks):
    """``available``: within :func:`elsewhere` alone, so that the rest of the process sees the machine as it is."""

    available = False

    def is_available(self) -> bool:
        return type(self).available

    def has_primary_context(self, index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


@contextmanager
def elsewhere() -> Iterator[Counted]:
    """Makes the device usable, as the only accelerator; counts what is asked of it."""
    device, counted, make = _registered(), Counted(), torch.tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:  # torch's goes past the mode
        return make(data, **options).to(device=device)

    with (
        mock.patch.object(_Hook, "available", True),
        mock.patch("torch.accelerator.current_accelerator", return_value=device),
        mock.patch("torch.accelerator.device_count", return_value=1),
        mock.patch("torch.tensor", tensor),
        mock.patch("torch._C._InferenceMode", _no_grad),
        mock.patch("torch.nn.Module._apply", partialmethod(_apply, nn.Module._apply)),
        mock.patch("torch._VF.gru", partial(_gru, counted, torch._VF.gru)),
        # As on any accelerator, one call for all parameters; torch looks at the class of the tensors.
        mock.patch("torch.nn.utils.clip_grad._has_foreach_support", lambda tensors, where: where.type == NAME),
        mock.patch("torch.optim.optimizer._foreach_supported_types", [Tensor, nn.Parameter, Elsewhere]),
        _Mode(counted),
    ):
        yield counted


def _no_grad(mode: bool) -> torch.no_grad:
    """Instead of inference mode, in which some views of a subclass fail."""
    return torch.no_grad()


def _apply(module: nn.Module, apply: Callable[..., nn.Module], *given: Any, **named: Any) -> nn.Module:
    """``module._apply``, after which shared parameters are still shared, as on any accelerator."""
    swaps = not isinstance(module, nn.RNNBase)  # which has references to its parameters
    with mock.patch("torch.__future__._swap_module_params_on_conversion", swaps):
        return apply(module, *given, **named)


@cache
def _registered() -> torch.device:
    _LIBRARY.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # type: ignore[no-untyped-call]  # amp: float32
    torch.utils.backend_registration._setup_privateuseone_for_python_backend(NAME, _Module(), _Hook())
    return torch.device(NAME)


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], counted: Counted) -> Any:
    """The operator on the CPU; what it gives is elsewhere if its tensors are, or if it is asked for there."""
    flat, spec = tree_flatten((args, dict(kwargs)))
    tensors = [x for x in flat if isinstance(x, Tensor)]
    theirs = {id(x.here): x for x in tensors if isinstance(x, Elsewhere)}
    wanted = next((x.type for x in flat if isinstance(x, torch.device)), NAME if theirs else "cpu")
    if not theirs and wanted != NAME:
        return func(*args, **kwargs)
    others = [x for x in tensors if not isinstance(x, Elsewhere) and (x.dim() or not theirs)]
    name = func.overloadpacket.__name__
    if name == "copy_" and not isinstance(args[0], Elsewhere):
        wanted = "cpu"
    _check(func, name, others)
    _count(func, args, kwargs, wanted, bool(others), counted)
    here = [_on_cpu(x) for x in flat]
    given, named = tree_unflatten(here, spec)
    found = MISSING.get(name, func)(*given, **named)
    if wanted != NAME:
        return found
    return tree_map_only(Tensor, lambda x: theirs[id(x)] if id(x) in theirs else Elsewhere(x), found)


UNDER_WAY: list[str] = []
"""Kernels that are computed with the values of the CPU, whose operators are those of the device."""


@contextmanager
def _under_way(name: str) -> Iterator[None]:
    UNDER_WAY.append(name)
    try:
        yield
    finally:
        UNDER_WAY.pop()


class _GRU(torch.autograd.Function):
    """cuDNN's: one call each way, which counts as one kernel. It launches by itself what it needs for all steps."""

    @staticmethod
    def forward(ctx: Any, counted: Counted, run: Callable[[Sequence[Tensor]], Any], *given: Any) -> Any:
        counted.kernels["gru"] += 1
        ctx.counted, ctx.given = counted, [x.here.detach().requires_grad_() for x in given]
        with _under_way("gru"), torch.enable_grad():
            ctx.found = run(ctx.given)
        return tuple(Elsewhere(x.detach()) for x in ctx.found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.counted.kernels["gru_backward"] += 1
        with _under_way("gru_backward"):
            found = torch.autograd.grad(ctx.found, ctx.given, [grad.here for grad in grads])
        return None, None, *map(Elsewhere, found)


def _gru(counted: Counted, run: Any, *given: Any) -> Any:
    """``torch._VF.gru``."""
    flat, spec = tree_flatten(given)
    theirs = [k for k, x in enumerate(flat) if isinstance(x, Elsewhere)]
    if not theirs:
        return run(*given)

    def on_cpu(tensors: Sequence[Tensor]) -> Any:
        found = dict(zip(theirs, tensors, strict=True))
        return run(*tree_unflatten([found.get(k, x) for k, x in enumerate(flat)], spec))

    return _GRU.apply(counted, on_cpu, *(flat[k] for k in theirs))  # type: ignore[no-untyped-call]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **options: Any
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, torch.finfo(query.dtype).min / 2)
    found: Tensor = torch.ops.aten._scaled_dot_product_fused_attention_overrideable(
        query, key, value, attn_mask, dropout_p, **options
    )[0]
    return found


def _weights(query: Tensor, key: Tensor, bias: Tensor | None, scale: float | None) -> Tensor:
    logits = query * (scale or query.shape[-1] ** -0.5) @ key.mT
    return (logits if bias is None else logits + bias).softmax(-1)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    rate: float = 0.0,
    *others: Any,
    scale: float | None = None,
) -> tuple[Any, ...]:
    weights = _weights(query, key, bias, scale)
    kept = torch.empty_like(weights).bernoulli_(1 - rate) / (1 - rate)
    none = query.new_empty(0)
    return (weights * kept) @ value, none, none, none, query.shape[-2], key.shape[-2], kept, none, none


def _attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    *others: Any,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    *_, kept, _ = others
    weights = _weights(query, key, bias, scale)
    of_weights = grad @ value.mT * kept
    of_logits = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
    of_products = of_logits * (scale or query.shape[-1] ** -0.5)
    return of_products @ key, of_products.mT @ query, (weights * kept).mT @ grad, of_logits


MISSING: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
}
"""What torch asks of every accelerator and the CPU has no kernel for."""


def _on_cpu(x: Any) -> Any:
    if isinstance(x, Elsewhere):
        return x.here
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == NAME else x


def _check(func: Any, name: str, others: Sequence[Tensor]) -> None:
    if func.namespace not in KERNELS and name not in OURS:
        raise NotImplementedError(f"{func} has no kernel for '{NAME}'")
    if others and name not in COPIES | INDEXING:
        shapes = [tuple(x.shape) for x in others]
        raise RuntimeError(f"{func}: tensors on two devices, {NAME} and cpu (of shapes {shapes})")


def _count(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], wanted: str, mixed: bool, counted: Counted
) -> None:
    """``mixed``: an operand is on the CPU."""
    name = func.overloadpacket.__name__
    if name in COPIES and (mixed or wanted != NAME):
        asynchronous = any(x is True for x in (*args, *kwargs.values()))  # a copy has no other flag
        if wanted == NAME:
            counted.sent[name] += 1
        if wanted != NAME or not asynchronous:
            counted.waited[name] += 1
        return
    repeats = func is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
    masked = name in INDEXING and (mixed or any(x is not None and x.dtype == torch.bool for x in args[1]))
    if name in READS | SIZES or repeats or masked:
        counted.waited[name] += 1
    if not (name in ALLOCATES | READS or func.is_view):
        counted.kernels[name] += 1
