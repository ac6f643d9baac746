"""What an encoding says that its bias adds is what it adds, and is said only where hooks may be replaced by it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ctr_pe import Chain, PositionEncoding, Positions, available_pes, build_pe
from ctr_pe.pe.alibi import ALiBi
from ctr_pe.pe.vectors import ItemVectors, Vectors
from ctr_pe.sequence.positions import Items, Pairs

ADDS = {"none", "naive", "sinusoidal", "rope", "time_rope", "euler"}
ADDS |= {"t5", "alibi", "kerple_log", "kerple_power", "fire"}
ADDS |= {"cape_constant", "cape_cosine", "cape_oracle", "likeness"}  # whose positions know nothing of the logits


def pairs_of(causal: bool) -> Pairs:
    mask = torch.arange(5) < torch.tensor([[5], [4], [4]])
    age = torch.randint(0, 10**5, mask.shape).sort(1, descending=True).values
    items = Items(torch.randn(13, 6), (torch.randint(1, 3, (13,)),))
    return Positions.from_mask(mask, age).item_pairs(causal, items)[0]


def random_vectors() -> Vectors:
    query, key, value = torch.randn(3, 3, 2, 5, 3)
    return ItemVectors(query, 1.0, key, value)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", available_pes())
def test_it_is_what_the_bias_adds(name: str, causal: bool) -> None:
    torch.manual_seed(0)
    pe, pairs = build_pe(name, dim=6, max_len=4, num_heads=2), pairs_of(causal)
    for parameter in pe.parameters():
        torch.nn.init.normal_(parameter)
    vectors, (logits, weights) = random_vectors(), torch.randn(2, 3, 2, 5, 5)
    added = pe.plain_bias(vectors, pairs)
    assert (added is not None) == (name in ADDS)
    if added is None:
        return
    assert torch.allclose(pe.bias(logits, vectors, pairs), logits + added, atol=1e-6)
    mixed, same = pe.mix(weights, vectors, pairs)
    assert mixed is weights
    assert same is vectors


def test_a_chain_adds_what_its_encodings_add() -> None:
    given = random_vectors(), pairs_of(True)
    names = "rope", "alibi", "t5", "cape"
    rope, alibi, t5, cape = (build_pe(name, dim=6, max_len=4, num_heads=2) for name in names)
    torch.nn.init.normal_(t5.table)
    assert torch.equal(Chain([rope, alibi, t5]).plain_bias(*given), alibi.plain_bias(*given) + t5.plain_bias(*given))
    assert Chain([rope, alibi, cape]).plain_bias(*given) is None


def test_another_hook_is_not_left_out() -> None:
    class More(ALiBi):
        def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
            return 2 * super().bias(logits, vectors, pairs)

    class Mixed(PositionEncoding):
        def mix(self, weights: Tensor, vectors: Vectors, pairs: Pairs) -> tuple[Tensor, Vectors]:
            return weights / 2, vectors

    class Watched(Chain):
        def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
            return super().bias(logits, vectors, pairs)

    given = random_vectors(), pairs_of(True)
    assert Watched([ALiBi(6, 4, 2)]).plain_bias(*given) is None
    assert More(6, 4, 2).plain_bias(*given) is None
    assert Mixed(6, 4, 2).plain_bias(*given) is None
