"""Keys of a config: the type and range of each, declared once, and what is wrong with a value, in one line.

Keys of FuxiCTR are in the tables below. Those of a model or an encoding are the parameters of its constructor, with the
types of this module: ``position_dim: Width = 16``. Constructors check them too (:func:`checked`).
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
from pydantic.fields import FieldInfo

from ctr_pe.config.choices import choose
from ctr_pe.utils import loggers
from ctr_pe.utils.errors import UserError, explain, short, shown
from ctr_pe.utils.names import RULE, is_name

MOST_WEIGHTS = 2**28
"""Of one stack of layers: a gigabyte. A config asks for more by mistake, or to exhaust the machine."""


def _number(value: Any) -> Any:
    """FuxiCTR's reader, YAML 1.1, takes 1e-3 for text."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+([eE][-+]?\d+)?", value) else value


def regularizer(value: Any) -> float | str | None:
    """L2 weight, or FuxiCTR's ``l1(x)``, ``l2(x)``, ``l1_l2(x,y)``. FuxiCTR ignores an integer and refuses text such as
    5e-3: numbers become floats, and 0 None.

    Raises:
        ValueError: anything else, a weight below zero or one that is not finite.
    """
    text = str(value or 0).replace(" ", "")
    written = re.fullmatch(r"l1_l2\(([^,]+),([^,]+)\)|l[12]\(([^,]+)\)", text)
    weights = [float(weight) for weight in (written.groups() if written else [text]) if weight is not None]
    if not all(0 <= weight < math.inf for weight in weights):
        raise ValueError(value)
    return (text if written else weights[0]) if any(weights) else None


def _demand(holds: Any) -> AfterValidator:
    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(value)
        return value

    return AfterValidator(check)


Count = Annotated[int, Field(ge=1, lt=2**31, description="a positive integer")]
Index = Annotated[int, Field(ge=0, lt=2**31, description="a whole number of 0 or more")]
Seed = Annotated[int, Field(ge=0, lt=2**32, description="a whole number from 0 to 4294967295")]
Width = Annotated[int, Field(ge=1, le=2**14, description="a positive integer")]
Length = Annotated[int, Field(ge=1, le=10**6, description="a positive integer")]
Layers = Annotated[int, Field(ge=1, le=64, description="a positive integer")]
Widths = Annotated[
    Sequence[Width],
    Field(max_length=64),
    _demand(lambda widths: sum(a * b for a, b in pairwise(widths)) <= MOST_WEIGHTS),
    Field(description="a list of positive integers, layers of at most 268435456 weights in all"),
]
Finite = Annotated[float, Field(gt=-math.inf, lt=math.inf, description="a number")]
Positive = Annotated[float, Field(gt=0, lt=math.inf, description="a positive number")]
Weight = Annotated[float, Field(ge=0, lt=math.inf, description="a weight of 0 or more")]
PositiveText = Annotated[Positive, BeforeValidator(_number)]
WeightText = Annotated[Weight, BeforeValidator(_number)]
"""These also as text, which FuxiCTR's reader makes of 1e-3."""
Rate = Annotated[float, Field(ge=0, lt=1, description="from 0 to less than 1")]
Chance = Annotated[float, Field(ge=0, le=1, description="from 0 to at most 1")]
Share = Annotated[float, Field(gt=0, le=1, description="above 0 and at most 1")]
Regularizer = Annotated[
    float | str | None,
    AfterValidator(regularizer),
    Field(description="a weight of 0 or more, l1(x), l2(x) or l1_l2(x,y)"),
]
Name = Annotated[str, _demand(is_name), Field(description=RULE)]
Place = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,1000}$", description="a path")]
Fields = Annotated[
    str | Sequence[str | Sequence[str]] | None, Field(description="a field, or a list of lists of fields, [[item_id]]")
]
Metrics = Annotated[list[str], Field(min_length=1, description="a list of metrics")]
Monitor = Annotated[
    str | Annotated[dict[str, Finite], Field(min_length=1)], Field(description="a metric, or a weight per metric")
]


