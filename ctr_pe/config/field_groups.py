"""Field groups: which columns make the target, and which the history it is compared with. Keys of FuxiCTR's configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctr_pe.utils.errors import UserError, shown

FIELD_KEYS = ("target_field", "sequence_field", "neg_seq_field")


@dataclass(frozen=True)
class Group:
    """Target fields and the history fields they are compared with, pairwise: one attention of the model.

    ``age``: the column with seconds from each history event to the request, or None.
    """

    target: tuple[str, ...]
    history: tuple[str, ...]
    age: str | None = None

    def __post_init__(self) -> None:
        if len(self.target) != len(self.history) or not self.target:
            both = f"target_field {shown(list(self.target))} and sequence_field {shown(list(self.history))}"
            raise UserError(f"{both} must pair up")


@dataclass(frozen=True)
class LogHistory:
    """A history of a log: ``name``, the end of its columns' names; of events that were ``chosen`` or not, and of one
    ``behaviour`` or, for None, of all."""

    name: str = "history"
    chosen: bool = True
    behaviour: str | None = None

    @property
    def spec(self) -> dict[str, Any]:
        """What the specifications of its features say."""
        found = {} if self.chosen else {"chosen": False}
        return found if self.behaviour is None else found | {"behaviour": self.behaviour}


def log_group(fields: Sequence[str], timed: bool, history: str = "history") -> Group:
    """The target fields of a log and its history columns: of ``item_id`` ``item_history``, of times ``age_history``."""
    listed = tuple(f"{name.removesuffix('_id')}_{history}" for name in fields)
    return Group(tuple(fields), listed, f"age_{history}" if timed else None)


def field_keys(key: str, models: Sequence[str]) -> list[str]:
    """The names of a key of fields: FuxiCTR's ``<model>_target_field``, the last of ``models`` first, and its own."""
    return [*(f"{model}_{key}" for model in reversed(models)), key]


def field_value(params: Mapping[str, Any], key: str, models: Sequence[str]) -> Any:
    """The fields under the first of these names that has any, or None."""
    return next((params[name] for name in field_keys(key, models) if params.get(name)), None)


def field_groups(params: Mapping[str, Any]) -> list[Group]:
    """Field groups of a config, under ``target_field``, ``sequence_field``, ``age_field`` or FuxiCTR's
    ``<model>_target_field``; none if it leaves them to the data set.

    Raises:
        UserError: fields that are ambiguous or do not pair up.
    """
    models = [str(params.get("model")).lower()]
    target, history = (field_value(params, key, models) for key in ("target_field", "sequence_field"))
    if bool(target) != bool(history):
        raise UserError("target_field and sequence_field are given together, or neither")
    return paired(target, history, params.get("age_field")) if target and history else []


def paired(target_field: Any, sequence_field: Any, age_field: Any = None) -> list[Group]:
    """The groups that these keys name.

    Raises:
        UserError: a key that is missing or ambiguous, groups or fields that do not pair up.
    """
    targets, histories = nested_fields("target_field", target_field), nested_fields("sequence_field", sequence_field)
    if len(targets) != len(histories):
        raise UserError(f"target_field has {len(targets)} groups, sequence_field has {len(histories)}")
    ages = per_group("age_field", age_field, len(targets))
    return [Group(*fields) for fields in zip(targets, histories, ages, strict=True)]


def nested_fields(key: str, value: Any) -> list[tuple[str, ...]]:
    """Groups of fields from what a config may hold: a name, one tuple, or a list of names, tuples and lists."""
    if not value:
        raise UserError(f"{key} is missing: write {key}: [[item_id, cate_id]] with the fields of your data")
    if isinstance(value, str):
        return [(value,)]
    if isinstance(value, tuple) and all(isinstance(field, str) for field in value):
        return [value]
    if isinstance(value, list) and len(value) > 1 and all(isinstance(field, str) for field in value):
        raise UserError(
            f"{key}: [{', '.join(value)}] can mean two things: write [[{', '.join(value)}]] for one attention over all "
            f"fields, [{', '.join(f'[{field}]' for field in value)}] for one attention each"
        )
    return [(group,) if isinstance(group, str) else tuple(group) for group in value]


def per_group(key: str, value: Any, groups: int) -> list[Any]:
    """One value for each of ``groups`` groups: the same for all, or a list of as many."""
    if value is None or isinstance(value, str):
        return [value] * groups
    if len(value) != groups:
        raise UserError(f"{key} has {len(value)} entries for {groups} field groups")
    return list(value)


def group_params(groups: Sequence[Group]) -> dict[str, Any]:
    """The keys of a config that name these groups."""
    return {
        "target_field": [group.target for group in groups],
        "sequence_field": [group.history for group in groups],
        "age_field": [group.age for group in groups],
    }
