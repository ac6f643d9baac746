"""Give a trained model one more encoding, to be trained alone."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from ctr_pe.pe import build_pe
from ctr_pe.pe.base import Chain, PositionEncoding


def attach(model: nn.Module, name: str, max_len: int | None = None, **options: Any) -> list[PositionEncoding]:
    """Chain a new encoding after that of every attention unit in ``model``, which may be a unit itself.

    An encoding that starts as the identity, such as ``kernel``, changes nothing before it is trained. To train it
    alone, as the kernel paper does on models with CAPE and RoPE (its Table 3)::

        added = attach(model, "kernel")
        model.requires_grad_(False)
        for pe in added:
            pe.requires_grad_(True)
        model.compile("adam", "binary_crossentropy", 1e-3)  # or any optimiser of the parameters of ``added``

    Batch norms still follow the batches when they are in training mode. The result is the model that ``old+name``
    would have built, weights of the same names included.

    Args:
        model: its units are taken for one stack, whose layers share what the encoding shares between layers. A model
            with several field groups has a stack for each: attach to one after the other.
        name: as in :func:`~ctr_pe.pe.build_pe`.
        max_len: of the new encoding; by default that of the unit's, which it must equal unless the unit has none.
        options: of the new encoding.

    Returns:
        The new encodings, in the order of the units.

    Raises:
        UserError: what ``build_pe`` raises.
        ValueError: no attention unit, or an encoding that does not fit a unit's.
    """
    units = [module for module in model.modules() if isinstance(module._modules.get("pe"), PositionEncoding)]
    if not units:
        raise ValueError(f"{type(model).__name__} has no attention unit")
    like = next(model.parameters(), None)
    added: list[PositionEncoding] = []
    joined: list[PositionEncoding] = []
    for unit in units:
        old = unit._modules["pe"]
        assert isinstance(old, PositionEncoding)
        fresh = partial(build_pe, name, old.dim, max_len or old.max_len, old.num_heads, **options)
        new = (added[0].next_layer(fresh) if added else fresh()).train(unit.training)
        added.append(new if like is None else new.to(like.device, like.dtype))
        links = list(old.encodings) if isinstance(old, Chain) else [] if type(old) is PositionEncoding else [old]
        joined.append(Chain([*links, new]) if links else new)
    for unit, pe in zip(units, joined, strict=True):
        unit.pe = pe
    return added