Ages = Annotated[
    str | Sequence[str | None] | None,
    Field(description="a column with the ages of a history, or one per field group"),
]
ENCODER = re.compile(
    r"nn\.Linear\((\d{1,5}), *(\d{1,5})(?:, *bias *= *(True|False))?\)|layers\.(Masked(?:Average|Sum)Pooling)\(\)"
)
"""Those of FuxiCTR's feature encoders that a config may name; FuxiCTR would run their text as code."""
Encoder = Annotated[
    str,
    _demand(lambda text: text in ("default", "null", "None", "none") or ENCODER.fullmatch(text)),
    Field(description="nn.Linear(a, b, bias=False), layers.MaskedAveragePooling(), layers.MaskedSumPooling()"),
]


class Spec(BaseModel):
    """What a feature map says about a feature, under FuxiCTR's keys."""

    model_config = ConfigDict(strict=True)

    type: Literal["categorical", "sequence", "meta", "numeric", "embedding"]
    source: str = ""
    padding_idx: Index | None = None
    oov_idx: Index = 0
    vocab_size: Index = 0
    max_len: Length = 1
    share_embedding: str | None = None
    embedding_dim: Width | None = None
    emb_output_dim: Width | None = None
    feature_encoder: Encoder | list[Encoder] | None = None
    pretrained_emb: Name | None = None
    pretrain_dim: Width | None = None
    pretrain_usage: Literal["init", "sum", "concat"] = "init"
    freeze_emb: bool = True

    @model_validator(mode="after")
    def _whole(self) -> Self:
        needed = {"categorical": ("vocab_size",), "sequence": ("vocab_size", "max_len")}
        if type(self) is Spec and (
            missing := [key for key in needed.get(self.type, ()) if key not in self.model_fields_set]
        ):
            raise ValueError(f"a {self.type} feature needs '{missing[0]}'")
        return self


class SpecChange(Spec):
    """An entry of ``feature_specs``: what to change in the feature map."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str | list[str]
    type: Literal["categorical", "sequence", "meta", "numeric", "embedding"] = "categorical"
    min_categr_count: Count | None = None


class Label(BaseModel):
    """``label_col``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str = Field(min_length=1)
    dtype: Literal["float", "int"] = "float"


