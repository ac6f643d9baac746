"""What every backbone shares on FuxiCTR: field groups, positions, the tower, and guarded training.

B batch, L history slots, N real items of the batch, D item dim (the fields of an item, concatenated).
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from fuxictr.pytorch import layers
from fuxictr.pytorch.models import BaseModel
from fuxictr.pytorch.torch_utils import get_loss, get_optimizer
from torch import Tensor, nn
from tqdm import tqdm

from ctr_pe.errors import UserError, nearest
from ctr_pe.evaluation import evaluate
from ctr_pe.model_zoo.fields import Group, field_dim, field_groups, take_encoders
from ctr_pe.model_zoo.keys import check_keys, count, number, regularizer
from ctr_pe.model_zoo.lazy import LazyTables
from ctr_pe.model_zoo.tables import clip, look_up, regularization
from ctr_pe.pe import build_pe, pe_options
from ctr_pe.pe.base import PositionEncoding
from ctr_pe.positions import Items, Positions
from ctr_pe.units.activations import Dice
from ctr_pe.units.dropout import Dropout


class RankModel(BaseModel):  # type: ignore[misc]
    """A FuxiCTR model that scores a target item against one or several histories.

    A subclass builds its units (``build_encoding`` gives each its encoding), calls ``build_tower`` last, and defines
    ``interest``. Field groups are lists of lists, one inner list per history: ``target_field: [[item_id, cate_id]]``,
    ``sequence_field: [[item_history, cate_history]]``; FuxiCTR's keys ``<model>_target_field`` and
    ``<model>_sequence_field`` mean the same. A field may be an id, a category or a pretrained vector with projection.

    Args:
        feature_map: FuxiCTR's. Histories are right- or left-padded ids with padding 0.
        target_field, sequence_field: the field groups.
        neg_seq_field: as sequence_field, items that were not chosen, slot by slot of the histories: for the auxiliary
            loss of DIEN and DMIN. Other models leave these fields out.
        age_field: per group, the column with seconds from event to request, or None.
        position_encoding: a name that ``build_pe`` takes, or ``native`` for the backbone's own; or one per group. The
            options of encodings are ordinary keys.
        max_len: items kept of a history, the most recent ones; None for all that the data have.
        max_position: positions from here on share one row of an encoding's table; None for max_len.
        embedding_dim: of every field that sets none of its own.
        dnn_hidden_units, dnn_activations, net_dropout, batch_norm: the tower; ``bn_only_once`` norms its input alone.
        amp: mixed precision: attention in bfloat16, positions, weights and the tower in float32.
        embedding_regularizer, net_regularizer: L2 weight, or FuxiCTR's ``l1(x)``, ``l2(x)``, ``l1_l2(x,y)``.
        table_optimizer: ``lazy_adam`` or ``rowwise_adagrad`` updates and regularises only the rows of embedding tables
            that a batch has, see :mod:`ctr_pe.model_zoo.lazy`; None, as all other parameters.

    Raises:
        UserError: an unknown key, a field that the feature map lacks, groups that do not match, a bad value.
    """

    native: ClassVar[str | type[PositionEncoding]] = "none"
    """What ``position_encoding: native`` means: the position code that the backbone's own paper has."""

    def __init__(
        self,
        feature_map: Any,
        model_id: str = "RankModel",
        target_field: Any = None,
        sequence_field: Any = None,
        neg_seq_field: Any = None,
        age_field: str | Sequence[str | None] | None = None,
        position_encoding: str | Sequence[str] = "none",
        max_len: int | None = None,
        max_position: int | None = None,
        embedding_dim: int = 64,
        learning_rate: float = 1e-3,
        dnn_hidden_units: Sequence[int] = (512, 128, 64),
        dnn_activations: str = "ReLU",
        net_dropout: float = 0.0,
        batch_norm: bool = False,
        bn_only_once: bool = False,
        amp: bool = False,
        embedding_regularizer: float | str | None = None,
        net_regularizer: float | str | None = None,
        table_optimizer: str | None = None,
        **kwargs: Any,
    ) -> None:
        prefix = type(self).__name__.lower()
        target_field = kwargs.pop(f"{prefix}_target_field", target_field)
        sequence_field = kwargs.pop(f"{prefix}_sequence_field", sequence_field)
        neg_seq_field = kwargs.pop(f"{prefix}_neg_seq_field", neg_seq_field)
        check_keys(type(self), kwargs)
        options = {key: kwargs.pop(key) for key in pe_options() if key in kwargs}
        feature_map, encoders = take_encoders(feature_map)
        kwargs = {
            "verbose": 0,
            "model_root": "./checkpoints",
            "metrics": ["gAUC", "AUC", "logloss"] if feature_map.group_id else ["AUC", "logloss"],
            "optimizer": "adam",
            "loss": "binary_crossentropy",
        } | kwargs
        super().__init__(
            feature_map,
            model_id=model_id,
            embedding_regularizer=regularizer("embedding_regularizer", embedding_regularizer),
            net_regularizer=regularizer("net_regularizer", net_regularizer),
            **kwargs,
        )
        self._encodings = 0
        self._table_optimizer = table_optimizer
        self._auxiliary: dict[str, list[Tensor]] = {}
        self.auxiliary: dict[str, float] = {}  # by name, mean over the batches before the last evaluation
        self.amp = amp
        self.native_options: dict[str, Any] = {}  # keyword arguments of ``native``, where it is a class
        self.embedding_dim = embedding_dim
        self.encoding_options = options
        self.max_len = count("max_len", max_len)
        self.max_position = count("max_position", max_position)
        self.groups = field_groups(
            feature_map, embedding_dim, target_field, sequence_field, neg_seq_field, age_field, position_encoding
        )
        if self.max_len is not None:
            self.groups = [replace(group, max_len=min(group.max_len, self.max_len)) for group in self.groups]
        self.embedding_layer = layers.FeatureEmbeddingDict(feature_map, embedding_dim)
        for field, encoder in encoders.items():
            self.embedding_layer.feature_encoders[field] = encoder
        histories = {field for group in self.groups for field in group.history}
        self._unread = {field for group in self.groups for field in group.negative} - histories
        histories |= self._unread
        for field in histories & encoders.keys():
            if not isinstance(encoders[field], nn.Linear):
                raise UserError(f"feature_map: history field '{field}' is pooled: set its feature_encoder to null")
        self.other_fields = [
            name for name, spec in feature_map.features.items() if spec["type"] != "meta" and name not in histories
        ]
        for name in self.other_fields:
            if feature_map.features[name]["type"] == "sequence" and name not in encoders:
                raise UserError(
                    f"feature_map: sequence '{name}' is in no sequence_field and has no pooling feature_encoder "
                    "(layers.MaskedAveragePooling())"
                )
        self._tower = {
            "hidden_units": list(dnn_hidden_units),
            "hidden_activations": dnn_activations,
            "dropout_rates": net_dropout,
            "batch_norm": batch_norm,
            "bn_only_once": bn_only_once,
        }
        self._compile = (kwargs["optimizer"], kwargs["loss"], number("learning_rate", learning_rate))

    def build_encoding(
        self,
        group: Group,
        dim: int,
        num_heads: int = 1,
        extra_slots: int = 0,
        below: PositionEncoding | None = None,
        native: type[PositionEncoding] | None = None,
    ) -> PositionEncoding:
        """The group's encoding for a unit of item dim ``dim``.

        ``extra_slots``: 1 if the target joins the sequence. ``below``: the encoding of the lowest layer, for those
        stacked on it. ``native``: what ``position_encoding: native`` means here, if not the same as in other units.

        Raises:
            UserError: heads that do not divide the item, or an encoding that cannot be built.
        """
        name, own = type(self).__name__, native or self.native
        slots = min(group.max_len, self.max_position or group.max_len) + extra_slots
        if isinstance(own, str):
            encoding = "+".join(own if link == "native" else link for link in group.encoding.split("+"))
        elif "native" in group.encoding.split("+") and group.encoding != "native":
            raise UserError(f"{name}: '{group.encoding}': native widens the items here and stands alone")
        else:
            encoding = group.encoding

        def fresh() -> PositionEncoding:
            if encoding == "native" and not isinstance(own, str):
                return own(dim, slots, num_heads, **self.native_options)
            _check_heads(name, group, dim, num_heads)
            fields = {"field_dims": group.dims, "field_sizes": group.sizes}
            return build_pe(encoding, dim, slots, num_heads, **fields, **self.encoding_options)

        self._encodings += 1
        with _own_randomness(self._encodings):
            pe = fresh() if below is None else below.next_layer(fresh)
        _check_heads(name, group, pe.out_dim, num_heads)
        if pe.about.needs_age and group.age is None:
            raise UserError(f"position encoding '{group.encoding}' needs event times: the data have none (age_field)")
        return pe

    def build_stack(self, group: Group, layers: Any, num_heads: int = 1) -> list[PositionEncoding]:
        """The group's encodings for ``layers`` self-attentions over [history; target], one above the other.

        Raises:
            UserError: layers is no positive number, or what ``build_encoding`` raises.
        """
        if not isinstance(layers, int) or layers < 1:
            raise UserError(f"{type(self).__name__}: a transformer has one layer or more, got {layers!r}")
        first = self.build_encoding(group, group.dim, num_heads, extra_slots=1)
        above = [self.build_encoding(group, group.dim, num_heads, 1, below=first) for _ in range(layers - 1)]
        return [first, *above]

    def build_tower(self, interest_dims: Iterable[int]) -> None:
        """The MLP over all other fields and the interests; then optimiser, initial weights and device."""
        specs = self.feature_map.features
        width = sum(field_dim(specs[name], self.embedding_dim) for name in self.other_fields)
        self.dnn = layers.MLP_Block(
            input_dim=width + sum(interest_dims),
            output_dim=1,
            output_activation=self.output_activation,
            **dice_layers(self._tower),
        )
        for index, layer in enumerate(self.dnn.mlp):
            if type(layer) is nn.Dropout:
                self.dnn.mlp[index] = Dropout(layer.p)
        self.compile(*self._compile)
        self.reset_parameters()
        self.model_to_device()

    def compile(self, optimizer: Any, loss: Any, lr: float) -> None:
        lazy = []
        if self._table_optimizer is not None:
            layers_of_fields = dict.fromkeys(self.embedding_layer.embedding_layers.values())
            lazy = [layer for layer in layers_of_fields if type(layer) is nn.Embedding and layer.weight.requires_grad]
        weights = {table.weight for table in lazy}
        self.loss_fn = get_loss(loss)
        self.optimizer = get_optimizer(optimizer, [p for p in self.parameters() if p not in weights], lr)
        for group in self.optimizer.param_groups:  # the same update in one pass, a third of the time or less
            if "fused" in group:
                group["fused"] = True
        if lazy:
            self.optimizer = LazyTables(self._table_optimizer, lazy, self.optimizer, lr, self._embedding_regularizer)

    def train_epoch(self, data_generator: Iterable[Mapping[str, Tensor]]) -> None:
        """FuxiCTR's, but the loss stays on its device until it is logged: to ask for it after every step makes a GPU
        wait. Logged is the mean over the steps since the last evaluation of this epoch."""
        self.train()
        loss, steps = torch.zeros((), dtype=torch.float64, device=self.device), 0
        batches = tqdm(data_generator, file=sys.stdout) if self._verbose else data_generator
        for self._batch_index, batch in enumerate(batches):
            loss += self.train_step(batch).detach()
            steps += 1
            self._total_steps += 1
            if self._total_steps % self._eval_steps == 0:
                logging.info(f"Train loss: {float(loss) / steps:.6f}")
                steps = 0
                loss.zero_()
                self.eval_step()
            if self._stop_training:
                break

    def train_step(self, batch_data: Mapping[str, Tensor]) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.compute_loss(self.forward(batch_data), self.get_labels(batch_data))
        loss.backward()
        clips = self.optimizer.clip if isinstance(self.optimizer, LazyTables) else clip
        clips(self.parameters(), self._max_gradient_norm)
        self.optimizer.step()
        return loss

    def compute_loss(self, return_dict: Mapping[str, Any], y_true: Tensor) -> Tensor:
        return self.add_loss(return_dict, y_true) + self.regularization_loss(return_dict.get("penalties", {}))

    def regularization_loss(self, penalties: Mapping[Tensor, Tensor] = MappingProxyType({})) -> Tensor | float:
        """FuxiCTR's. ``penalties``: those of tables that are known from looking them up."""
        tables = list(self.embedding_layer.parameters())
        of_tables = set(tables)
        others = [parameter for parameter in self.parameters() if parameter not in of_tables]
        rest = [table for table in tables if table not in penalties]
        if isinstance(self.optimizer, LazyTables):  # which sees to those of its own
            rest = [table for table in rest if table not in set(self.optimizer.tables)]
        of_rest: Tensor | float = regularization(rest, self._embedding_regularizer)
        return sum(penalties.values(), of_rest) + regularization(others, self._net_regularizer)

    def interest(self, index: int, target: Tensor, history: Tensor, positions: Positions) -> Tensor:
        """Group ``index``: target (B, D), packed history (N, D) -> interest (B, any width)."""
        raise TypeError(f"{type(self).__name__} does not define interest()")

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """A batch of FuxiCTR's form -> {"y_pred": click probability (B, 1)}; in training also "penalties", the
        regularisation of embedding tables by their weights, and "losses", what else is to be minimised, by name."""
        ids = {field: values for field, values in self.get_inputs(inputs).items() if field not in self._unread}
        positions = []
        for group in self.groups:
            age = inputs[group.age].to(self.device) if group.age else None
            mask = ids[group.history[0]] != 0
            if self.max_len is not None and mask.shape[1] > self.max_len:
                # A stable sort moves padding to the front and keeps the order of the items: the last are the newest.
                newest = mask.byte().argsort(dim=1, stable=True)[:, -self.max_len :]
                mask, age = mask.gather(1, newest), None if age is None else age.gather(1, newest)
                ids |= {field: ids[field].gather(1, newest) for field in group.history}
            positions.append(Positions.from_mask(mask, age))
            for field in group.history:  # looked up packed: most slots of a batch are padding
                ids[field] = positions[-1].pack(ids[field])
        embedded, penalties = look_up(self.embedding_layer, ids, self._embedding_regularizer if self.training else None)
        features = [embedded[name] for name in self.other_fields]
        clicked = self.get_labels(inputs).view(-1) > 0 if self.training else None
        losses: dict[str, Tensor] = {}
        for index, group in enumerate(self.groups):
            target = torch.cat([embedded[field] for field in group.target], dim=-1)
            history = torch.cat([embedded[field] for field in group.history], dim=-1)
            read = None if clicked is None else clicked.new_ones(len(history))
            at = positions[index].carrying(
                Items(history, tuple(ids[field] for field in group.history), read),
                Items(target, tuple(ids[field] for field in group.target), clicked),
            )
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
                interest = self.interest(index, target, history, at)
            features.append(interest.to(target.dtype))
            for name, loss in at.losses.items():
                losses[name] = losses[name] + loss if name in losses else loss
        y_pred = self._tower_of(torch.cat(features, dim=-1))
        return {"y_pred": y_pred, "penalties": penalties, "losses": losses} if self.training else {"y_pred": y_pred}

    def _tower_of(self, features: Tensor) -> Tensor:
        alone = self.training and len(features) == 1
        if alone:  # one row has no variance: batch norm and Dice use their running statistics
            self.dnn.eval()
        y_pred: Tensor = self.dnn(features)
        self.dnn.train(self.training)
        return y_pred

    def add_loss(self, return_dict: Mapping[str, Any], y_true: Tensor) -> Tensor:
        loss: Tensor = super().add_loss(return_dict, y_true)
        for name, part in return_dict.get("losses", {}).items():
            loss = loss + part
            self._auxiliary.setdefault(name, []).append(part.detach())
        return loss

    # Training. FuxiCTR's own fit trusts its surroundings; these are the places where that goes wrong unnoticed.

    def fit(self, data_generator: Any, epochs: int = 1, validation_data: Any = None, **kwargs: Any) -> None:
        """Train, keep the epoch with the best monitor value on ``validation_data``, and end with its weights.

        Raises:
            UserError: no validation data, or evaluation that would never happen.
        """
        if validation_data is None:
            raise UserError("fit needs validation_data: without it no epoch can be chosen")
        steps = epochs * len(data_generator)
        if self._eval_steps is not None and self._eval_steps > steps:
            raise UserError(f"eval_steps={self._eval_steps}, but training has {steps} steps: none would be evaluated")
        os.makedirs(self.model_dir, exist_ok=True)
        Path(self.checkpoint).unlink(missing_ok=True)  # fit ends by loading this file: never that of an earlier run
        self.best_epoch = 0
        self._auxiliary.clear()
        super().fit(data_generator, epochs=epochs, validation_data=validation_data, **kwargs)

    def checkpoint_and_earlystop(self, logs: Mapping[str, float], min_delta: float = 1e-6) -> None:
        self.auxiliary = {name: float(torch.stack(parts).mean()) for name, parts in self._auxiliary.items()}
        self._auxiliary.clear()
        if self.auxiliary:
            parts = ", ".join(f"{name} {mean:.6f}" for name, mean in self.auxiliary.items())
            logging.info(f"Auxiliary losses, part of the train loss, mean over its batches: {parts}")
        for metric in self._monitor.get_metrics():
            if metric not in logs:
                raise UserError(f"monitor '{metric}' is not among the metrics: {nearest(metric, logs)}")
        first = not math.isfinite(self._best_metric)
        value = self._monitor.get_value(logs)
        if math.isnan(value):
            if first:
                raise UserError(
                    f"monitor {self._monitor.kv_pairs} is NaN on the validation data: labels of one class (in every "
                    "group, for gAUC), or scores that are not finite"
                )
            # FuxiCTR's comparisons take NaN for an improvement; a value that is worse than any is none.
            logging.warning("The monitor is NaN: no improvement.")
            worst = math.inf if self._monitor_mode == "min" else -math.inf
            metric, weight = next(iter(self._monitor.kv_pairs.items()))
            logs = dict.fromkeys(self._monitor.get_metrics(), 0.0) | {metric: worst / weight}
        before = self._best_metric
        super().checkpoint_and_earlystop(logs, min_delta)
        if self._best_metric != before:
            self.best_epoch = self._epoch_index + 1

    def save_weights(self, checkpoint: str) -> None:
        torch.save(self.state_dict(), checkpoint + ".partial")
        os.replace(checkpoint + ".partial", checkpoint)

    @torch.inference_mode()
    def outputs(
        self, data_generator: Iterable[Mapping[str, Tensor]]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Labels, scores (both float64) and group ids (or None) of all rows, in the order of the data."""
        self.eval()
        labels, scores, groups = [], [], []
        for batch in data_generator:
            scores.append(self.forward(batch)["y_pred"].view(-1).double().cpu().numpy())
            labels.append(self.get_labels(batch).view(-1).double().cpu().numpy())
            if self.feature_map.group_id is not None:
                groups.append(self.get_group_id(batch).view(-1).cpu().numpy())
        if not scores:
            raise UserError("no rows to evaluate")
        return np.concatenate(labels), np.concatenate(scores), np.concatenate(groups) if groups else None

    def evaluate(self, data_generator: Any, metrics: Sequence[str] | None = None) -> dict[str, float]:
        labels, scores, groups = self.outputs(data_generator)
        logs = self.evaluate_metrics(labels, scores, metrics or self.validation_metrics, groups)
        logging.info("[Metrics] " + " - ".join(f"{name}: {value:.6f}" for name, value in logs.items()))
        return logs

    def predict(self, data_generator: Any) -> np.ndarray:
        return self.outputs(data_generator)[1]

    def evaluate_metrics(
        self, y_true: np.ndarray, y_pred: np.ndarray, metrics: Sequence[str], group_id: np.ndarray | None = None
    ) -> dict[str, float]:
        if not np.isfinite(y_pred).all():
            return dict.fromkeys(metrics, math.nan)
        return evaluate(y_true, y_pred, group_id, tuple(metrics))


def _check_heads(model: str, group: Group, width: int, num_heads: Any) -> None:
    if not isinstance(num_heads, int) or num_heads < 1 or width % num_heads:
        choices = ", ".join(str(heads) for heads in range(1, min(width, 16) + 1) if width % heads == 0)
        raise UserError(
            f"{model}: num_heads={num_heads} does not divide {width}, the item dim of {list(group.target)}: "
            f"take one of {choices}"
        )


def dice_layers(tower: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of MLP_Block, with our Dice, one for each layer, where Dice is asked for by name."""
    if str(tower["hidden_activations"]).lower() != "dice":
        return dict(tower)
    return {**tower, "hidden_activations": [Dice(units) for units in tower["hidden_units"]]}


@contextmanager
def _own_randomness(index: int) -> Iterator[None]:
    """Encodings draw from streams of their own, so that all start from the same backbone weights at one seed."""
    devices = list(range(torch.cuda.devicecount())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(torch.initial_seed() ^ (0x9E3779B97F4A + index - 1))
        yield
