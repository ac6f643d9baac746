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
from ctr_pe.pe.base import Target
from ctr_pe.pe.cape import CAPE
from ctr_pe.pe.vectors import Attended, TargetVectors
from ctr_pe.sequence.jagged import Jagged
from ctr_pe.sequence.positions import Items, Pairs
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

    def embed(self, target: Target, history: Tensor, positions: Positions) -> tuple[Target, Tensor]:
        self.calls += 1
        share = 1 / (1 + positions.like(history, positions.distance).to(history.dtype))
        return None if target is None else target - self.vector, history + share.unsqueeze(-1) * self.vector


def built(name: str, heads: int) -> PositionEncoding:
    sizes = (D, L, heads)
    own: dict[str, Callable[[], PositionEncoding]] = {
        "own": lambda: Own(*sizes),
        "own+naive": lambda: Chain([Own(*sizes), build_pe("naive", *sizes)]),
        "rope+own+cape": lambda: Chain([build_pe("rope", *sizes), Own(*sizes), build_pe("cape", *sizes)]),
        "wider": lambda: ConcatenatedPositions(*sizes, position_dim=4),
    }
    torch.manual_seed(0)
    pe = own[name]() if name in own else build_pe(name, *sizes)
    for parameter in pe.parameters():
        nn.init.normal_(parameter, std=0.5)
    return pe.double()


class TestEmbed:
    """The model calls it, once per batch; no unit does."""

    @pytest.mark.parametrize("name", ["own", "own+naive", "rope+own+cape"])
    def test_units_do_not_call_it(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        single, several = built(name, 1), built(name, HEADS)
        upper = several.next_layer(lambda: built(name, HEADS))
        units: list[Any] = [
            TargetAttention(D, pe=single),
            SelfAttention(D, HEADS, several),
            Transformer([several, upper]),
        ]
        monkeypatch.setattr(Own, "embed", lambda *_: pytest.fail("embed was called"))
        for unit in units:
            (target, items, at), given = rows([3, 1, 9]), unit.double()
            given(items, at) if isinstance(unit, SelfAttention) else given(target, items, at)
            if isinstance(unit, SelfAttention):
                given.newest(items, at)
            if isinstance(unit, Transformer):
                given.of_target(target, items, at)
                given.encode(items, at)

    def test_where_it_is_missing_the_error_says_so(self) -> None:
        """If the encoding widens the items, a unit cannot compute without."""
        at = Positions.from_mask(torch.ones(2, L, dtype=torch.bool))
        target, history = torch.randn(2, D), torch.randn(2, L, D)
        missing = rf"^items of width {D}, the attention unit takes {D + 4}: call pe.embed\(.*\) first$"
        single, several = built("wider", 1).float(), built("wider", HEADS).float()
        layer, stack = SelfAttention(D + 4, HEADS, several), Transformer([several])
        calls: list[Callable[[], Any]] = [
            lambda: TargetAttention(D + 4, pe=single)(target, history, at),
            lambda: layer(history, at),
            lambda: layer.newest(at.pack(history), at),
            lambda: stack(target, at.pack(history), at),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=missing):
                call()
        with pytest.raises(ValueError, match=rf"^items of width 3, the attention unit takes {D}$"):
            TargetAttention(D)(target[:, :3], history[..., :3], at)


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
            single.append(getattr(stack, way)(target, items, at)[-1]["size"])
        for power, pe in enumerate(encodings):
            pe.value = 10.0**power
        target, items, at = rows()
        losses = getattr(stack, way)(target, items, at)[-1]
        assert losses.keys() == {"size"}
        assert torch.allclose(losses["size"], torch.stack(single).sum())
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
                losses = TargetAttention(D, pe=pe).double().attend(target, items, at)[-1]
            else:
                losses = SelfAttention(D, heads, pe).double().attend(items, at)[-1]
            return {name: loss.item() for name, loss in losses.items()}

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
            assert TargetAttention(D, pe=pe).double().eval().attend(target, items, at)[-1] == {}
        elif name == "stack":
            assert Transformer([pe, pe]).double().eval().of_target(target, items, at)[-1] == {}
        else:
            unit = SelfAttention(D, heads, pe).double().eval()
            assert unit.attend(items, at)[-1] == {} if name == "self" else unit.newest(items, at).shape == (3, D)

    def test_an_encoding_without_names_is_not_asked(self) -> None:
        class Silent(Lossy):
            def losses(self, attended: Sequence[Attended]) -> dict[str, Tensor]:
                raise AssertionError("it has no loss_names")

        target, items, at = rows()
        one, several = Silent(D, L), Silent(D, L, HEADS)
        one.loss_names = several.loss_names = ()
        assert TargetAttention(D, pe=one).double().attend(target, items, at)[-1] == {}
        assert SelfAttention(D, HEADS, several).double().attend(items, at)[-1] == {}

    @pytest.mark.parametrize("name", ["own", "pdm", "euler", "dif"])
    def test_nothing_is_kept_between_batches(self, name: str) -> None:
        """The second batch has its own, and the first one's is gone with it."""
        options: dict[str, Any] = {"pdm_contrast": 0.1, "euler_contrast": 0.1}
        sizes = {"field_dims": (5, 3), "field_sizes": (9, 4), "dif_predict": 5.0} if name == "dif" else {}
        pe = Lossy(D, L) if name == "own" else build_pe(name, D, L, **options, **sizes)
        unit = TargetAttention(D, pe=pe).double().train()
        target, items, at = rows()
        ((loss_name, loss),) = unit.attend(target, items, at, with_ids(target, items, at))[-1].items()
        assert pe.loss_names == (loss_name,)
        assert loss.requires_grad
        gone, kept = weakref.ref(loss), loss.item()
        del at, loss
        gc.collect()
        assert gone() is None
        target, items, at = rows()
        losses = unit.attend(target, items, at, with_ids(target, items, at))[-1]
        if name in ("own", "dif"):  # the others draw
            assert losses[loss_name].item() == pytest.approx(kept)

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
        states, _ = layer.heads(items, at)
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
            interest, _, losses = TargetAttention(D, pe=pe).double().attend(target, items, at)
            want = interest.square().sum()
        elif kind == "causal":
            states, losses = SelfAttention(D, heads, pe, causal=True).double().heads(items, at)
            want = states.square().sum()
        else:
            _, losses = Transformer([pe], causal=True).double().of_target(target, items, at)
            want = losses["size"]
        assert losses["size"] > 0
        assert torch.allclose(losses["size"], want)


def with_ids(target: Tensor, items: Tensor, at: Positions) -> Pairs:
    def looked_up(embedding: Tensor) -> Items:
        index = torch.arange(len(embedding))
        return Items(embedding, (index % 8 + 1, index % 3 + 1), torch.ones(len(embedding), dtype=torch.bool))

    return at.target_pairs(looked_up(items), looked_up(target))


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
        pairs = with_ids(target, items, at)
        unpack = Jagged.unpack

        def numbers_only(block: Jagged, own: Tensor) -> Tensor:
            assert own.dim() == 1, f"vectors of {tuple(own.shape)} are padded"
            return unpack(block, own)

        monkeypatch.setattr(Jagged, "unpack", numbers_only)
        monkeypatch.setattr(TargetVectors, "keys", property(asked_for))
        monkeypatch.setattr(TargetVectors, "values", property(asked_for))
        interest, _ = unit(target, items, at, pairs)
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