class Key:
    """A type, with its words and its validator, which is made at the first use."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    @cached_property
    def adapter(self) -> TypeAdapter[Any]:
        config = ConfigDict(strict=True, arbitrary_types_allowed=True)
        try:
            return TypeAdapter(self.kind, config=config)
        except (PydanticUserError, PydanticUndefinedAnnotation) as error:
            if error.code == "type-adapter-config-unused":  # a model, which has its own
                return TypeAdapter(self.kind)
            return TypeAdapter(Any)  # an annotation for readers alone

    def problem(self, key: str, value: Any) -> str | None:
        """What is wrong with the value of ``key``, or None."""
        try:
            self.adapter.validate_python(value.item() if isinstance(value, np.generic) else value)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            if (said := words(self.kind)) is None and len(problem["loc"]) > 1:
                return f"{key}: {explain(problem, SpecChange)}"
            said = said or short(problem["msg"])
            if problem["type"] == "less_than_equal" and "at most" not in said:
                said += f" of at most {problem['ctx']['le']}"
            return f"{key} must be {said}, got {shown(value)}"
        except (ArithmeticError, TypeError, RecursionError):
            return f"{key} cannot be {shown(value)}"
        return None


_PLAIN = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "None",
    dict: "a mapping",
    Path: "a path",
}


def words(kind: Any) -> str | None:
    """What a value of a type is, in words, as far as its annotation tells."""
    if get_origin(kind) is Annotated:
        said = [one.description for one in get_args(kind)[1:] if isinstance(one, FieldInfo) and one.description]
        return said[-1] if said else words(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) in (Union, UnionType):
        parts = [words(part) for part in get_args(kind)]
        return None if None in parts else " or ".join(map(str, dict.fromkeys(parts)))
    return _PLAIN.get(get_origin(kind) or kind)


def _keys(**kinds: Any) -> dict[str, Key]:
    return {key: Key(kind) for key, kind in kinds.items()}


# Of FuxiCTR's configs, by who reads them: what builds a data set and opens it; training; nobody any more.
DATA = _keys(
    data_block_size=Annotated[int, Field(ge=-1, lt=2**31, description="a whole number, -1 for all rows")],
    data_format=Literal["csv", "parquet", "npz"],
    data_root=Place,
    feature_cols=list[dict[str, Any]],
    feature_config=dict[str, Any] | None,
    label_col=Label | Annotated[list[Label], Field(min_length=1, max_length=1)],
    min_categr_count=Count,
    partition_block_size=Annotated[int, Field(ge=-1, lt=2**31, description="a whole number, -1 for all rows")],
    pickle_feature_encoder=bool,
    rebuild_dataset=bool,
    sep=Annotated[str, Field(pattern=r"^[\t\x20-\x7e]$", description="one character")],
    split_type=Literal["sequential", "random"],
    test_data=Place | None,
    test_size=Rate,
    train_data=Place | None,
    use_hdf5=bool,
    valid_data=Place | None,
    valid_size=Rate,
)
TRAINING = _keys(
    amp=bool,
    batch_size=Count,
    deterministic=bool,
    early_stop_patience=Index,
    embedding_init=PositiveText,
    embedding_regularizer=Regularizer,
    epochs=Count,
    eval_steps=Count | None,
    gpu=Annotated[int, Field(ge=-1, lt=1024, description="the number of a GPU, or -1 for the CPU")],
    learning_rate=PositiveText,
    learning_rate_schedule=str,
    like_length=Index,
    loss=str,
    max_gradient_norm=PositiveText,
    metrics=Metrics,
    monitor=Monitor,
    monitor_mode=str,
    net_regularizer=Regularizer,
    num_workers=Annotated[int, Field(ge=0, le=1024, description="a whole number from 0 to 1024")],
    optimizer=str,
    reduce_lr_on_plateau=bool,
    save_best_only=bool,
    seed=Seed,
    shuffle=bool,
    table_optimizer=str | None,
    task=str,
    verbose=Index,
    weight_average=PositiveText | None,
)
OTHER = _keys(
    data_loader=str | None,
    dataset_id=Name,
    debug_mode=bool,
    feature_specs=list[SpecChange] | None,
    group_id=str | None,
    model=str,
    position_encoding=str | Annotated[Sequence[str], Field(min_length=1, description="a list of encodings")],
    model_id=Name,
    model_root=Place | Path,
    track=str | None,
    use_features=Annotated[list[str], Field(min_length=1)] | None,
    version=str | None,
    workers=Index | None,
)
KEYS = {**DATA, **TRAINING, **OTHER}
FIELD_KEYS = _keys(target_field=Fields, sequence_field=Fields, neg_seq_field=Fields)


@cache
def declared(cls: type) -> Mapping[str, Key]:
    """The parameters of a class's own constructor, by their annotations."""
    if "__init__" not in vars(cls):
        return {}
    init: Any = vars(cls)["__init__"]
    try:
        hints = get_type_hints(init, include_extras=True)
    except (NameError, AttributeError, TypeError):  # another package's, of names for type checkers alone
        return {}
    named = inspect.signature(init).parameters.values()
    return {p.name: Key(hints[p.name]) for p in named if p.kind is not p.VAR_KEYWORD and p.name in hints}


def known_to(cls: type) -> dict[str, Key]:
    """The keys that a class and those that it is derived from declare; FuxiCTR's have no annotations."""
    found: dict[str, Key] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] not in ("fuxictr", "torch", "builtins"):
            found |= declared(base)
    return found


def problems(keys: Mapping[str, Key], given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys whose values are wrong, each with its one line; keys that ``keys`` does not have take any value."""
    for key, value in given.items():
        found = keys[key].problem(key, value) if key in keys else None
        try:
            if found is None:
                choose(key, value)
            if found is None and key == "track":
                loggers.check(value, installed=False)
        except UserError as error:
            found = str(error)
        if found is not None:
            yield key, found


def checked(keys: Mapping[str, Key], given: Mapping[str, Any]) -> None:
    """Raises UserError for the first key whose value is wrong."""
    for _, problem in problems(keys, given):
        raise UserError(problem)


class _SignatureOfInit:
    """What :func:`inspect.signature` shows of a class with a ``__new__`` of its own."""

    def __get__(self, instance: Any, owner: Any) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        _, *parameters = inspect.signature(owner.__init__).parameters.values()
        return inspect.Signature(parameters)


class Checked:
    """A class that checks keyword arguments, as the annotations of its constructor declare them, before that runs."""

    __signature__ = _SignatureOfInit()

    @classmethod
    def keys(cls) -> Mapping[str, Key]:
        return known_to(cls)

    def __new__(cls, *_: Any, **given: Any) -> Self:
        checked(cls.keys(), given)
        return super().__new__(cls)
