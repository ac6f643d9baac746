"""Does an encoding keep causality: is the state at an item the same whatever comes after it, and however much?

A next-item model learns from all items of a history at once and is asked after the newest: both agree only then. An
encoding that counts from the end of the history, or from the request, does not keep it.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from ctr_pe.pe.base import PositionEncoding
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.units.self_attention import SelfAttention

ITEMS, FIRST, LATER = 5, 3, 1000
"""Of the history, of its beginning, and seconds between the requests after the two."""


def keeps_causality(pe: PositionEncoding, item_dim: int | None = None) -> bool:
    """Whether causal self-attention with the encoding, whatever it learns, gives the first items of a history the
    states that they have without the others.

    ``item_dim``: width of items as looked up, where that of the attention is another.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        trained = deepcopy(pe).cpu()
        for parameter in trained.parameters():  # tables that start at zero hide what they do
            nn.init.normal_(parameter, std=0.5)
        unit = SelfAttention(pe.out_dim, pe.num_heads, trained, causal=True).double().eval()
        vectors = torch.randn(ITEMS, max(pe.dim, item_dim or 0), dtype=torch.float64)
    ids, age = torch.tensor([1, 2, 1, 1, 2]), torch.arange(ITEMS, 0, -1) * 10_000
    states = []
    for count, request in ((ITEMS, 0), (FIRST, LATER)):
        positions = Positions.from_lengths(torch.tensor([count]), age[:count] - request)
        items = Items(vectors[:count], (ids[:count],))
        _, embedded = trained.embed(None, items.embedding[:, : pe.dim], positions)
        with torch.no_grad():
            states.append(unit(embedded, positions, positions.item_pairs(True, items))[:FIRST])
    whole, prefix = states
    return torch.allclose(whole, prefix, rtol=1e-9, atol=1e-9)
