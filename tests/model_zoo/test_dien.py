"""DIEN against loops over rows and items, and its keys."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ctr_pe.model_zoo import DIEN
from ctr_pe.pe.base import PositionEncoding, Target
from ctr_pe.sequence.positions import Positions
from ctr_pe.utils.errors import UserError
from tests.support.models import SLOTS, batch
from tests.support.models import build as build_model

build = partial(build_model, "DIEN")
COUNTS = [3, 0, 6, 1, 5]
OTHERS: dict[str, dict[str, Any]] = {
    f"{name}_other": {"source": "", "type": "sequence", "padding_idx": 0, "vocab_size": size, "max_len": SLOTS}
    | {"share_embedding": f"{name}_id", "feature_encoder": None}
    for name, size in (("item", 40), ("cate", 9))
}
GIVEN: dict[str, Any] = {"changes": OTHERS, "dien_neg_seq_field": [["item_other", "cate_other"]]}


def randomised(model: Any) -> Any:
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=draw)
    return model.double()


def with_others(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Negatives: for every history item another one; the one at the third item of the third row is missing."""
    rows = dict(rows)
    for name, size in (("item", 40), ("cate", 9)):
        history = rows[f"{name}_history"]
        rows[f"{name}_other"] = (history * 3 % (size - 1) + 1) * (history > 0)
        missing = (history[2] > 0).nonzero()[2]
        rows[f"{name}_other"][2, missing] = 0
    return rows


def items_of(model: Any, rows: dict[str, Tensor], kind: str, row: int) -> Tensor:
    """(n, 8): embeddings of one row's history or negatives, padding left out of neither's slots but the history's."""
    real = rows["item_history"][row] > 0
    tables = model.embedding_layer.embedding_layers
    return torch.cat([tables[f"{name}_id"].weight[rows[f"{name}_{kind}"][row][real]] for name in ("item", "cate")], 1)


def states_of(model: Any, items: Tensor) -> Tensor:
    cell = nn.GRUCell(8, 8).double()
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in model.extractors[0].state_dict().items()})
    states = [torch.zeros(8, dtype=torch.float64)]
    for item in items:
        states.append(cell(item, states[-1]))
    return torch.stack(states[1:]) if len(items) else torch.zeros(0, 8, dtype=torch.float64)


@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("attention", ["dot", "bilinear"])
@pytest.mark.parametrize("gate", ["AIGRU", "AGRU", "AUGRU"])
def test_interest_is_the_paper_s(gate: str, attention: str, softmax: bool, tmp_path: Path) -> None:
    """Equations 2 to 7, one row and one item after the other."""
    params = {"gru_type": gate, "attention_type": f"{attention}_attention", "use_attention_softmax": softmax}
    model, rows, seen = randomised(build(tmp_path, **params)).eval(), batch(COUNTS, left=True), []
    model.dnn.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(rows)
    target_fields, interest = seen[0].split([8, 8], 1)
    unit, score = model.evolutions[0], model.attentions[0].score
    for row, count in enumerate(COUNTS):
        state = torch.zeros(8, dtype=torch.float64)
        states = states_of(model, items_of(model, rows, "history", row))
        if count:
            target = target_fields[row] if attention == "dot" else score.weight @ target_fields[row]
            weights = (states @ target).softmax(0) if softmax else states @ target
        for step in range(count):
            a, b = weights[step], states[step]
            of_item = (unit.weight_ih @ (a * b if gate == "AIGRU" else b) + unit.bias_ih).split(8)
            of_state = (unit.weight_hh @ state + unit.bias_hh).split(8)
            new = torch.tanh(of_item[-1] + torch.sigmoid(of_item[-2] + of_state[-2]) * of_state[-1])
            update = torch.sigmoid(of_item[0] + of_state[0])
            share = {"AIGRU": update, "AGRU": a, "AUGRU": a * update}[gate]
            state = (1 - share) * state + share * new
        assert torch.allclose(interest[row], state, rtol=0, atol=1e-12)


