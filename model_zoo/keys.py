"""Keys of a model's config: which there are, and values that FuxiCTR takes for something else."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable
from typing import Any

import torch
from fuxictr.pytorch.models import BaseModel

from ctr_pe.errors import UserError, nearest
from ctr_pe.pe import pe_options

# Keys of FuxiCTR's configs, by who reads them: what builds a data set and opens it; training; nobody any more.
DATA_KEYS = frozenset(
    "data_block_size data_format data_root feature_cols feature_config label_col min_categr_count partition_block_size"
    " pickle_feature_encoder rebuild_dataset split_type test_data test_size train_data use_hdf5 valid_data"
    " valid_size".split()
)
TRAINING_KEYS = frozenset(
    "amp batch_size early_stop_patience embedding_init embedding_regularizer epochs eval_steps gpu learning_rate"
    " learning_rate_schedule loss max_gradient_norm metrics monitor monitor_mode net_regularizer num_workers optimizer"
    " reduce_lr_on_plateau save_best_only seed shuffle table_optimizer task verbose weight_average".split()
)
OTHER_KEYS = frozenset(
    "data_loader dataset_id debug_mode feature_specs group_id model model_root track use_features version"
    " workers".split()
)


def check_keys(model: type[BaseModel], keys: Iterable[str]) -> None:
    """Raises UserError for the first key that nothing reads; FuxiCTR would take the default without a word."""
    for problem in unknown_keys(model, keys).values():
        raise UserError(problem)


def unknown_keys(model: type[BaseModel], keys: Iterable[str]) -> dict[str, str]:
    """Those of the keys that nothing reads, each with one line that names the nearest known one."""
    known = {*TRAINING_KEYS, *pe_options()}
    fields = ("target_field", "sequence_field", "neg_seq_field")
    known |= {f"{prefix}_{key}" for prefix in prefixes(model) for key in fields}
    for cls in model.__mro__:
        if issubclass(cls, BaseModel):
            known |= {p.name for p in inspect.signature(cls).parameters.values() if p.kind is not p.VAR_KEYWORD}
    unknown = [key for key in keys if key not in known | DATA_KEYS | OTHER_KEYS]
    return {key: f"{model.__name__}: key '{key}' is unknown: {nearest(key, known)}" for key in unknown}


def prefixes(model: type) -> list[str]:
    """Of keys such as ``din_target_field``: names of the model and its base classes, its own last, which wins."""
    named = [cls for cls in model.__mro__ if issubclass(cls, BaseModel) and cls is not BaseModel]
    return [cls.__name__.lower() for cls in reversed(named)]


def check_gpu(gpu: Any) -> torch.device:
    """The CPU for -1, else torch's accelerator of this number: of CUDA, ROCm or another.

    Raises UserError if there is none; FuxiCTR would take the CPU without a word.
    """
    if not isinstance(gpu, int):
        raise UserError(f"gpu: {gpu!r} is not a whole number")
    if gpu < 0:
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type == "mps":  # Apple's has no float64
        raise UserError(f"gpu {gpu}: there is no GPU here (--gpu -1 for the CPU)")
    there = range(torch.accelerator.device_count())
    if gpu not in there:
        raise UserError(f"gpu {gpu}: there is none of this number (--gpu: {', '.join(map(str, there))}, -1: CPU)")
    return torch.device(kind.type, gpu)


def own_position_switch(model: str, key: str, on: bool | None, params: dict[str, Any]) -> None:
    """FuxiCTR's switch of a backbone's own position vectors, which are ``position_encoding: native`` here.

    Sets position_encoding to native or none where it is missing, and raises UserError if the two contradict each other.
    """
    if on is None:
        return
    encoding = params.setdefault("position_encoding", "native" if on else "none")
    for name in [encoding] if isinstance(encoding, str) else encoding:
        if ("native" in name.split("+")) != on:
            advice = f"leave it out, position_encoding says all (native is what {key}=True was)"
            raise UserError(f"{model}: {key}={on} contradicts position_encoding='{name}': {advice}")


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


def positive(key: str, value: Any) -> float:
    """A number above zero, and finite."""
    if not 0 < (found := number(key, value)) < math.inf:
        raise UserError(f"{key}: {value!r} is not a positive number")
    return found


def regularizer(key: str, value: Any) -> float | str | None:
    """FuxiCTR ignores an integer and refuses text such as 5e-3: numbers become floats."""
    if not value:
        return None
    a_number = r" *(\d+\.?\d*|\.\d+)([eE][-+]?\d+)? *"
    if isinstance(value, str) and re.fullmatch(rf"l1_l2\({a_number},{a_number}\)|l[12]\({a_number}\)", value):
        return value
    return number(key, value)
