"""What every backbone has from its base: field groups, encodings, lengths of histories, and its loss."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ctr_pe import Chain, build_pe
from ctr_pe.model_zoo import DIN
from ctr_pe.pe.base import PositionEncoding
from ctr_pe.pe.vectors import Attended
from ctr_pe.utils.errors import UserError
from tests.support.models import PARAMS, SMALL, batch, feature_map
from tests.support.models import build as build_model

build = partial(build_model, "DIN")


class Small(PositionEncoding):
    """An encoding that is to be small, and is off by 2."""

    loss_names = ("smallness",)

    def losses(self, attended: Sequence[Attended]) -> dict[str, Tensor]:
        return {"smallness": sum(0.0 * one.logits.sum() for one in attended) + torch.tensor(2.0)}


class TestFieldGroups:
    def test_fuxictr_s_keys_mean_the_same(self, tmp_path: Path) -> None:
        ours = build(tmp_path)
        params = {
            key: value
            for key, value in (PARAMS | SMALL["DIN"]).items()
            if key not in ("target_field", "sequence_field")
        }
        torch.manual_seed(0)
        theirs = DIN(
            feature_map(tmp_path),
            din_target_field=[("item_id", "cate_id")],
            din_sequence_field=[("item_history", "cate_history")],
            model_root=str(tmp_path),
            **params,
        )
        rows = batch([3, 0, 6])
        assert torch.equal(ours.eval()(rows)["y_pred"], theirs.eval()(rows)["y_pred"])

    def test_two_groups_each_with_its_encoding(self, tmp_path: Path) -> None:
        """As KuaiVideo's positive and negative lists."""
        spec = {
            "source": "",
            "type": "sequence",
            "padding_idx": 0,
            "vocab_size": 40,
            "max_len": 9,
            "feature_encoder": None,
        }
        model = build(
            tmp_path,
            {"item_neg_history": spec | {"share_embedding": "item_id"}},
            target_field=[["item_id", "cate_id"], ["item_id"]],
            sequence_field=[["item_history", "cate_history"], ["item_neg_history"]],
            position_encoding=["cape", "naive"],
            age_field=["age_history", None],
        )
        assert [tuple(unit.pe.table.shape) for unit in model.attentions] == [(7, 16), (10, 4)]
        rows = batch([3, 0, 6])
        rows["item_neg_history"] = torch.tensor([[0, 0, 5], [1, 0, 0], [2, 3, 4]])
        before = model.eval()(rows)["y_pred"]
        nn.init.normal_(model.dnn.mlp[0].weight)
        nn.init.normal_(model.embedding_layer.embedding_layers["item_id"].weight)
        first = model(rows)["y_pred"]
        rows["item_neg_history"] = torch.tensor([[0, 0, 6], [1, 0, 0], [2, 3, 4]])
        second = model(rows)["y_pred"]
        assert before.shape == (3, 1)
        assert (first[0] - second[0]).abs() > 1e-6
        assert torch.allclose(first[1:], second[1:])

    @pytest.mark.parametrize("params", [{}, {"max_len": 2}])
    @pytest.mark.parametrize("second", [["item_history", "cate_history"], ["cate_history"]])
    def test_groups_may_share_a_history(self, second: list[str], params: dict[str, Any], tmp_path: Path) -> None:
        """Each group gets what it would get alone, though the second packs by another field's padding."""
        targets = [field.replace("history", "id") for field in second]
        groups = {
            "target_field": [["item_id", "cate_id"], targets],
            "sequence_field": [["item_history", "cate_history"], second],
            "age_field": ["age_history", None],
            "position_encoding": ["cape", "rope"],
        }
        rows = batch([3, 0, 6, 1])
        rows["cate_history"][2, 1] = 0  # the item is known, its category is not
        seen: list[list[Tensor]] = []
        for one in (slice(None), slice(0, 1), slice(1, 2)):
            given = {key: value[one] for key, value in groups.items()}
            pooled = (
                {"item_history": {"feature_encoder": "layers.MaskedSumPooling()"}}
                if one.start and len(second) == 1
                else {}
            )
            model, found = build(tmp_path, pooled, **given, **params), []
            for index, table in enumerate(model.embedding_layer.parameters()):
                nn.init.normal_(table, generator=torch.Generator().manual_seed(index))
            plain = model.interest

            def interest(index: int, *inputs: Any, plain: Any = plain, found: list[Any] = found) -> Any:
                target, history, positions = inputs
                looked_up = target.embedding, history.embedding, *history.ids
                found.append([*looked_up, positions.mask, positions.distance])
                return plain(index, *inputs)

            model.interest = interest
            model.train()(rows)["y_pred"].sum().backward()
            seen += found
        for together, alone in zip(seen[:2], seen[2:], strict=True):
            assert all(torch.equal(*pair) for pair in zip(together, alone, strict=True))

    def test_a_subclass_knows_its_base_class_s_keys(self, tmp_path: Path) -> None:
        class MyDIN(DIN):
            pass

        params = {key: value for key, value in PARAMS.items() if key not in ("target_field", "sequence_field")}
        fields = {"din_target_field": [["cate_id"]], "mydin_target_field": [["item_id", "cate_id"]]}
        histories = {"din_sequence_field": [["item_history", "cate_history"]]}
        model = MyDIN(feature_map(tmp_path), model_root=str(tmp_path), **fields, **histories, **params)
        assert model.groups[0].target == ("item_id", "cate_id")
        with pytest.raises(UserError, match="MyDIN: key 'bst_target_field' is unknown"):
            MyDIN(feature_map(tmp_path), model_root=str(tmp_path), bst_target_field=[["item_id"]], **params)

    def test_pretrained_vectors_are_projected(self, tmp_path: Path) -> None:
        """An item made of an id and a frozen vector of another width, as KuaiVideo's."""
        import numpy as np

        vectors = np.random.default_rng(0).normal(size=(38, 5)).astype(np.float32)
        np.savez(tmp_path / "visual.npz", key=np.arange(1, 39).astype(str), value=vectors)
        (tmp_path / "feature_vocab.json").write_text(
            '{"item_id": {}, "item_emb": {' + ", ".join(f'"{i}": {i}' for i in range(1, 39)) + "}}"
        )
        spec = {
            "source": "",
            "padding_idx": 0,
            "oov_idx": 39,
            "vocab_size": 40,
            "embedding_dim": 5,
            "emb_output_dim": 3,
            "feature_encoder": "nn.Linear(5, 3, bias=False)",
            "pretrained_emb": "visual.npz",
            "pretrain_dim": 5,
            "freeze_emb": True,
            "pretrain_usage": "init",
        }
        model = build(
            tmp_path,
            {
                "item_emb": spec | {"type": "categorical"},
                "item_emb_history": spec | {"type": "sequence", "max_len": 6, "share_embedding": "item_emb"},
                "cate_history": {"feature_encoder": "layers.MaskedAveragePooling()"},  # outside the groups: pooled
            },
            target_field=[["item_id", "item_emb"]],
            sequence_field=[["item_history", "item_emb_history"]],
            position_encoding="cape",
        )
        rows = batch([3, 0, 6])
        rows |= {"item_emb": rows["item_id"], "item_emb_history": rows["item_history"]}
        assert model.groups[0].dim == 7
        assert model.eval()(rows)["y_pred"].isfinite().all()
        table = model.embedding_layer.embedding_layers["item_emb"].pretrain_embedding.weight
        assert torch.allclose(table[1:39], torch.from_numpy(vectors))

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ({"target_field": ["item_id", "cate_id"]}, r"can mean two things: write \[\[item_id, cate_id\]\]"),
            ({"target_field": None}, "target_field is missing"),
            ({"target_field": [["item_id", "cat_id"]]}, "no field 'cat_id': did you mean 'cate_id'"),
            ({"sequence_field": [["item_history"]]}, "must pair up"),
            ({"sequence_field": [["item_history", "cate_id"]]}, "'cate_id' is of type categorical, not sequence"),
            ({"sequence_field": [["item_history"], ["cate_history"]]}, "target_field has 1 groups"),
            ({"position_encoding": ["cape", "none"]}, "position_encoding has 2 entries for 1 field groups"),
            ({"position_encoding": "cappe"}, "did you mean 'cape'"),
            (
                {"attention_hidden_unit": [3]},
                "key 'attention_hidden_unit' is unknown: did you mean 'attention_hidden_units'",
            ),
            ({"net_droput": 0.1}, "did you mean 'net_dropout'"),
            ({"streaming": True}, "key 'streaming' is unknown"),
            ({"learning_rate": "fast"}, "learning_rate must be a positive number, got 'fast'"),
            ({"embedding_regularizer": "l3(1)"}, "embedding_regularizer must be a weight of 0 or more, .*, got 'l3"),
        ],
    )
    def test_mistakes_are_one_line(self, params: dict[str, Any], message: str, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=message) as error:
            build(tmp_path, **params)
        assert "\n" not in str(error.value)

    def test_text_of_a_feature_map_is_never_run(self, tmp_path: Path) -> None:
        trap = {"feature_encoder": f"open('{tmp_path}/trap', 'w')"}
        with pytest.raises(UserError, match='feature_encoder "open'):
            build(tmp_path, {"cate_id": trap})
        assert not (tmp_path / "trap").exists()

    def test_a_pooled_history_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="'item_history' is pooled: set its feature_encoder to null"):
            build(tmp_path, {"item_history": {"feature_encoder": "layers.MaskedAveragePooling()"}})

    def test_a_sequence_outside_the_groups_is_pooled_or_refused(self, tmp_path: Path) -> None:
        tags = {"source": "", "type": "sequence", "padding_idx": 0, "vocab_size": 5, "max_len": 3}
        with pytest.raises(UserError, match="sequence 'tags' is in no sequence_field"):
            build(tmp_path, {"tags": tags | {"feature_encoder": None}})
        model = build(tmp_path, {"tags": tags | {"feature_encoder": "layers.MaskedAveragePooling()"}})
        rows = batch([3, 0, 6]) | {"tags": torch.tensor([[1, 2, 0], [3, 0, 0], [0, 0, 0]])}
        assert model.eval()(rows)["y_pred"].isfinite().all()


