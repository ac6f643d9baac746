"""When units call the hooks of an encoding, with what, and what becomes of the losses that it gives."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ctr_pe import Chain, PositionEncoding, Positions, available_pes, build_pe
from ctr_pe.model_zoo.bst import ConcatenatedPositions
from ctr_pe.pe.cape import CAPE
from ctr_pe.pe.vectors import Attended, TargetVectors
from ctr_pe.sequence.jagged import Block
from ctr_pe.sequence.positions import Items
from ctr_pe.testing import Batch
from ctr_pe.units import SelfAttention, TargetAttention
from ctr_pe.units.transformer import Transformer

D, L, HEADS = 8, 6, 2
COUNTS = [3, 0, 9, 1, 12, 6, 40, 35]  # several blocks, past the tables


class Own(PositionEncoding):
    """An encoding from elsewhere, which moves items by a vector of its own at each distance and counts its calls."""

    def __init__(self, dim: int, max_len: int, num_heads: int = 1) -> None:
        super().__init__(dim, max_len, num_heads)
        self.vector = nn.Parameter(torch.randn(dim))
        self.calls = 0

    def embed(self, target: Tensor | None, history: Tensor, positions: Positions) -> tuple[Tensor | None, Tensor]:
        self.calls += 1
        share = 1 / (1 + positions.like(history, positions.distance).to(history.dtype))
        return None if target is None else target - self.vector, history + share.unsqueeze(-1) * self.vector


class OwnByInheritance(Own):
    """Whose ``embed`` is its parent's."""


class Placed:
    """An ``embed`` from a class that is no encoding."""

    def embed(self, target: Tensor | None, history: Tensor, positions: Positions) -> tuple[Tensor | None, Tensor]:
        shift = positions.like(history, positions.distance).to(history.dtype).unsqueeze(-1)
        return None if target is None else target + 1, history + shift


class OwnFromAMixin(Placed, PositionEncoding):
    pass


def built(name: str, heads: int) -> PositionEncoding:
    sizes = (D, L, heads)
    own: dict[str, Callable[[], PositionEncoding]] = {
        "own": lambda: Own(*sizes),
        "own by inheritance": lambda: OwnByInheritance(*sizes),
        "own from a mixin": lambda: OwnFromAMixin(*sizes),
        "own+naive": lambda: Chain([Own(*sizes), build_pe("naive", *sizes)]),
        "rope+own+cape": lambda: Chain([build_pe("rope", *sizes), Own(*sizes), build_pe("cape", *sizes)]),
        "wider": lambda: ConcatenatedPositions(*sizes, position_dim=4),
    }
    torch.manual_seed(0)
    pe = own[name]() if name in own else build_pe(name, *sizes)
    for parameter in pe.parameters():
        nn.init.normal_(parameter, std=0.5)
    return pe.double()


EMBEDDING = [
    *("naive", "sinusoidal", "euler", "naive+cape", "rope+euler"),
    *("own", "own by inheritance", "own from a mixin", "own+naive", "rope+own+cape", "wider"),
]


def results(unit: TargetAttention | SelfAttention, target: Tensor, items: Tensor, at: Positions) -> tuple[Tensor, ...]:
    if isinstance(unit, TargetAttention):
        interest, weights = unit(target, items, at)
        return interest, weights
    return (unit(items, at),)


