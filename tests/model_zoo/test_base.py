"""What every backbone has from its base: field groups, and training that fails loudly where FuxiCTR goes wrong."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import PARAMS, SMALL, batch, feature_map
from models import build as build_model
from torch import Tensor, nn

from ctr_pe import Chain, build_pe
from ctr_pe.errors import UserError
from ctr_pe.model_zoo import DIN
from ctr_pe.pe.base import PositionEncoding
from ctr_pe.pe.vectors import Attended

build = partial(build_model, "DIN")


class Rows:
    """A data generator of a few fixed batches."""

    def __init__(self, *batches: dict[str, Tensor]) -> None:
        self.batches = batches or (batch([3, 0, 6, 1]), batch([2, 5, 4, 6], seed=1))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.batches)


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
            ({"sequence_field": [["item_history"]]}, "have dims"),
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
            ({"learning_rate": "fast"}, "learning_rate: 'fast' is not a number"),
            ({"embedding_regularizer": "l3(1)"}, "embedding_regularizer: 'l3"),
        ],
    )
    def test_mistakes_are_one_line(self, params: dict[str, Any], message: str, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=message) as error:
            build(tmp_path, **params)
        assert "\n" not in str(error.value)

    def test_text_of_a_feature_map_is_never_run(self, tmp_path: Path) -> None:
        trap = {"feature_encoder": f"open('{tmp_path}/trap', 'w')"}
        with pytest.raises(UserError, match="feature_encoder 'open"):
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

    def test_the_encoding_depends_on_the_seed(self, tmp_path: Path) -> None:
        tables = [build(tmp_path, position_encoding="naive", seed=seed).attentions[0].pe.table for seed in (1, 1, 2)]
        assert torch.equal(tables[0], tables[1])
        assert not torch.equal(tables[0], tables[2])


class TestTraining:
    def test_fit_keeps_the_best_epoch(self, tmp_path: Path) -> None:
        model, values = build(tmp_path), iter([0.6, 0.9, 0.7, 0.7])
        states = []

        def evaluate(*_: Any, **__: Any) -> dict[str, float]:
            states.append({key: value.clone() for key, value in model.state_dict().items()})
            return {"AUC": next(values)}

        model.evaluate = evaluate
        model.fit(Rows(), epochs=9, validation_data=Rows())
        assert len(states) == 4  # stopped after two epochs without improvement
        assert model.best_epoch == 2
        assert all(torch.equal(value, states[1][key]) for key, value in model.state_dict().items())

    def test_a_stale_checkpoint_is_never_loaded(self, tmp_path: Path) -> None:
        first = build(tmp_path)
        first.fit(Rows(), epochs=1, validation_data=Rows())
        second = build(tmp_path)
        with pytest.raises(UserError, match="eval_steps=1000, but training has 2 steps"):
            build(tmp_path, eval_steps=1000).fit(Rows(), epochs=1, validation_data=Rows())
        second.train_epoch = lambda generator: None  # as when evaluation is never reached
        with pytest.raises(FileNotFoundError):
            second.fit(Rows(), epochs=1, validation_data=Rows())

    def test_the_logged_loss_is_the_mean_since_the_last_evaluation(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        model, losses = build(tmp_path, eval_steps=3), []
        step = model.train_step

        def train_step(rows: dict[str, Tensor]) -> Tensor:
            losses.append(step(rows))
            return losses[-1]

        model.train_step = train_step
        with caplog.at_level(logging.INFO):
            model.fit(Rows(*(batch([3, 2, 5], seed=seed) for seed in range(4))), epochs=2, validation_data=Rows())
        logged = [float(line.split()[-1]) for line in caplog.messages if line.startswith("Train loss")]
        means = [torch.stack(losses[:3]).mean(), torch.stack(losses[4:6]).mean()]  # an epoch begins anew
        assert logged == pytest.approx([mean.item() for mean in means], abs=1e-6)

    def test_nan_monitor_is_an_error_at_first_and_no_improvement_later(self, tmp_path: Path) -> None:
        one_class = batch([3, 2])
        one_class["label"] = torch.ones(2)
        with pytest.raises(UserError, match=r"monitor \{'AUC': 1\} is NaN on the validation data: labels of one class"):
            build(tmp_path).fit(Rows(), epochs=1, validation_data=Rows(one_class))
        for mode, values in (("max", [0.6, math.nan, 0.5]), ("min", [0.6, math.nan, 0.7])):
            model, results = build(tmp_path, monitor_mode=mode), iter(values)
            model.evaluate = lambda *_, results=results, **__: {"AUC": next(results)}
            model.fit(Rows(), epochs=3, validation_data=Rows())
            assert model.best_epoch == 1

    def test_a_weighted_monitor_with_nan_is_no_improvement(self, tmp_path: Path) -> None:
        model = build(tmp_path, monitor={"logloss": -1, "AUC": 1})
        results = iter([{"AUC": 0.6, "logloss": 0.5}, {"AUC": math.nan, "logloss": 0.1}, {"AUC": 0.5, "logloss": 0.5}])
        model.evaluate = lambda *_, **__: next(results)
        model.fit(Rows(), epochs=3, validation_data=Rows())
        assert model.best_epoch == 1

    def test_a_missing_monitor_metric_is_an_error(self, tmp_path: Path) -> None:
        model = build(tmp_path, monitor={"AUCC": 1})
        model._best_metric = -math.inf
        with pytest.raises(UserError, match="monitor 'AUCC' is not among the metrics: did you mean 'AUC'"):
            model.checkpoint_and_earlystop({"AUC": 0.5})

    def test_no_validation_data(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="fit needs validation_data"):
            build(tmp_path).fit(Rows(), epochs=1)

    def test_scores_that_are_not_finite_give_nan_metrics(self, tmp_path: Path) -> None:
        model = build(tmp_path)
        nn.init.constant_(model.dnn.mlp[0].weight, math.nan)
        assert all(math.isnan(value) for value in model.evaluate(Rows()).values())

    def test_the_checkpoint_is_written_whole_or_not_at_all(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, file = build(tmp_path), tmp_path / "weights"
        model.save_weights(str(file))
        before = file.read_bytes()

        def broken(state: Any, path: str) -> None:
            Path(path).write_bytes(b"half")
            raise OSError("disk full")

        monkeypatch.setattr(torch, "save", broken)
        with pytest.raises(OSError, match="disk full"):
            model.save_weights(str(file))
        assert file.read_bytes() == before

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

    def test_auxiliary_losses_are_logged_apart(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        model = build(tmp_path)
        model.attentions[0].pe = Small(model.attentions[0].pe.dim, 6)
        with caplog.at_level(logging.INFO):
            model.fit(Rows(), epochs=2, validation_data=Rows())
        lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Auxiliary")]
        assert lines == ["Auxiliary losses, part of the train loss, mean over its batches: smallness 2.000000"] * 2
        assert model.auxiliary == {"smallness": 2.0}

    @pytest.mark.parametrize("tower", [{"batch_norm": True}, {"dnn_activations": "Dice"}])
    def test_a_batch_of_one_row_trains_with_running_statistics(self, tower: dict[str, Any], tmp_path: Path) -> None:
        model = build(tmp_path, **tower).train()
        model._max_gradient_norm = 10.0
        before = {key: value.clone() for key, value in model.named_buffers() if key.startswith("dnn")}
        assert model.train_step(batch([3])).isfinite()
        assert all(torch.equal(value, before[key]) for key, value in model.named_buffers() if key in before)
        assert model.dnn.training
        model.train_step(batch([3, 2]))
        assert any(not torch.equal(value, before[key]) for key, value in model.named_buffers() if key in before)

    def test_outputs_come_in_the_order_of_the_data(self, tmp_path: Path) -> None:
        model, rows = build(tmp_path), Rows()
        labels, scores, groups = model.outputs(rows)
        assert labels.tolist() == [0, 1, 0, 1] * 2
        assert groups is not None
        assert groups.tolist() == [0, 0, 0, 1] * 2
        assert torch.allclose(torch.from_numpy(scores[4:]).float(), model(rows.batches[1])["y_pred"].view(-1))
        with pytest.raises(UserError, match="no rows"):
            model.outputs([])


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
        with pytest.raises(UserError, match=f"{key}: .* is not a positive whole number"):
            build(tmp_path, **{key: value})


@pytest.mark.parametrize("encoding", ["time_bias", "time_rope", "cape_time", "time_bias+cape"])
def test_encodings_of_time_are_refused_without_times(encoding: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"'{re.escape(encoding)}' needs event times"):
        build(tmp_path, position_encoding=encoding, age_field=None)
    build(tmp_path, position_encoding=encoding)
