"""FuxiCTR's ``BaseModel`` with the training, layers, losses and weight files of this package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from fuxictr.pytorch import layers
from fuxictr.pytorch.models import BaseModel
from fuxictr.pytorch.torch_utils import get_loss, get_regularizer
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from ctr_pe.config.schema import (
    Activation,
    ClassWeight,
    Loss,
    OptimizerName,
    PositiveText,
    Regularizer,
    Schedule,
    TableOptimizer,
    Validated,
    Width,
    regularizer,
    valid,
)
from ctr_pe.evaluation.metrics import monitor_mode
from ctr_pe.fuxictr.embeddings import ByField, look_up, regularization
from ctr_pe.fuxictr.library import MAX_GRADIENT_NORM, take_encoders
from ctr_pe.sequence.transfer import to_device
from ctr_pe.units.activations import Dice
from ctr_pe.units.batch_norm import BatchNorm1d
from ctr_pe.units.dropout import Dropout
from ctr_pe.utils import distributed
from ctr_pe.utils.devices import check_gpu
from ctr_pe.utils.errors import UserError, option
from ctr_pe.utils.names import check_name

if TYPE_CHECKING:
    from ctr_pe.training import Fitted, Gradients


class FuxiCTRModel(Validated, BaseModel):  # type: ignore[misc]
    """FuxiCTR's ``BaseModel``, whose methods train, evaluate and save as :mod:`ctr_pe.training` does.

    A subclass builds its layers, calls :meth:`finish` last, and defines ``forward``: a batch -> ``{"y_pred": click
    probability (B, 1)}``; in training also "penalties", the regularisation of embedding tables by their weights, and
    "losses", what else is to be minimised, by name.

    Args:
        feature_map: FuxiCTR's.
        embedding_dim: of every field that sets none of its own.
        embedding_init: standard deviation of the embedding tables at the start.
        linear_init: of the weights of the backbone's linear layers at the start; None for Xavier's, as in FuxiCTR.
        embedding_regularizer, net_regularizer: L2 weight, or FuxiCTR's ``l1(x)``, ``l2(x)``, ``l1_l2(x,y)``.
        table_optimizer: ``lazy_adam`` or ``rowwise_adagrad`` updates and regularises only the rows of embedding tables
            that a batch reads, see :mod:`ctr_pe.training.table_optimizers`; None updates tables like all other
            parameters.
        learning_rate_schedule: ``constant``, or ``linear`` or ``cosine``: it falls to zero over all epochs.
        weight_average: evaluate and keep a moving average of the weights over about this share of the training.
        max_gradient_norm: of all gradients together.
        class_weight: of the rows of each label in the loss, ``{0: 1, 1: 5}``, or ``balanced``: of each label inversely
            as often as it is among the rows that are trained on. A row's own weight, which data may have, is multiplied
            by it. Losses by name, of ``forward``, are not weighted.
        weighted_metrics: metrics, too, weight rows by their own weight.
        kwargs: FuxiCTR's own, such as ``monitor`` and ``early_stop_patience``; other keys of a config are ignored.

    Raises:
        UserError: a bad value, or a device that is not there.
    """

    def __init__(
        self,
        feature_map: Any,
        model_id: str = "FuxiCTRModel",
        embedding_dim: Width = 64,
        embedding_init: PositiveText = 1e-4,
        linear_init: PositiveText | None = None,
        learning_rate: PositiveText = 1e-3,
        optimizer: OptimizerName = "adam",
        loss: Loss = "binary_crossentropy",
        embedding_regularizer: Regularizer = None,
        net_regularizer: Regularizer = None,
        table_optimizer: TableOptimizer | None = None,
        learning_rate_schedule: Schedule = "constant",
        weight_average: PositiveText | None = None,
        max_gradient_norm: PositiveText = MAX_GRADIENT_NORM,
        class_weight: ClassWeight | None = None,
        weighted_metrics: bool = False,
        **kwargs: Any,
    ) -> None:
        for key, name in {"model_id": model_id, "dataset_id": feature_map.dataset_id}.items():
            check_name(key, name)  # the checkpoint's file
        feature_map, encoders = take_encoders(feature_map, embedding_dim)
        metrics = ["gAUC", "AUC", "logloss"] if feature_map.group_id else ["AUC", "logloss"]
        defaults: dict[str, Any] = {"verbose": 0, "model_root": "./checkpoints", "metrics": metrics}
        kwargs = defaults | kwargs
        kwargs["monitor_mode"] = monitor_mode(kwargs.get("monitor", "AUC"), kwargs.get("monitor_mode"))
        regularizers = {"embedding_regularizer": embedding_regularizer, "net_regularizer": net_regularizer}
        kwargs |= {key: regularizer(value) for key, value in regularizers.items()}
        device = check_gpu(kwargs.get("gpu", -1))
        super().__init__(feature_map, model_id=model_id, **kwargs)
        self.device = device  # FuxiCTR knows CUDA alone
        self.checkpoint = str(Path(self.model_dir, f"{model_id}.safetensors").absolute())  # FuxiCTR's is a pickle
        self._max_gradient_norm = float(max_gradient_norm)
        self.auxiliary_parts: dict[str, Tensor] = {}  # of the last loss, by name: what is not the task's own
        self.penalty: Tensor | float = 0.0  # of the last loss: the regularisation in it
        self.gradients: Gradients | None = None  # of the last training step
        self.step_graphs: Any = None  # ctr_pe.training.step_graphs, while it trains on a GPU
        self.embedding_dim = embedding_dim
        self.linear_init = None if linear_init is None else float(linear_init)
        with patch.object(nn, "ModuleDict", ByField):
            self.embedding_layer = layers.FeatureEmbeddingDict(
                feature_map, embedding_dim, partial(nn.init.normal_, std=float(embedding_init))
            )
        for layer in self.embedding_layer.embedding_layers.values():
            if isinstance(layer, layers.PretrainedEmbedding) and layer.pretrain_usage == "init":
                layer.oov_idx = layer.pretrain_embedding.num_embeddings  # FuxiCTR's own zeroes ids that came later
        self.encoders = encoders  # by field
        self.embedding_layer.feature_encoders.update(encoders)
        self.table_optimizer = table_optimizer
        self.learning_rate_schedule = learning_rate_schedule
        self.weight_average = None if weight_average is None else float(weight_average)
        self.weight_field = next((name for name, spec in feature_map.features.items() if spec.get("weight")), None)
        self.class_weight, self.weighted_metrics = class_weight, weighted_metrics
        given = valid("class_weight", ClassWeight | None, class_weight)
        self.of_class = {label: float(of) for label, of in given.items()} if isinstance(given, dict) else {}
        if weighted_metrics and self.weight_field is None:
            raise UserError(f"weighted_metrics: data set '{feature_map.dataset_id}' has no weights: {option('weight')}")
        self._compile = (optimizer, loss, float(learning_rate))

    def finish(self) -> None:
        """After all layers are built: loss and optimiser, initial weights, device."""
        for block in [block for block in self.modules() if isinstance(block, layers.MLP_Block)]:
            for index, layer in enumerate(block.mlp):
                if type(layer) is nn.BatchNorm1d:
                    block.mlp[index] = BatchNorm1d(layer.num_features)
        self.compile(*self._compile)
        self.reset_parameters()
        if self.linear_init is not None:
            for layer in self.modules():
                if type(layer) is nn.Linear:  # as FuxiCTR: an encoding's own have another class
                    nn.init.normal_(layer.weight, std=self.linear_init)
        self.model_to_device()

    def look_up(self, ids: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[Tensor, Tensor]]:
        """The embeddings of the ids, and in training the regularisation of their tables, by the tables' weights."""
        return look_up(self.embedding_layer, ids, self._embedding_regularizer if self.training else None)

    def regularizer_terms(self) -> list[tuple[int, float]]:
        """(p, λ) of each term λ / p Σ |x|^p of ``embedding_regularizer``."""
        terms: list[tuple[int, float]] = get_regularizer(self._embedding_regularizer)
        return terms

    # The loss.

    def compute_loss(self, return_dict: Mapping[str, Any], y_true: Tensor) -> Tensor:
        loss, penalty = self.add_loss(return_dict, y_true), self.regularization_loss(return_dict.get("penalties", {}))
        self.penalty = penalty.detach() if isinstance(penalty, Tensor) else penalty
        return loss + penalty

    def add_loss(self, return_dict: Mapping[str, Any], y_true: Tensor) -> Tensor:
        """The task's loss and the forward pass' own losses."""
        losses: Mapping[str, Tensor] = return_dict.get("losses", {})
        self.auxiliary_parts = {name: part.detach() for name, part in losses.items()}
        weight = self._weights(return_dict.get("weight"), y_true)
        if weight is None:
            mean, total = super().add_loss(return_dict, y_true), float(len(y_true))
        else:
            mean, total = self._weighted_mean(return_dict["y_pred"], y_true, weight)
        if distributed.processes() > 1:  # their rows differ by one
            mean = mean * (total / distributed.average(total))
        return sum(losses.values(), mean)

    def _weighted_mean(self, y_pred: Tensor, y_true: Tensor, weight: Tensor) -> tuple[Tensor, Any]:
        """The losses of rows, each times its weight, divided by the sum of the weights, 0 if that is 0; and the sum.
        Weights of 1 give the bits of the mean."""
        total = weight.sum().clamp(min=1e-30)
        share = len(weight) / total
        if self.loss_fn is functional.binary_cross_entropy:
            return self.loss_fn(y_pred, y_true, weight=weight) * share, total
        return (self.loss_fn(y_pred, y_true, reduction="none") * weight).mean() * share, total

    def _weights(self, weight: Tensor | None, labels: Tensor) -> Tensor | None:
        """(B, 1) of rows with these weights and labels; None if all count alike."""
        if weight is not None:
            weight = weight.to(labels.device).view(-1, 1)
        if not self.of_class:
            return weight
        of_class = torch.where(labels > 0, self.of_class.get(1, 1.0), self.of_class.get(0, 1.0))
        return of_class if weight is None else weight * of_class

    def row_weights(self, batch: Mapping[str, Tensor], labels: Tensor) -> Tensor | None:
        """(B, 1) of the rows of a batch in the loss; None if all count alike."""
        return self._weights(None if self.weight_field is None else batch.get(self.weight_field), labels)

    def balance(self, positives: float) -> None:
        """Weights of the classes by the share of rows with label 1, as scikit-learn's ``balanced``."""
        shares = {1: positives, 0: 1 - positives}
        self.of_class = {label: 0.5 / share for label, share in shares.items() if share}

    def regularization_loss(self, penalties: Mapping[Tensor, Tensor] = MappingProxyType({})) -> Tensor | float:
        """FuxiCTR's. ``penalties``: of the tables whose own is known from looking them up."""
        of_tables = set(self.embedding_layer.parameters())
        known = {*penalties, *getattr(self.optimizer, "tables", ())}  # LazyTables regularises its own
        tables = [table for table in self.embedding_layer.parameters() if table not in known]
        others = [parameter for parameter in self.parameters() if parameter not in of_tables]
        rest = sum(penalties.values(), regularization(tables, self._embedding_regularizer))
        return rest + regularization(others, self._net_regularizer)

    # A batch.

    def get_inputs(self, inputs: Mapping[str, Tensor], feature_source: Any = None) -> dict[str, Tensor]:
        features, labels = self.feature_map.features, self.feature_map.labels
        read = [field for field in inputs if field not in labels and features[field]["type"] != "meta"]
        found: dict[str, Tensor] = super().get_inputs(
            {f: to_device(inputs[f], self.device) for f in read}, feature_source
        )
        return found

    def get_labels(self, inputs: Mapping[str, Tensor]) -> Tensor:
        label = self.feature_map.labels[0]
        found: Tensor = super().get_labels({label: to_device(inputs[label], self.device)})
        return found

    # FuxiCTR's names for training, which is ctr_pe.training: imported when used, because it stands above the models.

    def compile(self, optimizer: Any, loss: Any, lr: float) -> None:
        self.loss_fn = get_loss(valid("loss", Loss, loss))
        self._compile = (valid("optimizer", OptimizerName, optimizer), loss, lr)
        self.__dict__.pop("optimizer", None)
        if self.table_optimizer is not None:  # makes the tables' gradients sparse, which the loss has to know
            _ = self.optimizer

    @cached_property
    def optimizer(self) -> Optimizer:
        """Made at the first training step: torch takes a second to import what it needs, and scoring needs none."""
        from ctr_pe.training import make_optimizer

        name, _, lr = self._compile
        return make_optimizer(self, name, lr, self.table_optimizer)

    def fit(
        self,
        data_generator: Any,
        epochs: int = 1,
        validation_data: Any = None,
        max_gradient_norm: float | None = None,
        **params: Any,
    ) -> Fitted:
        """:func:`ctr_pe.training.fit`. ``params``: FuxiCTR hands over all of an experiment; the model has them."""
        from ctr_pe.training import fit

        self.check_arguments(params)
        if validation_data is None:
            raise UserError("fit needs validation_data: without it no epoch can be chosen")
        if max_gradient_norm is not None:
            self._max_gradient_norm = max_gradient_norm
        return fit(self, data_generator, validation_data, epochs)

    def train_step(self, batch_data: Mapping[str, Tensor]) -> Tensor:
        from ctr_pe.training import train_step

        return train_step(self, batch_data, self._max_gradient_norm)

    def evaluate(self, data_generator: Any, metrics: Iterable[str] | None = None) -> dict[str, float]:
        from ctr_pe.training import evaluated

        return evaluated(self, data_generator, tuple(metrics or self.validation_metrics))

    def predict(self, data_generator: Any) -> npt.NDArray[np.float64]:
        from ctr_pe.training import score

        return score(self, data_generator).scores

    def save_weights(self, checkpoint: str | Path) -> None:
        from ctr_pe.training import save

        save(self, Path(checkpoint))

    def load_weights(self, checkpoint: str | Path) -> None:
        """Those of ``save_weights``, here or in FuxiCTR. Raises UserError."""
        from ctr_pe.training import load

        load(self, Path(checkpoint))


class MLP(layers.MLP_Block):  # type: ignore[misc]
    """FuxiCTR's ``MLP_Block`` with this package's Dice, one for each layer, and its Dropout.

    ``fast_dropout``: False for torch's dropout, whose random numbers are others. ``options``: FuxiCTR's.
    """

    def __init__(
        self,
        input_dim: int,
        hidden_units: Sequence[int],
        hidden_activations: str,
        fast_dropout: bool = True,
        **options: Any,
    ) -> None:
        activations = valid("hidden_activations", Activation, hidden_activations)
        if activations == "Dice":
            activations = [Dice(units) for units in hidden_units]
        super().__init__(input_dim, list(hidden_units), activations, **options)
        for index, layer in enumerate(self.mlp):
            if type(layer) is nn.Dropout:
                self.mlp[index] = Dropout(layer.p, fast_dropout)