class TestEncodings:
    def test_encodings_of_one_model_draw_different_weights(self, tmp_path: Path) -> None:
        model = build(tmp_path, position_encoding="naive")
        above = model.build_encoding(model.groups[0], 8)
        assert not torch.equal(above.table, model.attentions[0].pe.table)

    def test_native_is_the_backbone_s_own_position_code(self, tmp_path: Path) -> None:
        """DIN has none."""
        native, none = (build(tmp_path, position_encoding=name).state_dict() for name in ("native", "none"))
        assert native.keys() == none.keys()

        class Ordered(DIN):
            native = "naive"

        torch.manual_seed(0)
        model = Ordered(feature_map(tmp_path), position_encoding="native+cape", model_root=str(tmp_path), **PARAMS)
        assert [type(link).__name__ for link in model.attentions[0].pe.encodings] == ["Naive", "CAPE"]

    def test_models_are_built_where_a_gpu_is_in_use(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        tables = [build(tmp_path, position_encoding="naive").attentions[0].pe.table for _ in range(2)]
        assert torch.equal(*tables)

    def test_the_encoding_depends_on_the_seed(self, tmp_path: Path) -> None:
        tables = [build(tmp_path, position_encoding="naive", seed=seed).attentions[0].pe.table for seed in (1, 1, 2)]
        assert torch.equal(tables[0], tables[1])
        assert not torch.equal(tables[0], tables[2])


class TestLoss:
    @pytest.mark.parametrize("value", [1, 1.0, "1", "l2(1)", "1e0"])
    def test_regularisers_count_whatever_their_type(self, value: Any, tmp_path: Path) -> None:
        model = build(tmp_path, embedding_regularizer=value)
        tables = set(model.embedding_layer.parameters())
        want = sum(float(table.detach().square().sum()) for table in tables) / 2
        assert model.regularization_loss().item() == pytest.approx(want, rel=1e-4)

    @pytest.mark.parametrize("value", [None, 0, 0.0])
    def test_no_regulariser(self, value: Any, tmp_path: Path) -> None:
        assert build(tmp_path, embedding_regularizer=value, net_regularizer=value).regularization_loss() == 0

    def test_learning_rate_as_text(self, tmp_path: Path) -> None:
        assert build(tmp_path, learning_rate="1e-3").optimizer.param_groups[0]["lr"] == 0.001

    @pytest.mark.parametrize("before", [[], ["rope", "cape"]])
    def test_auxiliary_losses_reach_the_training_loss_once(self, before: list[str], tmp_path: Path) -> None:
        model, rows = build(tmp_path), batch([3, 1])
        sizes = (model.attentions[0].pe.dim, 6)
        links = [*(build_pe(name, *sizes) for name in before), Small(*sizes)]
        model.attentions[0].pe = Chain(links) if before else links[0]
        output, labels = model(rows), model.get_labels(rows)
        assert output["losses"] == {"smallness": 2.0}
        plain = model.add_loss({"y_pred": output["y_pred"]}, labels)
        assert torch.allclose(model.add_loss(output, labels), plain + 2.0)
        assert model(rows)["losses"] == {"smallness": 2.0}  # of this batch alone

    @pytest.mark.parametrize("tower", [{"batch_norm": True}, {"dnn_activations": "Dice"}])
    def test_a_batch_of_one_row_trains_with_running_statistics(self, tower: dict[str, Any], tmp_path: Path) -> None:
        model = build(tmp_path, **tower).train()
        before = {key: value.clone() for key, value in model.named_buffers() if key.startswith("dnn")}
        assert model.train_step(batch([3])).isfinite()
        assert all(torch.equal(value, before[key]) for key, value in model.named_buffers() if key in before)
        assert model.dnn.training
        model.train_step(batch([3, 2]))
        assert any(not torch.equal(value, before[key]) for key, value in model.named_buffers() if key in before)


class TestContextLength:
    @pytest.mark.parametrize("left", [False, True])
    @pytest.mark.parametrize("encoding", ["none", "cape", "naive"])
    def test_max_len_keeps_the_most_recent_items(self, encoding: str, left: bool, tmp_path: Path) -> None:
        rows = batch([3, 0, 6, 1, 5], left=left)
        recent = {name: value.clone() for name, value in rows.items()}
        for name in ("item_history", "cate_history", "age_history"):
            distance = (rows["item_history"] != 0).flip(1).cumsum(1).flip(1)
            recent[name][distance > 2] = 0
        model = build(tmp_path, position_encoding=encoding, max_len=2, age_field="age_history").eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        assert torch.equal(model(rows)["y_pred"], model(recent)["y_pred"])
        model.max_len = None
        assert torch.allclose(model(recent)["y_pred"], model(rows | recent)["y_pred"])
        assert not torch.allclose(model(rows)["y_pred"], model(recent)["y_pred"])

    def test_tables_are_as_long_as_what_is_kept(self, tmp_path: Path) -> None:
        def rows(**params: Any) -> int:
            (unit,) = build(tmp_path, position_encoding="cape", **params).attentions
            return len(unit.pe.table)

        assert rows() == 7
        assert rows(max_len=4) == 5
        assert rows(max_len=100) == 7
        assert rows(max_position=3) == 4
        assert rows(max_len=4, max_position=5) == 5

    @pytest.mark.parametrize("key", ["max_len", "max_position"])
    @pytest.mark.parametrize("value", [0, -1, 2.0, "2", True])
    def test_neither_can_be_anything_else(self, key: str, value: Any, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=f"{key} must be a positive integer or None, got"):
            build(tmp_path, **{key: value})


@pytest.mark.parametrize(
    ("gpus", "gpu", "message"), [(0, 0, "gpu 0: there is no GPU here"), (2, 2, "gpu 2: there is none")]
)
def test_a_gpu_that_is_not_there_is_refused(
    gpus: int, gpu: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = torch.device("cuda") if gpus else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: there)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    with pytest.raises(UserError, match=message):
        build(tmp_path, gpu=gpu)


@pytest.mark.parametrize("encoding", ["time_bias", "time_rope", "cape_time", "time_bias+cape"])
def test_encodings_of_time_are_refused_without_times(encoding: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"'{re.escape(encoding)}' needs event times"):
        build(tmp_path, position_encoding=encoding, age_field=None)
    build(tmp_path, position_encoding=encoding)
