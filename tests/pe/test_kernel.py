"""The positional kernel: triangular sums along the sequence, of logits (U) and of values (L)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ctr_pe import Positions
from ctr_pe.pe import build_pe
from ctr_pe.pe.kernel import PIECE, Kernel
from ctr_pe.units import SelfAttention, TargetAttention
from ctr_pe.units.transformer import Transformer
from ctr_pe.utils.errors import UserError
from tests.support import hooks

D, L, HEADS = 8, 6, 2
VARIANTS: list[dict[str, Any]] = [
    {},
    {"kernel_u": "full", "kernel_l": "toeplitz", "kernel_per_head": True},
    {"kernel_u": "full", "kernel_anchor": "start", "kernel_band": 3},
    {"kernel_u": "none", "kernel_l": "none"},
]


def lengths(*counts: int) -> Positions:
    return Positions.from_mask(torch.arange(max(counts)) < torch.tensor(counts).unsqueeze(1))


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomised(pe: Any, seed: int = 5) -> Any:
    draw = torch.Generator().manual_seed(seed)
    for parameter in pe.parameters():
        nn.init.normal_(parameter, generator=draw)
    return pe.double()


def mixed(pe: Any, weights: Tensor, positions: Positions) -> Tensor:
    """Pooling weights of target attention (B, L) from those of the softmax."""
    pairs = hooks.target_pairs(positions)
    out: Tensor = pe.mix(weights[:, None, None], hooks.vectors_for(pairs, D), pairs)[0]
    return out[:, 0, 0]


def summed(pe: Any, logits: Tensor, positions: Positions) -> Tensor:
    """Logits of target attention (B, L)."""
    pairs = hooks.target_pairs(positions)
    out: Tensor = pe.bias(logits[:, None, None], hooks.vectors_for(pairs, D), pairs)
    return out[:, 0, 0]


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("score", ["dot", "bilinear", "din"])
def test_target_attention_starts_exactly_as_none(score: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = TargetAttention(D, score).double()
    unit = TargetAttention(D, plain.score, Kernel(D, L, **options)).double()
    batch = vectors(3, D), vectors(3, 9, D, seed=1), lengths(9, 4, 1)  # more items than rows
    for got, want in zip(unit(*batch), plain(*batch), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", VARIANTS)
def test_self_attention_starts_exactly_as_none(options: dict[str, Any], causal: bool) -> None:
    layer = SelfAttention(D, HEADS, Kernel(D, L, HEADS, **options), causal).double()
    batch = vectors(3, 9, D), lengths(9, 4, 1)
    states = layer(*batch)
    layer.pe = Kernel(D, L, HEADS, kernel_u="none", kernel_l="none")
    assert torch.equal(states, layer(*batch))


def test_u_is_toeplitz_and_upper_l_is_lower_triangular() -> None:
    pe = randomised(Kernel(D, L))
    u, ell = pe.matrix("U", L), pe.matrix("L", L)
    assert torch.equal(u, u.triu())
    assert all(torch.equal(u.diagonal(k), pe.toeplitz[k].expand(L - k)) for k in range(L))
    assert torch.equal(ell, pe.lower.tril())
    other = randomised(Kernel(D, L, kernel_u="full", kernel_l="toeplitz"))
    assert torch.equal(other.matrix("U", L), other.upper.triu())
    ell = other.matrix("L", L)
    assert all(torch.equal(ell.diagonal(-k), other.lower_toeplitz[k].expand(L - k)) for k in range(L))


@pytest.mark.parametrize("kind", ["toeplitz", "full"])
def test_a_band_ends_u(kind: str) -> None:
    u = randomised(Kernel(D, L, kernel_u=kind, kernel_band=2)).matrix("U", L)
    assert torch.equal(u, u.triu().tril(1))
    assert (u.diagonal(1) != 0).all()


def test_shifted_unit_vector_moves_logits_one_item_on() -> None:
    pe = Kernel(D, L).double()
    with torch.no_grad():
        pe.toeplitz.copy_(torch.eye(L)[1])
    logits, positions = vectors(2, L), lengths(L, 3)
    got = summed(pe, logits, positions)
    assert torch.equal(got[0], torch.cat([torch.zeros(1).double(), logits[0, :-1]]))
    assert torch.equal(got[1, 3:], torch.cat([torch.zeros(1).double(), logits[1, 3:-1]]))  # not from the padding


@pytest.mark.parametrize("causal", [True, False])
def test_logits_form_equals_key_form(causal: bool) -> None:
    """softmax(Q (Uᵀ K)ᵀ) (L V): products of the query with sums of keys."""
    pe = randomised(Kernel(D, L, HEADS))
    layer = SelfAttention(D, HEADS, pe, causal).double()
    items = vectors(2, L, D)
    states = layer(items, lengths(L, L))
    u, ell = pe.matrix("U", L), pe.matrix("L", L)
    keys, values = u.T @ layer.key(items), ell @ layer.value(items)
    heads = []
    for head in range(HEADS):
        part = slice(head * D // HEADS, (head + 1) * D // HEADS)
        logits = layer.query(items)[..., part] @ keys[..., part].mT / (D / HEADS) ** 0.5
        if causal:
            logits = logits.masked_fill(torch.ones(L, L).triu(1).bool(), -torch.inf)
        heads.append(logits.softmax(-1) @ values[..., part])
    assert torch.allclose(states, layer.output(torch.cat(heads, -1)), atol=1e-12)


@pytest.mark.parametrize("what", [-1e300, 0.0, 1e300])
def test_what_is_not_allowed_stays_out_of_the_sums(what: float) -> None:
    for pairs in (hooks.target_pairs(lengths(L, 2)), hooks.item_pairs(lengths(L, 2), True)):
        pe = randomised(Kernel(D, L))
        logits, given = vectors(*pairs.allowed.shape), hooks.vectors_for(pairs, D)
        want = pe.bias(logits, given, pairs)
        got = pe.bias(logits.masked_fill(~pairs.allowed, what), given, pairs)
        assert torch.equal(got[pairs.allowed], want[pairs.allowed])


def stack(blocks: int, **options: Any) -> Transformer:
    first = build_pe("kernel", D, L, **options)
    above = [first.next_layer(lambda: build_pe("kernel", D, L, **options)) for _ in range(blocks - 1)]
    torch.manual_seed(1)
    return Transformer([first, *above], causal=True).double()


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize(
    ("options", "per_layer", "shared"),
    [
        ({}, L, L * (L + 1) // 2),  # the paper's: B K + K (K + 1) / 2
        # The ablation: both of each layer's own, or both shared.
        ({"kernel_l": "toeplitz", "kernel_shared": "none"}, 2 * L, 0),
        ({"kernel_l": "toeplitz", "kernel_shared": "both"}, 0, 2 * L),
        ({"kernel_shared": "none"}, L + L * (L + 1) // 2, 0),
        ({"kernel_shared": "both"}, 0, L + L * (L + 1) // 2),
        ({"kernel_u": "full", "kernel_l": "toeplitz", "kernel_shared": "none"}, L + L * (L + 1) // 2, 0),
        ({"kernel_u": "full", "kernel_l": "toeplitz", "kernel_shared": "both"}, 0, L + L * (L + 1) // 2),
        ({"kernel_shared": "u", "kernel_band": 2}, L * (L + 1) // 2, 2),
    ],
)
def test_degrees_of_freedom(options: dict[str, Any], per_layer: int, shared: int, blocks: int) -> None:
    """Counted where a gradient arrives, all states of full and short sequences being read."""
    model = stack(blocks, **options)
    own = {parameter for block in model.blocks for parameter in block.attention.pe.parameters()}  # type: ignore[union-attr]
    states, *_ = model(vectors(4, D), vectors(4 * (L - 1), D, seed=1), lengths(*[L - 1] * 4))
    (states * vectors(*states.shape, seed=2)).sum().backward()
    learning: list[int] = [int(parameter.grad.count_nonzero()) for parameter in own]
    assert sum(learning) == blocks * per_layer + shared


@pytest.mark.parametrize(("name", "options"), [("lower", {}), ("upper", {"kernel_u": "full", "kernel_l": "none"})])
def test_the_other_triangle_is_never_read(name: str, options: dict[str, Any]) -> None:
    pe = randomised(Kernel(D, L, HEADS, **options))
    layer = SelfAttention(D, HEADS, pe).double()
    matrix = getattr(pe, name)
    unused = torch.ones(L, L).triu(1).bool() if name == "lower" else torch.ones(L, L).tril(-1).bool()
    before = layer(vectors(2, 9, D), lengths(9, 5))
    with torch.no_grad():
        matrix[unused] = torch.nan
    after = layer(vectors(2, 9, D), lengths(9, 5))
    assert torch.equal(before, after)
    after.square().sum().backward()
    assert torch.equal(matrix.grad[unused], torch.zeros(L * (L - 1) // 2).double())
    assert (matrix.grad[~unused] != 0).all()


@pytest.mark.parametrize(("anchor", "index"), [("end", (L - 1, L - 3)), ("start", (2, 0))])
def test_rows_of_l_are_counted_from_the_anchor(anchor: str, index: tuple[int, int]) -> None:
    """One entry moves weight from the newest item to the third newest, or from the third oldest to the oldest."""
    pe = Kernel(D, L, kernel_anchor=anchor).double()
    with torch.no_grad():
        pe.lower[index] = 0.5
    weights, positions = vectors(3, L).abs(), lengths(L, 4, 2)
    weights = weights * positions.whole[0].mask
    moved = mixed(pe, weights, positions) - weights
    for b, count in enumerate((L, 4)):
        source, place = (L - 1, L - 3) if anchor == "end" else (L - count + 2, L - count)
        want = torch.zeros(L).double()
        want[place] = 0.5 * weights[b, source]
        assert torch.allclose(moved[b], want, atol=1e-15)
    assert torch.equal(moved[2] * positions.whole[0].mask[2], torch.zeros(L).double())  # two items: no third


@pytest.mark.parametrize(("anchor", "kept"), [("end", slice(0, 3)), ("start", slice(L, None))])
def test_items_outside_the_rows_keep_plain_attention(anchor: str, kept: slice) -> None:
    pe = randomised(Kernel(D, L, kernel_u="full", kernel_anchor=anchor))
    values, positions = vectors(1, L + 3), lengths(L + 3)
    other = [place for place in range(L + 3) if place not in range(L + 3)[kept]]
    for got in (summed(pe, values, positions), mixed(pe, values, positions)):
        assert torch.equal(got[:, kept], values[:, kept])
        assert ((got - values)[:, other].abs() > 1e-6).all()
    # ... and the others see nothing of them.
    values = values.index_fill(1, torch.arange(L + 3)[kept], 0.0)
    for call, got in (
        (summed, summed(pe, vectors(1, L + 3), positions)),
        (mixed, mixed(pe, vectors(1, L + 3), positions)),
    ):
        assert torch.equal(call(pe, values, positions)[:, other], got[:, other])


def test_toeplitz_reaches_k_items_back_from_everywhere() -> None:
    pe = randomised(Kernel(D, 3, kernel_l="none"))
    first = torch.zeros(1, L).double()
    first[0, 0] = 1
    assert torch.equal(summed(pe, first, lengths(L))[0], torch.cat([pe.toeplitz, torch.zeros(L - 3).double()]))


@pytest.mark.parametrize(
    ("options", "consistent"),
    [
        ({"kernel_l": "toeplitz"}, True),
        ({"kernel_u": "full", "kernel_anchor": "start"}, True),
        ({"kernel_u": "toeplitz", "kernel_l": "none"}, True),
        ({}, False),
        ({"kernel_u": "full", "kernel_l": "none"}, False),
    ],
)
def test_prefixes_keep_their_states_unless_anchored_at_the_end(options: dict[str, Any], consistent: bool) -> None:
    layer = SelfAttention(D, HEADS, randomised(Kernel(D, L, HEADS, **options)), causal=True).double()
    items = vectors(1, L, D)
    whole, part = layer(items, lengths(L)), layer(items[:, :4], lengths(4))
    assert torch.allclose(whole[:, :4], part, atol=1e-12) == consistent


def test_heads_share_one_u_or_have_their_own() -> None:
    pe = Kernel(D, L, HEADS, kernel_per_head=True).double()
    assert pe.toeplitz.shape == (HEADS, L)
    assert pe.lower.shape == (L, L)
    with torch.no_grad():
        pe.toeplitz[1].copy_(vectors(L))
    pairs = hooks.item_pairs(lengths(L), True)
    logits = vectors(1, HEADS, L, L)
    got = pe.bias(logits, hooks.item_vectors(vectors(1, HEADS, L, D // HEADS)), pairs)
    assert torch.equal(got[0, 0].tril(), logits[0, 0].tril())
    assert torch.allclose(got[0, 1].tril(), (logits[0, 1].tril() @ pe.matrix("U", L)[1]).tril())


@pytest.mark.parametrize("options", [{}, {"kernel_per_head": True}, {"kernel_u": "full", "kernel_anchor": "start"}])
def test_long_sequences_in_pieces(options: dict[str, Any]) -> None:
    """Pieces are for causal attention alone, whose lower triangle is that of any other."""
    width = 2 * PIECE + 7
    pe = randomised(Kernel(D, width - 3, HEADS, **options))
    positions = lengths(width, width - 10)
    causal, both = hooks.item_pairs(positions, True), hooks.item_pairs(positions, False)
    logits, real = vectors(2, HEADS, width, width), causal.block.mask[:, None, None]
    given = hooks.item_vectors(logits)
    whole = replace(both, allowed=causal.allowed)
    assert not whole.causal
    got, want = pe.bias(logits, given, causal), pe.bias(logits, given, whole)
    assert torch.allclose(got[causal.allowed.expand_as(got)], want[causal.allowed.expand_as(got)], atol=1e-12)
    weights = logits * causal.allowed
    (a, got), (b, want) = pe.mix(weights, given, causal), pe.mix(weights, given, whole)
    got, want = a @ got.values, b @ want.values
    assert torch.allclose(got * real, want * real, atol=1e-12)


@pytest.mark.parametrize(
    ("choice", "same"),
    [("l", {"lower"}), ("u", {"toeplitz"}), ("both", {"lower", "toeplitz"}), ("none", set())],
)
def test_layers_share_what_the_option_says(choice: str, same: set[str]) -> None:
    first = Kernel(D, L, kernel_shared=choice)
    above = first.next_layer(lambda: Kernel(D, L, kernel_shared=choice))
    assert {name for name, value in above.named_parameters() if value is getattr(first, name)} == same
    assert above is not first


def test_layers_of_other_sizes_share_what_fits() -> None:
    """DMIN puts units with one head above layers with several."""
    options: dict[str, Any] = {"kernel_shared": "both", "kernel_per_head": True}
    first = Kernel(D, L, HEADS, **options)
    above = first.next_layer(lambda: Kernel(D, L, 1, **options))
    assert above.lower is first.lower
    assert above.toeplitz.shape == (1, L)  # type: ignore[union-attr]
    longer = first.next_layer(lambda: Kernel(D, L + 1, HEADS, **options))
    assert longer.lower.shape == (L + 1, L + 1)  # type: ignore[union-attr]


def test_sums_stay_in_float32_under_autocast() -> None:
    pe = Kernel(1, 100)
    nn.init.ones_(pe.toeplitz)
    logits, positions = torch.linspace(-2, 2, 100).bfloat16()[None], lengths(100)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, pooled = summed(pe, logits, positions), mixed(pe, logits.float(), positions)
    assert got.dtype == pooled.dtype == torch.float32
    assert (got - logits.double().cumsum(-1)).abs().max() < 1e-4
    assert torch.equal(pooled, logits.float())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_u": "band"}, "kernel_u must be one of toeplitz, full, none, got 'band'"),
        ({"kernel_l": "half"}, "kernel_l must be one of full, toeplitz, none, got 'half'"),
        ({"kernel_shared": "all"}, "kernel_shared must be one of none, u, l, both, got 'all'"),
        ({"kernel_anchor": "middle"}, "kernel_anchor must be one of end, start, got 'middle'"),
        ({"kernel_band": 0}, "kernel_band must be a positive integer or None, got 0"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_pe("kernel", D, L, **options)
