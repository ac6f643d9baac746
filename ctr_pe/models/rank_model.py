"""What every backbone shares on FuxiCTR: field groups, encodings, forward and loss. Training is :mod:`ctr_pe.training`.

B batch, L history slots, N real items of the batch, D item dim (the fields of an item, concatenated).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ctr_pe.config.field_groups import FIELD_KEYS, field_keys, field_value
from ctr_pe.config.schema import Activation, Ages, Encodings, Fields, Length, Rate, Widths
from ctr_pe.fuxictr.adapter import MLP, FuxiCTRModel
from ctr_pe.models import candidates
from ctr_pe.models.batch_plan import Histories, Plan, Planned
from ctr_pe.models.candidates import Encoded
from ctr_pe.models.groups import SizedGroup, field_dim, other_fields, sized_groups
from ctr_pe.models.sections import check_arguments, prefixes
from ctr_pe.pe import build_pe, pe_options
from ctr_pe.pe.base import Losses, PositionEncoding, sum_losses
from ctr_pe.sequence.positions import Items, Positions
from ctr_pe.utils import distributed
from ctr_pe.utils.errors import UserError


class RankModel(FuxiCTRModel):
    """A FuxiCTR model that scores a target item against one or several histories.

    A subclass builds its units (``build_encoding`` gives each its encoding), calls ``build_tower`` last, and defines
    ``interest``. Field groups are lists of lists, one inner list per history: ``target_field: [[item_id, cate_id]]``,
    ``sequence_field: [[item_history, cate_history]]``, or FuxiCTR's ``<model>_target_field`` and
    ``<model>_sequence_field``. A field may be an id, a category or a pretrained vector with projection.

    Args:
        feature_map: FuxiCTR's. Histories are right- or left-padded ids with padding 0.
        target_field, sequence_field: the field groups.
        neg_seq_field: as sequence_field, an item that was not chosen in each slot: for the auxiliary loss of DIEN and
            DMIN. Other models do not read these fields.
        age_field: per group, the column with seconds from event to request, or None.
        position_encoding: a name that ``build_pe`` takes, or ``native`` for the backbone's own; or one per group. The
            options of encodings are keys of the config like all others.
        max_len: items kept of a history, the most recent ones; None for all that the data have.
        max_position: positions from here on share one row of an encoding's table; None for max_len.
        dnn_hidden_units, dnn_activations, net_dropout, batch_norm: the tower; ``bn_only_once`` norms its input alone.
        amp: mixed precision: attention in bfloat16, positions, weights and the tower in float32.
        kwargs: the keys of :class:`~ctr_pe.fuxictr.adapter.FuxiCTRModel`, and the options of encodings.

    Raises:
        UserError: an unknown key, a field that the feature map lacks, groups that do not match, a bad value.
    """

    native: ClassVar[str | type[PositionEncoding]] = "none"
    """What ``position_encoding: native`` means: the position code that the backbone's own paper has."""

    pairs_at_once: ClassVar[int] = candidates.PAIRS

    @classmethod
    def check_arguments(cls, given: Mapping[str, Any]) -> None:
        check_arguments(cls, {key: value for key, value in given.items() if key != "feature_map"})

    def __init__(
        self,
        feature_map: Any,
        model_id: str = "RankModel",
        target_field: Fields = None,
        sequence_field: Fields = None,
        neg_seq_field: Fields = None,
        age_field: Ages = None,
        position_encoding: Encodings = "none",
        max_len: Length | None = None,
        max_position: Length | None = None,
        dnn_hidden_units: Widths = (512, 128, 64),
        dnn_activations: Activation = "ReLU",
        net_dropout: Rate = 0.0,
        batch_norm: bool = False,
        bn_only_once: bool = False,
        amp: bool = False,
        **kwargs: Any,
    ) -> None:
        given = dict(zip(FIELD_KEYS, (target_field, sequence_field, neg_seq_field), strict=True)) | kwargs
        targets, histories, negatives = (field_value(given, key, prefixes(type(self))) for key in FIELD_KEYS)
        for key in FIELD_KEYS:
            for name in field_keys(key, prefixes(type(self))):
                kwargs.pop(name, None)
        options = {key: kwargs.pop(key) for key in pe_options() if key in kwargs}
        super().__init__(feature_map, model_id, **kwargs)
        self._encodings = 0  # built so far
        self._target_joins = False  # the sequence of its history
        self.native_options: dict[str, Any] = {}  # keyword arguments of ``native``, where it is a class
        self.encoding_options, self.amp = options, amp
        self.max_len, self.max_position = max_len, max_position
        features = self.feature_map.features
        self.groups = sized_groups(
            features, self.embedding_dim, max_len, targets, histories, negatives, age_field, position_encoding
        )
        self._history_columns = {
            name for group in self.groups for name in (*group.history, *group.negative, group.age) if name
        }
        self.other_fields = other_fields(features, self.encoders, self._history_columns)
        self._tower: dict[str, Any] = {
            "hidden_units": dnn_hidden_units,
            "hidden_activations": dnn_activations,
            "dropout_rates": net_dropout,
            "batch_norm": batch_norm,
            "bn_only_once": bn_only_once,
        }

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
        Raises UserError for heads that do not divide the item, or an encoding that cannot be built.
        """
        model, of_model, links = type(self).__name__, native or self.native, group.encoding.split("+")
        slots = min(group.max_len, self.max_position or group.max_len) + extra_slots
        if not isinstance(of_model, str) and "native" in links and len(links) > 1:
            raise UserError(f"{model}: '{group.encoding}': native widens the items here and stands alone")

        def fresh() -> PositionEncoding:
            if not isinstance(of_model, str) and links == ["native"]:
                return of_model(dim, slots, num_heads, **self.native_options)
            _check_heads(model, group, dim, num_heads)
            names = "+".join(str(of_model) if link == "native" else link for link in links)
            fields = {"field_dims": group.dims, "field_sizes": group.sizes}
            return build_pe(names, dim, slots, num_heads, **fields, **self.encoding_options)

        # Encodings draw from streams of their own, so that all start from the same backbone weights at one seed.
        # That of the CPU alone: weights are drawn there, and the streams of devices stay as they are.
        with torch.random.fork_rng(()):
            torch.default_generator.manual_seed(torch.initial_seed() ^ (0x9E3779B97F4A + self._encodings))
            pe = fresh() if below is None else below.next_layer(fresh)
        self._encodings += 1
        _check_heads(model, group, pe.out_dim, num_heads)
        if pe.about.needs_age and group.age is None:
            raise UserError(f"position encoding '{group.encoding}' needs event times: the data have none (age_field)")
        return pe

    def build_stack(self, group: SizedGroup, layers: int, num_heads: int = 1) -> list[PositionEncoding]:
        """The group's encodings for ``layers`` self-attentions over [history; target], one above the other.

        Raises UserError as ``build_encoding``.
        """
        self._target_joins = True
        first = self.build_encoding(group, group.dim, num_heads, 1)
        return [first, *(self.build_encoding(group, group.dim, num_heads, 1, first) for _ in range(layers - 1))]

    def build_tower(self, interest_dims: Iterable[int]) -> None:
        """The MLP over all other fields and the interests; then optimiser, initial weights and device."""
        specs = self.feature_map.features
        width = sum(field_dim(specs[name], self.embedding_dim) for name in self.other_fields) + sum(interest_dims)
        self.dnn = MLP(width, **self._tower, output_dim=1, output_activation=self.output_activation)
        self.finish()

    def interest(self, index: int, target: Items, history: Items, positions: Positions) -> tuple[Tensor, Losses]:
        """Group ``index``: targets (B, D) and packed history (N, D) as looked up -> interest (B, any width), and in
        training what else is to be minimised, by name."""
        raise TypeError(f"{type(self).__name__} does not define interest()")

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """A JaggedBatch, or a batch of FuxiCTR's form -> {"y_pred": click probability (B, 1)}; in training also
        "penalties", the regularisation of embedding tables by their weights, and "losses", what else is to be
        minimised, by name."""
        plan = self.planned(inputs).plan
        ids = plan.ids()
        embedded, penalties = self.look_up(ids)
        features, losses = [embedded[name] for name in self.other_fields], Losses()
        clicked = plan.label > 0 if self.training and plan.label is not None else None
        of_groups = zip(self.groups, plan.histories, plan.items(embedded), strict=True)
        for index, (group, given, vectors) in enumerate(of_groups):
            target = torch.cat([embedded[field] for field in group.target], dim=-1)
            chosen = None if clicked is None else clicked.new_full((len(vectors),), group.chosen)
            history = Items(vectors, tuple(given.ids.values()), chosen, given.ids_cpu)
            targets = Items(target, tuple(ids[field] for field in group.target), clicked)
            with self.precision():
                interest, more = self.interest(index, targets, history, given.positions)
            features.append(interest.to(target.dtype))
            losses = sum_losses(losses, more)
        if (
            self.training and len(target) * distributed.processes() == 1
        ):  # no variance: batch norm and Dice use running ones
            self.dnn.eval()
        y_pred = self.dnn(torch.cat(features, dim=-1))
        self.dnn.train(self.training)
        if not self.training:
            return {"y_pred": y_pred}
        return {"y_pred": y_pred, "penalties": penalties, "losses": losses, "weight": plan.weight}

    def planned(self, inputs: Mapping[str, Tensor]) -> Planned:
        """The batch with what ``forward`` takes of it, which another thread may ask for ahead."""
        if isinstance(inputs, Planned):
            return inputs
        features, labels = self.feature_map.features, self.feature_map.labels
        rows = {name: inputs[name] for name in inputs if name not in self._history_columns}
        fields = {name: x for name, x in rows.items() if name not in labels and features[name]["type"] != "meta"}
        label = rows.get(labels[0])
        weight = rows.get(self.weight_field) if self.weight_field else None
        plan = Plan(fields, None if label is None else label.float().view(-1), self.read_histories(inputs), weight)
        if self.device.type != "cpu":
            for histories in plan.histories:
                histories.positions.plan(self._target_joins)
        return Planned(rows, plan, self.device)

    def get_labels(self, inputs: Mapping[str, Tensor]) -> Tensor:
        if isinstance(inputs, Planned) and inputs.plan.label is not None:
            return inputs.plan.label.view(-1, 1)
        return super().get_labels(inputs)

    def read_histories(self, inputs: Mapping[str, Tensor]) -> list[Histories]:
        """Those of each group."""
        return [Histories.of(self, inputs, group) for group in self.groups]

    def precision(self) -> torch.autocast:
        """Of attention: bfloat16 with ``amp``."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp)

    # One user, many candidates.

    def encode(self, inputs: Mapping[str, Tensor]) -> Encoded:
        """What :meth:`score_candidates` needs of the histories, of which ``inputs`` has the fields and ages."""
        return candidates.encode(self, inputs)

    def score_candidates(self, encoded: Encoded, inputs: Mapping[str, Tensor]) -> Tensor:
        """The scores (B, K) that K targets of each history have in ``forward``; in evaluation mode.

        ``inputs``: all other fields, ids of targets (B, K); a field of the user or the request may have (B,).
        """
        return candidates.score(self, encoded, inputs)

    def encode_history(self, index: int, history: Items, positions: Positions) -> Any:
        """Group ``index``: what of packed history (N, D) does not depend on the target. See
        :meth:`of_candidates`."""
        return None

    def of_candidates(self, index: int, target: Items, history: Items, states: Any, positions: Positions) -> Tensor:
        """Group ``index``: ``interest`` (B, K, any width) of K targets (B, K, D), with ``states`` by
        ``encode_history``. By default each target gets a copy of its history."""
        return candidates.row_by_row(self, index, target, history, positions)

    def input_dims(self, field: str) -> int:
        """Axes of a field in a batch."""
        return 2 if self.feature_map.features[field]["type"] in ("sequence", "embedding") else 1


def _check_heads(model: str, group: SizedGroup, width: int, num_heads: int) -> None:
    if width % num_heads:
        choices = ", ".join(str(heads) for heads in range(1, min(width, 16) + 1) if width % heads == 0)
        what = f"num_heads={num_heads} does not divide {width}, the item dim of {list(group.target)}"
        raise UserError(f"{model}: {what}: take one of {choices}")