class TestEmbed:
    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("kind", ["dot", "din", "causal", "both"])
    @pytest.mark.parametrize("name", EMBEDDING)
    def test_forgetting_it_changes_nothing(self, name: str, kind: str, packed: bool) -> None:
        heads = 1 if kind in ("dot", "din") else HEADS
        pe = built(name, heads)
        width = pe.out_dim
        unit: Any = SelfAttention(width, heads, pe, kind == "causal") if heads > 1 else TargetAttention(width, kind, pe)
        unit.double().eval()
        batch = Batch.random(COUNTS).laid_out("mixed")

        def given() -> tuple[Positions, Tensor]:
            at = Positions.from_mask(batch.mask, batch.age)
            return at, at.pack(batch.history) if packed else batch.history

        at, items = given()
        target, moved = pe.embed(batch.target, items, at)
        assert target is not None
        called = results(unit, target, moved, at)
        at, items = given()
        forgotten = results(unit, batch.target, items, at)
        assert len(called) == len(forgotten)
        for one, other in zip(called, forgotten, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-12)
        if width == D:  # what is not embedded is something else
            at, items = given()
            at.embedded[pe] = None
            assert not torch.allclose(results(unit, batch.target, items, at)[0], called[0], atol=1e-3)

    @pytest.mark.parametrize("name", EMBEDDING)
    def test_nor_where_the_newest_item_alone_is_wanted(self, name: str) -> None:
        pe = built(name, HEADS)
        unit, batch = SelfAttention(pe.out_dim, HEADS, pe).double().eval(), Batch.random([3, 9, 1, 12])
        found: list[Tensor] = []
        for call in (True, False):
            at = Positions.from_mask(batch.mask)
            items = at.pack(batch.history)
            found.append(unit.newest(pe.embed(None, items, at)[1] if call else items, at))
        assert torch.allclose(found[0], found[1], rtol=0, atol=1e-12)

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("name", ["own", "own by inheritance", "rope+own+cape", "own from a mixin"])
    def test_a_stack_applies_it_once(self, name: str, causal: bool) -> None:
        """Although ``next_layer`` gives upper blocks an encoding of their own, which would move items too."""
        first = built(name, HEADS)
        encodings = [first]
        while len(encodings) < 3:
            encodings.append(encodings[-1].next_layer(lambda: built(name, HEADS)))
        stack = Transformer(encodings, causal=causal, norm="pre", hidden_dim=5).double().eval()
        batch = Batch.random(COUNTS)
        at = Positions.from_mask(batch.mask)
        packed = at.pack(batch.history)
        own = [[module for module in pe.modules() if isinstance(module, Own)] for pe in encodings]
        states, _ = stack(batch.target, packed, at)
        assert [module.calls for one in own for module in one] == ([1, 0, 0] if "mixin" not in name else [])
        alone = stack.of_target(batch.target, packed, Positions.from_mask(batch.mask))
        assert torch.allclose(alone, states[at.with_target().newest], rtol=0, atol=1e-9)

        # Embedded beforehand, and nothing done inside.
        target, moved = first.embed(batch.target, packed, Positions.from_mask(batch.mask))
        for block, pe in zip(stack.blocks, encodings, strict=True):
            links = pe.encodings if isinstance(pe, Chain) else []
            rest = [link for link in links if not isinstance(link, Own)]
            block.attention.pe = Chain(rest) if rest else PositionEncoding(D, L, HEADS)  # type: ignore[union-attr]
        want, _ = stack(target, moved, Positions.from_mask(batch.mask))
        assert torch.allclose(states, want, rtol=0, atol=1e-9)

    def test_a_unit_called_again_embeds_again(self) -> None:
        """As for several targets of one history, none of which goes without positions."""
        pe, (target, items, at) = built("own", 1), rows()
        unit = TargetAttention(D, pe=pe).double()
        first, second = (unit(target, items, at)[0] for _ in range(2))
        assert torch.equal(first, second)

    def test_stacked_units_of_one_encoding_embed_once(self) -> None:
        pe, (_, items, at) = built("own", 1), rows()
        lower, upper = (SelfAttention(D, 1, pe).double() for _ in range(2))
        upper(lower(items, at), at)
        assert pe.calls == 1

    def test_every_encoding_of_a_batch_is_applied_once(self) -> None:
        """Two units of a batch, each with an encoding of its own: neither takes the other's for its own."""
        pes = [built("own", 1), built("own", 1)]
        at = Positions.from_mask(torch.ones(2, L, dtype=torch.bool))
        target, history = torch.randn(2, D).double(), torch.randn(2, L, D).double()
        for pe in pes:
            TargetAttention(D, pe=pe).double()(target, history, at)
        assert [pe.calls for pe in pes] == [1, 1]
        assert at.embedded.keys() == set(pes)
        assert not Positions.from_mask(torch.ones(2, L, dtype=torch.bool)).embedded  # each batch anew


class Lossy(PositionEncoding):
    """Gives ``value`` times the sum of squares of what is pooled, and keeps nothing."""

    def __init__(self, *sizes: int, name: str = "size", value: float = 1.0) -> None:
        super().__init__(*sizes)
        self.loss_names, self.value = (name,), value

    def losses(self, attended: Sequence[Attended]) -> dict[str, Tensor]:
        return {self.loss_names[0]: self.value * sum((one.pooled.square().sum() for one in attended), torch.zeros(()))}


class LossyCAPE(CAPE):
    """Has no hook of its own but its loss."""

    loss_names = ("size",)

    def losses(self, attended: Sequence[Attended]) -> dict[str, Tensor]:
        pooled = [
            one.pairs.block.pack(one.pooled.transpose(1, 2)) if one.pairs.self_attention else one.pooled
            for one in attended
        ]
        return {"size": sum((real.square().sum() for real in pooled), torch.zeros(()))}


def rows(counts: Sequence[int] = COUNTS) -> tuple[Tensor, Tensor, Positions]:
    """Targets, packed items, positions."""
    batch = Batch.random(list(counts))
    at = Positions.from_mask(batch.mask, batch.age)
    return batch.target.requires_grad_(), at.pack(batch.history).requires_grad_(), at


