from __future__ import annotations

import pytest
import torch
from torch import nn

from ctr_pe import Chain, PositionEncoding, Positions, available_pes, build_pe
from ctr_pe.pe.cape import CAPE
from ctr_pe.pe.dif import DIF
from ctr_pe.pe.rope import RoPE
from ctr_pe.sequence.positions import Items
from ctr_pe.units import SelfAttention
from ctr_pe.utils.errors import UserError


def test_names() -> None:
    assert {"none", "naive", "rope", "cope", "cape"} <= set(available_pes())
    assert type(build_pe("none", 8, 5)) is PositionEncoding


@pytest.mark.parametrize(
    ("name", "heads", "shapes"),
    [
        ("none", 1, {}),
        ("naive", 2, {"table": (6, 8)}),
        ("rope", 2, {}),
        ("sinusoidal", 2, {}),
        ("cope", 2, {"table": (6, 4)}),
        ("cape_additive", 2, {"table": (6, 4)}),
        ("cape", 2, {"gate.weight": (3, 4), "gate.bias": (3,), "table": (6, 3)}),
        ("cape_constant", 2, {"gate.weight": (3, 4), "gate.bias": (3,), "table": (6, 3)}),
        ("cape_oracle", 2, {"gate.weight": (3, 4), "gate.bias": (3,), "table": (6, 3)}),
        ("cape_cosine", 2, {"gate.weight": (3, 4), "gate.bias": (3,), "table": (6, 3),
                            "projection": (32, 8), "steepness": (), "middle": ()}),
        ("likeness", 2, {"gate.weight": (3, 4), "gate.bias": (3,), "table": (2, 3),
                         "projection": (32, 8), "steepness": (), "middle": ()}),
        ("t5", 2, {"table": (32, 2)}),
        ("alibi", 2, {"slopes": (2,)}),
        ("kerple_log", 2, {"r1": (2,), "r2": (2,)}),
        ("kerple_power", 2, {"r1": (2,), "r2": (2,)}),
        ("xlnet", 2, {"content_bias": (2, 4), "position_bias": (2, 4), "projection.weight": (8, 8)}),
        ("kernel", 2, {"toeplitz": (5,), "lower": (5, 5)}),
        ("pdm", 2, {"table": (6, 8), "query.weight": (8, 8), "key.weight": (8, 8)}),
    ],
)  # fmt: skip
def test_parameter_names_and_shapes(name: str, heads: int, shapes: dict[str, tuple[int, ...]]) -> None:
    pe = build_pe(name, dim=8, max_len=5, num_heads=heads, position_dim=3)
    assert {key: tuple(value.shape) for key, value in pe.state_dict().items()} == shapes


def test_options_of_other_encodings_are_left_aside() -> None:
    assert isinstance(build_pe("rope", 8, 5, position_dim=3, rope_base=100.0), RoPE)


def test_chain_by_name() -> None:
    pe = build_pe("rope+cape", 8, 5, position_dim=3)
    assert isinstance(pe, Chain)
    kinds: list[type] = [RoPE, CAPE]
    assert [type(link) for link in pe.encodings] == kinds
    assert pe.loss_names == ()


def test_every_link_of_a_chain_sees_the_item_embeddings() -> None:
    pe = build_pe("dif+cape+dif", 8, 5, 2, field_dims=[4, 4])
    assert isinstance(pe, Chain)
    first, _, last = pe.encodings
    for link in (first, last):
        assert isinstance(link, DIF)
        nn.init.normal_(link.sources["1"].query.weight)  # type: ignore[union-attr]
    items, positions = torch.randn(3, 8), Positions.from_mask(torch.ones(1, 3, dtype=torch.bool))
    layer = SelfAttention(8, 2, pe)
    states = layer(items, positions)
    assert states.isfinite().all()
    other = Items(torch.cat([items[:, :4], torch.randn(3, 4)], 1))
    for link in (first, last):
        alone = SelfAttention(8, 2, Chain([link]))
        alone.load_state_dict(
            {key: value for key, value in layer.state_dict().items() if ".encodings" not in key}, strict=False
        )
        assert not torch.allclose(
            *(alone(items, positions, positions.item_pairs(False, looked_up)) for looked_up in (Items(items), other))
        )
        nn.init.zeros_(link.sources["1"].query.weight)  # type: ignore[union-attr, arg-type]
        assert not torch.allclose(layer(items, positions), states)
        nn.init.normal_(link.sources["1"].query.weight)  # type: ignore[union-attr, arg-type]
        states = layer(items, positions)


def test_chain_of_different_sizes() -> None:
    with pytest.raises(ValueError, match="one \\(dim, max_len, num_heads\\)"):
        Chain([build_pe("rope", 8, 5), build_pe("cape", 8, 6)])
    with pytest.raises(ValueError, match="got \\[\\]"):
        Chain([])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("cappe", {}, "'cappe' is unknown: did you mean 'cape'"),
        ("rope+cappe", {}, "'cappe' is unknown: did you mean 'cape'"),
        ("cape", {"position_dims": 3}, "'position_dims' is unknown: did you mean 'position_dim'"),
        ("cape", {"position_dim": 0}, "'cape': position_dim must be a positive integer, got 0"),
        ("cape", {"position_span": "middle"}, "'cape': position_span must be one of end, between"),
        ("rope", {"rope_layout": "quarter"}, "'rope': rope_layout must be"),
        ("naive", {"position_index": "slot"}, "'naive': position_index must be"),
        ("sinusoidal", {"position_index": "slot"}, "'sinusoidal': position_index must be"),
        ("alibi", {"alibi_slope": 0}, "'alibi': alibi_slope must be a positive number, got 0"),
        ("cape_cosine", {"likeness_dim": 0}, "'cape_cosine': likeness_dim must be a positive integer, got 0"),
        ("cape_cosine", {"likeness_of": "item_id"}, "'cape_cosine': likeness_of must be one of item, fields"),
        ("cape_cosine", {"likeness_of": "fields", "field_dims": [4, 3]}, "add up to 7, not to dim=8"),
        ("likeness", {"likeness_dim": 0}, "'likeness': likeness_dim must be a positive integer, got 0"),
        ("likeness", {"likeness_of": "item_id"}, "'likeness': likeness_of must be one of item, fields"),
        ("likeness", {"field_dims": [4, 3]}, "'likeness': field_dims=\\[4, 3\\] add up to 7, not to dim=8"),
        ("cape_oracle", {"field_sizes": [9, 0]}, "'cape_oracle': the last field of an item must have ids"),
        ("cope", {"dim": 7, "num_heads": 2}, "dim=7 is not divisible by num_heads=2"),
        ("none", {"max_len": 0}, "max_len must be a positive integer, got 0"),
    ],
)
def test_mistakes_are_one_line(name: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        build_pe(name, **{"dim": 8, "max_len": 5} | arguments)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_stacked_layers() -> None:
    """Learned vectors are added once, at the input; CAPE has its own parameters in each layer; chains do both."""
    naive, cape, chain = (build_pe(name, 8, 5, position_dim=3) for name in ("naive", "cape", "naive+cape"))
    assert type(naive.next_layer(lambda: build_pe("naive", 8, 5))) is PositionEncoding
    above = cape.next_layer(lambda: build_pe("cape", 8, 5, position_dim=3))
    assert isinstance(above, CAPE)
    assert above is not cape
    upper = chain.next_layer(lambda: build_pe("naive+cape", 8, 5, position_dim=3))
    assert isinstance(upper, Chain)
    assert [type(link) for link in upper.encodings] == [PositionEncoding, CAPE]
