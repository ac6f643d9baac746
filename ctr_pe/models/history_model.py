"""What every model with histories shares on FuxiCTR: field groups, their encodings, and what is read of a batch.

N real items of the batch, D item dim (the fields of an item, concatenated).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ctr_pe.config.field_groups import FIELD_KEYS, field_keys, field_value
from ctr_pe.config.schema import Ages, Encodings, Fields, Length
from ctr_pe.evaluation.metrics import is_metric, like_metric
from ctr_pe.fuxictr.adapter import FuxiCTRModel
from ctr_pe.fuxictr.library import training_settings
from ctr_pe.models.batch_plan import Histories, Plan, Planned
from ctr_pe.models.groups import SizedGroup, sized_groups
from ctr_pe.models.sections import check_arguments, prefixes, registered_name
from ctr_pe.pe import build_pe, pe_options
from ctr_pe.pe.base import PositionEncoding
from ctr_pe.sequence.filled import Parts
from ctr_pe.units.self_attention import SelfAttention
from ctr_pe.utils.errors import UserError


class HistoryModel(FuxiCTRModel):
    """A FuxiCTR model that reads one or several histories of items.

    Field groups are lists of lists, one inner list per history: ``target_field: [[item_id, cate_id]]``,
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
        amp: mixed precision: attention in bfloat16, positions, weights and all else in float32.
        kwargs: the keys of :class:`~ctr_pe.fuxictr.adapter.FuxiCTRModel`, and the options of encodings.

    Raises:
        UserError: an unknown key, a field that the feature map lacks, groups that do not match, a bad value, a metric
            of another task.
    """

    native: ClassVar[str | type[PositionEncoding]] = "none"
    """What ``position_encoding: native`` means: the position code that the backbone's own paper has."""

    @classmethod
    def check_arguments(cls, given: Mapping[str, Any]) -> None:
        check_arguments(cls, {key: value for key, value in given.items() if key != "feature_map"})

    def __init__(
        self,
        feature_map: Any,
        model_id: str = "HistoryModel",
        target_field: Fields = None,
        sequence_field: Fields = None,
        neg_seq_field: Fields = None,
        age_field: Ages = None,
        position_encoding: Encodings = "none",
        max_len: Length | None = None,
        max_position: Length | None = None,
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
        for name in [*self.validation_metrics, *training_settings(self).monitor]:
            self.check_metric(name)
        self.fills = False  # training batches up to sizes that many of them share
        self.parts_before: dict[tuple[int, int], list[Parts]] = {}  # by rows and slots of filled batches
        self._encodings = 0  # built so far
        self._target_joins = False  # the sequence of its history
        self.native_options: dict[str, Any] = {}  # keyword arguments of ``native``, where it is a class
        self.encoding_options, self.amp = options, amp
        self.max_len, self.max_position = max_len, max_position
        self.groups = sized_groups(
            self.feature_map.features,
            self.embedding_dim,
            max_len,
            targets,
            histories,
            negatives,
            age_field,
            position_encoding,
        )
        self._history_columns = {
            name for group in self.groups for name in (*group.history, *group.negative, group.age) if name
        }

    @property
    def registered_name(self) -> str:
        """The name that commands and configs have for the model."""
        return registered_name(type(self))

    def check_metric(self, name: str) -> None:
        """Raises UserError for a metric that the model's task does not have."""
        if not is_metric(name):
            raise UserError(f"{self.registered_name}: metric '{name}' is of another task: {like_metric(name)}")

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
        model, of_model, links = self.registered_name, native or self.native, group.encoding.split("+")
        slots = min(group.max_len, self.max_position or group.max_len) + extra_slots
        if not isinstance(of_model, str) and "native" in links and len(links) > 1:
            raise UserError(f"{model}: '{group.encoding}': native is the model's own and stands alone")

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

    def planned(self, inputs: Mapping[str, Tensor]) -> Planned:
        """The batch with what ``forward`` takes of it, which another thread may ask for ahead."""
        if isinstance(inputs, Planned):
            return inputs
        features, labels = self.feature_map.features, self.feature_map.labels
        rows = {name: inputs[name] for name in inputs if name not in self._history_columns}
        fields = {name: x for name, x in rows.items() if name not in labels and features[name]["type"] != "meta"}
        label = rows.get(labels[0])
        weight = rows.get(self.weight_field) if self.weight_field else None
        plan = Plan(fields, None if label is None else label.float().view(-1), [], weight)
        if self.fills and self.training:
            return Planned(rows, Plan.filled(self, inputs, plan), self.device)
        plan = replace(plan, histories=self.read_histories(inputs))
        if self.device.type != "cpu":
            for histories in plan.histories:
                histories.positions.plan(self._target_joins)
        return Planned(rows, plan, self.device)

    def get_labels(self, inputs: Mapping[str, Tensor]) -> Tensor:
        if isinstance(inputs, Planned) and inputs.plan.label is not None:
            return inputs.plan.label.view(-1, 1)
        return super().get_labels(inputs)

    @cached_property
    def attends_to_itself(self) -> bool:
        """Whether items of a history attend to each other."""
        return any(isinstance(module, SelfAttention) for module in self.modules())

    def read_histories(self, inputs: Mapping[str, Tensor]) -> list[Histories]:
        """Those of each group."""
        return [Histories.of(self, inputs, group) for group in self.groups]

    def precision(self) -> torch.autocast:
        """Of attention: bfloat16 with ``amp``."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp)

    def input_dims(self, field: str) -> int:
        """Axes of a field in a batch."""
        return 2 if self.feature_map.features[field]["type"] in ("sequence", "embedding") else 1


def _check_heads(model: str, group: SizedGroup, width: int, num_heads: int) -> None:
    if width % num_heads:
        choices = ", ".join(str(heads) for heads in range(1, min(width, 16) + 1) if width % heads == 0)
        what = f"num_heads={num_heads} does not divide {width}, the item dim of {list(group.target)}"
        raise UserError(f"{model}: {what}: take one of {choices}")