class Recorder(PositionEncoding):
    """Keeps what its losses are computed from."""

    loss_names = ("none",)

    def bias(self, logits: Tensor, vectors: Any, pairs: Any) -> Tensor:
        return logits - 0.1 * pairs.offset.abs()

    def losses(self, attended: Sequence[Attended]) -> dict[str, Tensor]:
        self.attended = list(attended)
        return {"none": torch.zeros(())}


class TestLosses:
    @pytest.mark.parametrize("way", ["forward", "of_target"])
    def test_a_batch_has_the_sum_over_the_layers(self, way: str) -> None:
        encodings = [Lossy(D, L + 1, HEADS, value=value) for value in (1.0, 10.0, 100.0)]
        torch.manual_seed(0)
        stack = Transformer(encodings, causal=True).double().train()
        single: list[Tensor] = []
        for chosen in encodings:  # one layer's alone
            for pe in encodings:
                pe.value = 10.0 ** encodings.index(pe) if pe is chosen else 0.0
            target, items, at = rows()
            getattr(stack, way)(target, items, at)
            single.append(at.losses["size"])
        for power, pe in enumerate(encodings):
            pe.value = 10.0**power
        target, items, at = rows()
        getattr(stack, way)(target, items, at)
        assert at.losses.keys() == {"size"}
        assert torch.allclose(at.losses["size"], torch.stack(single).sum())
        assert min(single) > 0

    @pytest.mark.parametrize("kind", ["target", "self"])
    def test_a_chain_gives_those_of_every_link(self, kind: str) -> None:
        heads = 1 if kind == "target" else HEADS
        sizes = (D, L, heads)

        def total(links: list[PositionEncoding]) -> dict[str, float]:
            torch.manual_seed(0)
            pe = Chain(links)
            assert set(pe.loss_names) == {name for link in links for name in link.loss_names}
            target, items, at = rows()
            if kind == "target":
                TargetAttention(D, pe=pe).double()(target, items, at)
            else:
                SelfAttention(D, heads, pe).double()(items, at)
            return {name: loss.item() for name, loss in at.losses.items()}

        one, two = Lossy(*sizes, value=1.0), Lossy(*sizes, name="other", value=3.0)
        again, plain = Lossy(*sizes, value=5.0), build_pe("rope", *sizes)
        unit = total([one])["size"]
        assert unit > 0
        for order in ([one, two, again], [again, two, one], [two, one, again]):
            assert total(list(order)) == pytest.approx({"size": 6 * unit, "other": 3 * unit})
        turned = total([plain, one])["size"]
        assert total([one, plain, two]) == pytest.approx({"size": turned, "other": 3 * turned})
        assert total([plain]) == {}

    @pytest.mark.parametrize("name", ["target", "self", "newest", "stack"])
    def test_evaluation_has_none_and_computes_none(self, name: str) -> None:
        class Unasked(Lossy):
            def losses(self, attended: Sequence[Attended]) -> dict[str, Tensor]:
                raise AssertionError("in evaluation")

        heads = 1 if name == "target" else HEADS
        pe, (target, items, at) = Unasked(D, L, heads), rows([3, 1, 9])
        if name == "target":
            TargetAttention(D, pe=pe).double().eval()(target, items, at)
        elif name == "stack":
            Transformer([pe, pe]).double().eval().of_target(target, items, at)
        else:
            unit = SelfAttention(D, heads, pe).double().eval()
            unit(items, at) if name == "self" else unit.newest(items, at)
        assert not at.losses

    def test_an_encoding_without_names_is_not_asked(self) -> None:
        class Silent(Lossy):
            def losses(self, attended: Sequence[Attended]) -> dict[str, Tensor]:
                raise AssertionError("it has no loss_names")

        target, items, at = rows()
        one, several = Silent(D, L), Silent(D, L, HEADS)
        one.loss_names = several.loss_names = ()
        TargetAttention(D, pe=one).double()(target, items, at)
        SelfAttention(D, HEADS, several).double()(items, at)
        assert not at.losses

    @pytest.mark.parametrize("name", ["own", "pdm", "euler", "dif"])
    def test_nothing_is_kept_between_batches(self, name: str) -> None:
        """The second batch has its own, and the first one's is gone with it."""
        options: dict[str, Any] = {"pdm_contrast": 0.1, "euler_contrast": 0.1}
        sizes = {"field_dims": (5, 3), "field_sizes": (9, 4), "dif_predict": 5.0} if name == "dif" else {}
        pe = Lossy(D, L) if name == "own" else build_pe(name, D, L, **options, **sizes)
        unit = TargetAttention(D, pe=pe).double().train()
        target, items, at = rows()
        if name == "dif":
            at = carrying_ids(target, items, at)
        unit(target, items, at)
        ((loss_name, loss),) = at.losses.items()
        assert pe.loss_names == (loss_name,)
        assert loss.requires_grad
        gone, kept = weakref.ref(loss), loss.item()
        del at, loss
        gc.collect()
        assert gone() is None
        target, items, at = rows()
        if name == "dif":
            at = carrying_ids(target, items, at)
        assert not at.losses
        unit(target, items, at)
        if name in ("own", "dif"):  # the others draw
            assert at.losses[loss_name].item() == pytest.approx(kept)

    def test_it_sees_what_the_unit_computed(self) -> None:
        """Logits after bias, whose softmax are the weights; what is pooled; each row with items once."""
        pe, (target, items, at) = Recorder(D, L), rows()
        interest, weights = TargetAttention(D, pe=pe).double()(target, items, at)
        (one,) = pe.attended
        assert torch.equal(one.pooled[:, 0, 0], interest)
        got = one.pairs.softmax(one.logits)[:, 0, 0] * one.pairs.block.mask
        assert torch.allclose(at.unpack(one.pairs.block.pack(got)), weights)

        heads, (target, items, at) = Recorder(D, L, HEADS), rows()
        layer = SelfAttention(D, HEADS, heads, causal=True).double()
        states = layer.heads(items, at)
        blocks = [one.pairs.block for one in heads.attended]
        assert [block.rows.tolist() for block in blocks] == [block.rows.tolist() for block in at.blocks]
        assert len(blocks) > 1
        for one in heads.attended:
            pooled = one.pairs.block.pack(one.pooled.transpose(1, 2))
            assert torch.equal(pooled, states[one.pairs.block.items])
            mixed = one.pairs.softmax(one.logits) @ one.vectors.values
            assert torch.allclose(one.pairs.block.pack(mixed.transpose(1, 2)), pooled)
        assert sorted(torch.cat([block.rows for block in blocks]).tolist()) == [b for b, n in enumerate(COUNTS) if n]

    @pytest.mark.parametrize("kind", ["target", "causal", "stack"])
    def test_a_loss_may_be_all_that_a_subclass_adds(self, kind: str) -> None:
        """Also where one operator replaces the hooks otherwise."""
        heads = 1 if kind == "target" else HEADS
        torch.manual_seed(0)
        pe, (target, items, at) = LossyCAPE(D, L, heads), rows()
        nn.init.normal_(pe.table)
        if kind == "target":
            interest, _ = TargetAttention(D, pe=pe).double()(target, items, at)
            want = interest.square().sum()
        elif kind == "causal":
            want = SelfAttention(D, heads, pe, causal=True).double().heads(items, at).square().sum()
        else:
            Transformer([pe], causal=True).double().of_target(target, items, at)
            want = None
        assert at.losses["size"] > 0
        assert want is None or torch.allclose(at.losses["size"], want)


