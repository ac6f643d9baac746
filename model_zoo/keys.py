"""Keys of a model's config: which there are, and values that FuxiCTR takes for something else."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

from fuxictr.pytorch.models import BaseModel

from ctr_pe.errors import UserError, nearest
from ctr_pe.pe import pe_options

# Keys of FuxiCTR configs that are read elsewhere (data set, loader, training), or that old configs carry.
FUXICTR_KEYS = frozenset(
    "batch_size data_block_size data_format data_loader data_root dataset_id debug_mode epochs feature_cols"
    " feature_config feature_specs group_id label_col loss max_gradient_norm metrics min_categr_count model model_root"
    " num_workers optimizer partition_block_size pickle_feature_encoder rebuild_dataset seed shuffle split_type"
    " test_data test_size train_data use_features use_hdf5 valid_data valid_size verbose version workers".split()
)


def check_keys(model: type[BaseModel], keys: Iterable[str]) -> None:
    """Refuse keys that nothing reads; FuxiCTR would take the default without a word.

    Raises:
        UserError: the first unknown key with the nearest known one.
    """
    for problem in unknown_keys(model, keys).values():
        raise UserError(problem)


def unknown_keys(model: type[BaseModel], keys: Iterable[str]) -> dict[str, str]:
    """Those of the keys that nothing reads, each with one line that names the nearest known one."""
    prefix = model.__name__.lower()
    known = set(FUXICTR_KEYS) | set(pe_options())
    known |= {f"{prefix}_{key}" for key in ("target_field", "sequence_field", "neg_seq_field")}
    for cls in model.__mro__:
        if issubclass(cls, BaseModel):
            known |= {p.name for p in inspect.signature(cls).parameters.values() if p.kind is not p.VAR_KEYWORD}
    near = known - FUXICTR_KEYS
    return {key: f"{model.__name__}: key '{key}' is unknown: {nearest(key, near)}" for key in keys if key not in known}


def own_position_switch(model: str, key: str, on: bool | None, params: dict[str, Any]) -> None:
    """FuxiCTR's switch of a backbone's own position vectors, which are ``position_encoding: native`` here.

    Without position_encoding, True or False sets it to native or none.

    Raises:
        UserError: the two contradict each other.
    """
    if on is None:
        return
    encoding = params.setdefault("position_encoding", "native" if on else "none")
    for name in [encoding] if isinstance(encoding, str) else encoding:
        if ("native" in name.split("+")) != on:
            raise UserError(
                f"{model}: {key}={on} contradicts position_encoding='{name}': leave it out, position_encoding says "
                f"all (native is what {key}=True was)"
            )


def count(key: str, value: Any) -> int | None:
    """A positive whole number, or None."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise UserError(f"{key}: {value!r} is not a positive whole number")
    return value


def number(key: str, value: Any) -> float:
    """A number, also one that YAML 1.1 took for text, such as 1e-3."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"{key}: {value!r} is not a number") from None


def regularizer(key: str, value: Any) -> float | str | None:
    """FuxiCTR ignores an integer and refuses text such as 5e-3: numbers become floats."""
    if not value:
        return None
    a_number = r" *(\d+\.?\d*|\.\d+)([eE][-+]?\d+)? *"
    if isinstance(value, str) and re.fullmatch(rf"l1_l2\({a_number},{a_number}\)|l[12]\({a_number}\)", value):
        return value
    return number(key, value)
