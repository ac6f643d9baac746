"""What every backbone shares on FuxiCTR: field groups, encodings, forward and loss. Training is :mod:`ctr_pe.training`.

B batch, L history slots, N real items of the batch, D item dim (the fields of an item, concatenated).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from fuxictr.pytorch import layers
from fuxictr.pytorch.models import BaseModel
from torch import Tensor, nn
from torch.optim import Optimizer

from ctr_pe.choices import check_choices, choose
from ctr_pe.errors import UserError
from ctr_pe.model_zoo.fields import SizedGroup, field_dim, sized_groups, take_encoders
from ctr_pe.model_zoo.keys import check_gpu, check_keys, count, number, prefixes, regularizer
from ctr_pe.model_zoo.tables import look_up, regularization
from ctr_pe.pe import build_pe, pe_options
from ctr_pe.pe.base import PositionEncoding
from ctr_pe.positions import Items, Positions
from ctr_pe.units.activations import Dice
from ctr_pe.units.dropout import Dropout

if TYPE_CHECKING:
    from ctr_pe.training import Fitted


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
        max_gradient_norm: of all gradients together, 10 if it is not given.
        amp: mixed precision: attention in bfloat16, positions, weights and the tower in float32.
        embedding_regularizer, net_regularizer: L2 weight, or FuxiCTR's ``l1(x)``, ``l2(x)``, ``l1_l2(x,y)``.
        table_optimizer: ``lazy_adam`` or ``rowwise_adagrad`` updates and regularises only the rows of embedding tables
            that a batch has, see :mod:`ctr_pe.training.lazy`; None, as all other parameters.

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
        for prefix in prefixes(type(self)):
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
        check_choices(kwargs)
        check_gpu(kwargs.get("gpu", -1))
        super().__init__(
            feature_map,
            model_id=model_id,
            embedding_regularizer=regularizer("embedding_regularizer", embedding_regularizer),
            net_regularizer=regularizer("net_regularizer", net_regularizer),
            **kwargs,
        )
        self._encodings = 0
        self._table_optimizer = table_optimizer
        self._max_gradient_norm = number("max_gradient_norm", kwargs.get("max_gradient_norm", 10.0))
        count("eval_steps", kwargs.get("eval_steps"))
        self.auxiliary_parts: dict[str, Tensor] = {}  # of the last loss, by name: what is not the task's own
        self.amp = amp
        self.native_options: dict[str, Any] = {}  # keyword arguments of ``native``, where it is a class
        self.embedding_dim = embedding_dim
        self.encoding_options = options
        self.max_len = count("max_len", max_len)
        self.max_position = count("max_position", max_position)
        self.groups = sized_groups(
            feature_map, embedding_dim, target_field, sequence_field, neg_seq_field, age_field, position_encoding
        )
        if self.max_len is not None:
            self.groups = [replace(group, max_len=min(group.max_len, self.max_len)) for group in self.groups]
        self.embedding_layer = layers.FeatureEmbeddingDict(feature_map, embedding_dim)
        for field, encoder in encoders.items():
            self.embedding_layer.feature_encoders[field] = encoder
        histories = {field for group in self.groups for field in group.history}
        self._chosen = [feature_map.features[group.history[0]].get("chosen", True) for group in self.groups]
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
        group: SizedGroup,
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

    def build_stack(self, group: SizedGroup, layers: Any, num_heads: int = 1) -> list[PositionEncoding]:
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

    def compute_loss(self, return_dict: Mapping[str, Any], y_true: Tensor) -> Tensor:
        return self.add_loss(return_dict, y_true) + self.regularization_loss(return_dict.get("penalties", {}))

    def regularization_loss(self, penalties: Mapping[Tensor, Tensor] = MappingProxyType({})) -> Tensor | float:
        """FuxiCTR's. ``penalties``: those of tables that are known from looking them up."""
        tables = list(self.embedding_layer.parameters())
        of_tables = set(tables)
        others = [parameter for parameter in self.parameters() if parameter not in of_tables]
        layers_of_fields = set(self.embedding_layer.embedding_layers.values())
        lazy = {layer.weight for layer in layers_of_fields if type(layer) is nn.Embedding and layer.sparse}
        rest = [table for table in tables if table not in penalties and table not in lazy]  # LazyTables sees to its own
        of_rest: Tensor | float = regularization(rest, self._embedding_regularizer)
        return sum(penalties.values(), of_rest) + regularization(others, self._net_regularizer)

    def interest(self, index: int, target: Tensor, history: Tensor, positions: Positions) -> Tensor:
        """Group ``index``: target (B, D), packed history (N, D) -> interest (B, any width)."""
        raise TypeError(f"{type(self).__name__} does not define interest()")

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """A batch of FuxiCTR's form -> {"y_pred": click probability (B, 1)}; in training also "penalties", the
        regularisation of embedding tables by their weights, and "losses", what else is to be minimised, by name."""
        ids = {field: values for field, values in self.get_inputs(inputs).items() if field not in self._unread}
        positions, histories = [], []
        for group in self.groups:
            age = inputs[group.age].to(self.device) if group.age else None
            own = {field: ids[field] for field in group.history}
            mask = own[group.history[0]] != 0
            if self.max_len is not None and mask.shape[1] > self.max_len:
                # A stable sort moves padding to the front and keeps the order of the items: the last are the newest.
                newest = mask.byte().argsort(dim=1, stable=True)[:, -self.max_len :]
                mask, age = mask.gather(1, newest), None if age is None else age.gather(1, newest)
                own = {field: values.gather(1, newest) for field, values in own.items()}
            positions.append(Positions.from_mask(mask, age))  # looked up packed: most slots of a batch are padding
            histories.append({field: positions[-1].pack(values) for field, values in own.items()})
        ids |= {
            field: torch.cat([own[field] for own in histories if field in own]) for own in histories for field in own
        }
        embedded, penalties = look_up(self.embedding_layer, ids, self._embedding_regularizer if self.training else None)
        features = [embedded[name] for name in self.other_fields]
        clicked = self.get_labels(inputs).view(-1) > 0 if self.training else None
        losses: dict[str, Tensor] = {}
        of_groups = {
            field: iter(torch.split(embedded[field], [len(own[field]) for own in histories if field in own]))
            for field in {field for own in histories for field in own}
        }
        for index, group in enumerate(self.groups):
            target = torch.cat([embedded[field] for field in group.target], dim=-1)
            history = torch.cat([next(of_groups[field]) for field in group.history], dim=-1)
            chosen = None if clicked is None else clicked.new_full((len(history),), self._chosen[index])
            at = positions[index].carrying(
                Items(history, tuple(histories[index][field] for field in group.history), chosen),
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
        self.auxiliary_parts = {name: part.detach() for name, part in return_dict.get("losses", {}).items()}
        for part in return_dict.get("losses", {}).values():
            loss = loss + part
        return loss

    # FuxiCTR's names for training, which is ctr_pe.training: imported when used, because it stands above the models.

    def compile(self, optimizer: Any, loss: Any, lr: float) -> None:
        from ctr_pe.training import loss_function

        self.loss_fn = loss_function(loss)
        self._update = (choose("optimizer", optimizer), lr, choose("table_optimizer", self._table_optimizer))
        self.__dict__.pop("optimizer", None)
        if self._table_optimizer is not None:  # makes the tables' gradients sparse, which the loss has to know
            _ = self.optimizer

    @cached_property
    def optimizer(self) -> Optimizer:
        """Made at the first training step: torch takes a second to import what it needs, and scoring needs none."""
        from ctr_pe.training import make_optimizer

        return make_optimizer(self, *self._update)

    def fit(
        self,
        data_generator: Any,
        epochs: int = 1,
        validation_data: Any = None,
        max_gradient_norm: float | None = None,
        **params: Any,
    ) -> Fitted:
        """Train, and end with the weights of the best epoch: :func:`ctr_pe.training.fit`.

        ``params``: FuxiCTR hands over all parameters of an experiment; the model has them already.
        """
        from ctr_pe.training import fit

        check_keys(type(self), params)
        return fit(self, data_generator, validation_data, epochs, max_gradient_norm)

    def train_step(self, batch_data: Mapping[str, Tensor]) -> Tensor:
        from ctr_pe.training import train_step

        return train_step(self, batch_data, self._max_gradient_norm)

    def evaluate(self, data_generator: Any, metrics: Iterable[str] | None = None) -> dict[str, float]:
        from ctr_pe.training import score

        found = score(self, data_generator).metrics(tuple(metrics or self.validation_metrics))
        logging.info("[Metrics] " + " - ".join(f"{name}: {value:.6f}" for name, value in found.items()))
        return found

    def predict(self, data_generator: Any) -> npt.NDArray[np.float64]:
        from ctr_pe.training import score

        return score(self, data_generator).scores


def _check_heads(model: str, group: SizedGroup, width: int, num_heads: Any) -> None:
    if not isinstance(num_heads, int) or num_heads < 1 or width % num_heads:
        choices = ", ".join(str(heads) for heads in range(1, min(width, 16) + 1) if width % heads == 0)
        raise UserError(
            f"{model}: num_heads={num_heads} does not divide {width}, the item dim of {list(group.target)}: "
            f"take one of {choices}"
        )


def dice_layers(tower: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of MLP_Block, with our Dice, one for each layer, where Dice is asked for by name."""
    activation = choose("activation", tower["hidden_activations"])
    if activation != "Dice":
        return {**tower, "hidden_activations": activation}
    return {**tower, "hidden_activations": [Dice(units) for units in tower["hidden_units"]]}


@contextmanager
def _own_randomness(index: int) -> Iterator[None]:
    """Encodings draw from streams of their own, so that all start from the same backbone weights at one seed."""
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if in_use else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(torch.initial_seed() ^ (0x9E3779B97F4A + index - 1))
        yield