def carrying_ids(target: Tensor, items: Tensor, at: Positions) -> Positions:
    def with_ids(embedding: Tensor) -> Items:
        index = torch.arange(len(embedding))
        return Items(embedding, (index % 8 + 1, index % 3 + 1), torch.ones(len(embedding), dtype=torch.bool))

    return at.carrying(with_ids(items), with_ids(target))


class TestPadding:
    """Target attention pads numbers per pair, no vectors: most slots of a batch are padding."""

    @pytest.mark.parametrize("training", [False, True])
    @pytest.mark.parametrize("score", ["dot", "bilinear", "din"])
    @pytest.mark.parametrize("name", [*available_pes(), "rope+cape+kernel"])
    def test_no_vectors_are_padded(
        self, name: str, score: str, training: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        unit = TargetAttention(D, score, built(name, 1)).double().train(training)
        target, items, at = rows()
        at = carrying_ids(target, items, at)
        unpack = Block.unpack

        def numbers_only(block: Block, own: Tensor) -> Tensor:
            assert own.dim() == 1, f"vectors of {tuple(own.shape)} are padded"
            return unpack(block, own)

        monkeypatch.setattr(Block, "unpack", numbers_only)
        monkeypatch.setattr(TargetVectors, "keys", property(asked_for))
        monkeypatch.setattr(TargetVectors, "values", property(asked_for))
        interest, _ = unit(target, items, at)
        interest.sum().backward()

    def test_those_that_ask_get_them(self) -> None:
        class Asks(PositionEncoding):
            def bias(self, logits: Tensor, vectors: Any, pairs: Any) -> Tensor:
                assert torch.equal(vectors.keys, vectors.values)
                self.seen = vectors.keys
                return logits

        pe, (target, items, at) = Asks(D, L), rows()
        TargetAttention(D, pe=pe).double()(target, items, at)
        (block,) = at.whole
        assert torch.equal(pe.seen[:, 0], block.pad(items))


def asked_for(vectors: TargetVectors) -> Tensor:
    raise AssertionError("the keys are padded")