class TestAuxiliaryLoss:
    @pytest.mark.parametrize("left", [False, True])
    def test_with_given_negatives_it_is_the_paper_s(self, left: bool, tmp_path: Path) -> None:
        """-1/pairs · sum of log s(b_t, e_{t+1}) + log(1 - s(b_t, other_{t+1})); pairs without negative are left out."""
        model = randomised(build(tmp_path, **GIVEN, aux_loss_alpha=0.7, aux_hidden_units=[5])).train()
        rows, total, pairs = with_others(batch(COUNTS, left=left)), torch.zeros((), dtype=torch.float64), 0
        for row, count in enumerate(COUNTS):
            items, others = (items_of(model, rows, kind, row) for kind in ("history", "other"))
            states = states_of(model, items)
            for step in range(count - 1):
                if row == 2 and step + 1 == 2:
                    continue
                for following, sign in ((items, 1), (others, -1)):
                    logit = model.aux_net[0].mlp(torch.cat([states[step], following[step + 1]]))
                    total = total - nn.functional.logsigmoid(sign * logit).squeeze()
                pairs += 1
        output = model(rows)
        assert pairs == 2 + 4 + 4
        assert torch.allclose(output["losses"]["next item"], 0.7 * total / pairs, rtol=0, atol=1e-12)
        plain = nn.functional.binary_cross_entropy(output["y_pred"], rows["label"].double().view(-1, 1))
        loss = model.add_loss(output, rows["label"].double().view(-1, 1))
        assert torch.allclose(loss, plain + output["losses"]["next item"], rtol=0, atol=1e-12)

    @pytest.mark.parametrize("given", [False, True])
    def test_it_teaches_extractor_and_embeddings(self, given: bool, tmp_path: Path) -> None:
        model = build(tmp_path, **(GIVEN if given else {}), aux_loss_alpha=1.0, learning_rate=0.03)
        model._max_gradient_norm = 10.0
        rows, losses = batch([6] * 16), []
        rows = with_others(rows) if given else rows
        for _ in range(60):
            losses.append(model.train()(rows)["losses"]["next item"].item())
            model.train_step(rows)
        assert losses[0] == pytest.approx(2 * 0.693, abs=0.1)
        assert sum(losses[-10:]) < 0.6 * sum(losses[:10])

    def test_padding_changes_nothing(self, tmp_path: Path) -> None:
        values = []
        for layout in ({}, {"left": True}, {"slots": 11}):
            model = randomised(build(tmp_path, aux_loss_alpha=1.0, age_field="age_history"))
            values.append(model.train()(batch(COUNTS, **layout))["losses"]["next item"])  # type: ignore[arg-type]
        assert torch.allclose(torch.stack(values), values[0], rtol=0, atol=1e-12)

    @pytest.mark.parametrize("counts", [[0], [0, 0], [1, 1, 0], [2]])
    def test_batches_with_few_pairs_or_none(self, counts: list[int], tmp_path: Path) -> None:
        model = build(tmp_path, aux_loss_alpha=1.0).train()
        model._max_gradient_norm = 10.0
        assert model.train_step(batch(counts)).isfinite()
        assert all(parameter.isfinite().all() for parameter in model.parameters())

    def test_evaluation_and_weight_zero_have_none(self, tmp_path: Path) -> None:
        assert "losses" not in build(tmp_path, aux_loss_alpha=1.0).eval()(batch(COUNTS))
        model = build(tmp_path).train()
        assert not model(batch(COUNTS))["losses"]
        assert not any(name.startswith("aux_net") for name, _ in model.named_parameters())

    def test_an_encoding_that_widens_the_items(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """States are wider then; what comes next is still an item, without its position."""

        class Beside(PositionEncoding):
            def __init__(self, dim: int, max_len: int, num_heads: int = 1) -> None:
                super().__init__(dim, max_len, num_heads)
                self.out_dim = dim + 3

            def embed(self, target: Target, history: Tensor, positions: Positions) -> tuple[Target, Tensor]:
                assert target is not None
                place = positions.like(history, positions.distance).unsqueeze(-1).expand(-1, 3)
                return nn.functional.pad(target, (0, 3)), torch.cat([history, place.to(history.dtype)], -1)

        monkeypatch.setattr(DIEN, "native", Beside)
        model = build(tmp_path, aux_loss_alpha=1.0, position_encoding="native").train()
        model._max_gradient_norm = 10.0
        assert model.extractors[0].input_size == model.extractors[0].hidden_size == 8 + 3
        assert model.aux_net[0].mlp[0].in_features == 11 + 8
        assert model.train_step(batch(COUNTS)).isfinite()


class TestKeys:
    def test_sum_pooling_adds_the_plain_history_and_its_product_with_the_target(self, tmp_path: Path) -> None:
        model = randomised(build(tmp_path, enable_sum_pooling=True, position_encoding="naive")).eval()
        rows, seen = batch(COUNTS, left=True), []
        model.dnn.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        model(rows)
        target, _, total, product = seen[0].split(8, 1)
        for row in range(len(COUNTS)):
            assert torch.allclose(total[row], items_of(model, rows, "history", row).sum(0))
        assert torch.equal(product, target * total)

    @pytest.mark.parametrize("attention", ["dot", "bilinear", "din"])
    def test_attention_has_two_names(self, attention: str, tmp_path: Path) -> None:
        short, long = (build(tmp_path, attention_type=name) for name in (attention, f"{attention}_attention"))
        assert torch.equal(short.eval()(batch(COUNTS))["y_pred"], long.eval()(batch(COUNTS))["y_pred"])

    def test_two_groups(self, tmp_path: Path) -> None:
        model = build(
            tmp_path,
            {"item_clicks": OTHERS["item_other"]},
            target_field=[["item_id", "cate_id"], ["item_id"]],
            sequence_field=[["item_history", "cate_history"], ["item_clicks"]],
            age_field=["age_history", None],
            position_encoding=["cape", "none"],
            aux_loss_alpha=1.0,
        )
        rows = batch(COUNTS) | {"item_clicks": torch.tensor([[0, 0], [3, 4], [5, 0], [0, 0], [0, 6]])}
        before = randomised(model).train()(rows)
        changed = model(rows | {"item_clicks": rows["item_clicks"] * 2})
        moved = (changed["y_pred"] - before["y_pred"]).abs().squeeze(1) > 1e-9
        assert moved.tolist() == [False, True, True, False, True]
        assert [net.mlp[0].in_features for net in model.aux_net] == [16, 8]

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ({"gru_type": "AUGUR"}, "gru_type 'AUGUR' is unknown: did you mean 'AUGRU'"),
            (
                {"attention_type": "din_atention"},
                "attention_type 'din_atention' is unknown: did you mean 'din_attention'",
            ),
            ({"aux_loss_alpah": 1.0}, "did you mean 'aux_loss_alpha'"),
        ],
    )
    def test_mistakes_are_one_line(self, params: dict[str, Any], message: str, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=message) as error:
            build(tmp_path, **params)
        assert "\n" not in str(error.value)
