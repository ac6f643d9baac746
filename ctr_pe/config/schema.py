"""Sections of a config as pydantic models, the types of their keys, and one line for whatever is wrong with a value.

FuxiCTR's keys are fields of the sections below. The keys of a model or an encoding are the parameters of its
constructor, with the types of this module: ``position_dim: Width = 16``; constructors check them too
(:class:`Validated`). FuxiCTR looks names up in torch and runs unknown ones as code: here each has a fixed list.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from ctr_pe.evaluation.metrics import METRICS, is_metric, like_metric, monitor_mode
from ctr_pe.evaluation.ranking import is_ranking_metric
from ctr_pe.utils import loggers
from ctr_pe.utils.errors import UserError, explain, nearest, quoted, short, shown
from ctr_pe.utils.names import RULE, is_name

OPTIMIZERS = "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
"""Those of torch that need only a learning rate."""
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
"""Those with a fused update of all parameters."""
FUSED_ON_CPU_ALONE = ("Adagrad",)
LOSSES = "bce binary_cross_entropy binary_crossentropy huber_loss l1_loss mse_loss smooth_l1_loss".split()
ACTIVATIONS = (
    "CELU Dice ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish PReLU ReLU ReLU6"
    " RReLU SELU Sigmoid SiLU Softmax Softplus Softshrink Softsign Tanh Tanhshrink".split()
)


def _number(value: Any) -> Any:
    """FuxiCTR's reader, YAML 1.1, takes 1e-3 for text."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+([eE][-+]?\d+)?", value) else value


def _class(key: Any) -> Any:
    """A class of a label, which JSON makes text of."""
    return int(key) if key in ("0", "1") or isinstance(key, np.integer) else key


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


def _demand(holds: Callable[[Any], Any]) -> AfterValidator:
    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(value)
        return value

    return AfterValidator(check)


def _one_of(names: Sequence[str], any_case: bool = False) -> AfterValidator:
    """One of ``names``, with ``any_case`` in their spelling whatever the value's (``sgd`` is ``SGD``)."""
    spelling = {name.lower() if any_case else name: name for name in names}

    def chosen(value: str) -> str:
        found = spelling.get(value.lower() if any_case else value)
        if found is None:
            raise _unknown_name(value, nearest(value, names))
        return found

    return AfterValidator(chosen)


def _unknown_name(value: str, choice: str) -> PydanticCustomError:
    return PydanticCustomError("unknown_name", "{said}", {"said": f"{quoted(value)} is unknown: {choice}"})


def _metric(value: str) -> str:
    if not (is_metric(value) or is_ranking_metric(value)):
        raise _unknown_name(value, like_metric(value))
    return value


def _tracker(value: str) -> str:
    loggers.check(value, installed=False)
    return value


Count = Annotated[int, Field(ge=1, lt=2**31, description="a positive integer")]
Width = Count
Length = Count
Layers = Count
Index = Annotated[int, Field(ge=0, lt=2**31, description="a whole number of 0 or more")]
Blocks = Annotated[int, Field(ge=-1, lt=2**31, description="a whole number, -1 for all rows")]
Seed = Annotated[int, Field(ge=0, lt=2**32, description="a whole number from 0 to 4294967295")]
Widths = Annotated[Sequence[Width], Field(description="a list of positive integers")]
Finite = Annotated[float, Field(gt=-math.inf, lt=math.inf, description="a number")]
Positive = Annotated[float, Field(gt=0, lt=math.inf, description="a positive number")]
Weight = Annotated[float, Field(ge=0, lt=math.inf, description="a weight of 0 or more")]
PositiveText = Annotated[Positive, BeforeValidator(_number)]
WeightText = Annotated[Weight, BeforeValidator(_number)]
"""These also as text, which FuxiCTR's reader makes of 1e-3."""
Rate = Annotated[float, Field(ge=0, lt=1, description="from 0 to less than 1")]
Chance = Annotated[float, Field(ge=0, le=1, description="from 0 to at most 1")]
Share = Annotated[float, Field(gt=0, le=1, description="above 0 and at most 1")]
ClassWeight = Annotated[
    Literal["balanced"] | dict[Literal[0, 1], Weight],
    BeforeValidator(lambda value: {_class(key): of for key, of in value.items()} if isinstance(value, dict) else value),
    Field(description="balanced, or a weight of 0 or more for each class, {0: 1, 1: 5}"),
]
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
Ages = Annotated[
    str | Sequence[str | None] | None,
    Field(description="a column with the ages of a history, or one per field group"),
]
Encodings = str | Annotated[Sequence[str], Field(min_length=1, description="a list of encodings")]
Activation = Annotated[str, _one_of(ACTIVATIONS, any_case=True)]
OptimizerName = Annotated[str, _one_of(OPTIMIZERS, any_case=True)]
TableOptimizer = Annotated[str, _one_of(("lazy_adam", "rowwise_adagrad"))]
Loss = Annotated[str, _one_of(LOSSES)]
Schedule = Annotated[str, _one_of(("constant", "linear", "cosine"))]
Metric = Annotated[str, AfterValidator(_metric)]
Monitor = Annotated[
    Metric | Annotated[dict[Metric, Finite], Field(min_length=1)],
    Field(description="a metric, or a weight per metric"),
]
ENCODER = re.compile(
    r"nn\.Linear\((\d{1,5}), *(\d{1,5})(?:, *bias *= *(True|False))?\)|"
    r"(layers\.Masked(?:Average|Sum)Pooling|AttentionPooling)\(\)"
)
"""Those of FuxiCTR's feature encoders that a config may name; FuxiCTR would run their text as code."""
Encoder = Annotated[
    str,
    _demand(lambda text: text in ("default", "null", "None", "none") or ENCODER.fullmatch(text)),
    Field(
        description="nn.Linear(a, b, bias=False), layers.MaskedAveragePooling(), layers.MaskedSumPooling(), "
        "AttentionPooling()"
    ),
]


class FeatureSpec(BaseModel):
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
    values: Length | None = None
    splitter: str | None = None
    category_encoder: Literal["quantile_bucket", "hash_bucket"] | None = None
    known: Literal["before", "afterwards"] = "before"
    weight: bool = False

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        needed = {"categorical": ("vocab_size",), "sequence": ("vocab_size", "max_len")}
        if type(self) is FeatureSpec and (
            missing := [key for key in needed.get(self.type, ()) if key not in self.model_fields_set]
        ):
            raise ValueError(f"a {self.type} feature needs '{missing[0]}'")
        return self


class FeatureChange(FeatureSpec):
    """An entry of ``feature_specs``: what to change in the feature map."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str | list[str]
    type: Literal["categorical", "sequence", "meta", "numeric", "embedding"] = "categorical"
    min_categr_count: Count | None = None


class LabelColumn(BaseModel):
    """``label_col``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str = Field(min_length=1)
    dtype: Literal["float", "int"] = "float"


class Section(BaseModel):
    """A mapping of a config. Which keys must be given is decided where they are read: each has a default here."""

    model_config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    owner: ClassVar[str] = ""
    """The class that reads the section, for errors."""


class DataSection(Section):
    """How a data set is built and opened. FuxiCTR alone reads those of :data:`ctr_pe.fuxictr.older_keys.UNREAD`."""

    data_block_size: Blocks = -1
    data_format: Literal["csv", "parquet", "npz"] = "parquet"
    data_root: Place | None = None
    feature_cols: list[dict[str, Any]] = []
    feature_config: dict[str, Any] | None = None
    label_col: LabelColumn | Annotated[list[LabelColumn], Field(min_length=1, max_length=1)] | None = None
    min_categr_count: Count = 1
    partition_block_size: Blocks = -1
    pickle_feature_encoder: bool = True
    rebuild_dataset: bool = True
    sep: Annotated[str, Field(pattern=r"^[\t\x20-\x7e]$", description="one character")] = ","
    split_type: Literal["sequential", "random"] = "sequential"
    test_data: Place | None = None
    test_size: Rate = 0
    train_data: Place | None = None
    use_hdf5: bool = True
    valid_data: Place | None = None
    valid_size: Rate = 0


class DatasetSection(DataSection):
    """A section of a dataset config."""

    group_id: str | None = None
    target_field: Fields = None
    sequence_field: Fields = None
    neg_seq_field: Fields = None
    age_field: Ages = None


class TrainingSection(Section):
    """The training loop, its optimiser and what selects the epoch."""

    accumulation_steps: Literal[1] = 1
    amp: bool = False
    batch_size: Count = 10_000
    class_weight: ClassWeight | None = None
    deterministic: bool = False
    early_stop_patience: Index = 2
    embedding_init: PositiveText = 1e-4
    embedding_regularizer: Regularizer = None
    epochs: Count = 10
    eval_steps: Count | None = None
    gpu: Annotated[int, Field(ge=-1, lt=1024, description="the number of a GPU, or -1 for the CPU")] = -1
    learning_rate: PositiveText = 1e-3
    learning_rate_schedule: Schedule = "constant"
    like_length: Index = 0
    linear_init: PositiveText | None = None
    loss: Loss = "binary_crossentropy"
    max_gradient_norm: PositiveText = 10.0
    metrics: Annotated[list[Metric], Field(min_length=1, description="a list of metrics")] = [*METRICS]
    min_batches: Index = 0
    monitor: Monitor = "AUC"
    monitor_mode: Annotated[str, _one_of(("max", "min"))] | None = None
    net_regularizer: Regularizer = None
    num_workers: Annotated[int, Field(ge=0, le=1024, description="a whole number from 0 to 1024")] = 0
    optimizer: OptimizerName = "Adam"
    reduce_lr_on_plateau: bool = True
    save_best_only: bool = True
    seed: Seed = 0
    shuffle: bool = True
    table_optimizer: TableOptimizer | None = None
    task: Annotated[str, _one_of(("binary_classification",))] = "binary_classification"
    verbose: Index = 0
    weight_average: PositiveText | None = None
    weighted_metrics: bool = False

    @model_validator(mode="after")
    def _mode(self) -> Self:
        monitor_mode(self.monitor, self.monitor_mode)
        return self


class ExperimentSection(TrainingSection, DatasetSection):
    """All keys that do not depend on the model."""

    dataset_id: Name = ""
    debug_mode: bool = False
    feature_specs: list[FeatureChange] | None = None
    model: str = ""
    model_id: Name = ""
    model_root: Place | Path = ""
    position_encoding: Encodings = "none"
    track: Annotated[str, AfterValidator(_tracker)] | None = None
    use_features: Annotated[list[str], Field(min_length=1)] | None = None


_WORDS = {
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
    return _WORDS.get(get_origin(kind) or kind)


def _line(key: str, kind: Any, found: Sequence[ErrorDetails], value: Any) -> str:
    """What is wrong with the value of a key; ``found``: pydantic's errors, several where a type is a union."""
    problem = next((one for one in found if one["type"] == "unknown_name"), found[0])
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return str(cause)
    if problem["type"] == "unknown_name":
        return f"{key} {problem['msg']}"
    said = words(kind)
    if said is None and len(problem["loc"]) > 1:
        nested = FeatureChange if key == "feature_specs" else LabelColumn
        return f"{key}: {explain({**problem, 'loc': problem['loc'][1:]}, nested)}"
    return f"{key} must be {said or short(problem['msg'])}, got {shown(value)}"


def problems(section: type[Section], given: Mapping[str, Any]) -> dict[str, str]:
    """The keys of a mapping that the section lacks or whose values are wrong, each with its one line."""
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in given.items()}
    try:
        section.model_validate(plain)
    except ValidationError as error:
        by_key: dict[str, list[ErrorDetails]] = {}
        for one in error.errors(include_url=False):
            by_key.setdefault(str(one["loc"][0]) if one["loc"] else "monitor_mode", []).append(one)
    else:
        return {}
    lines = {}
    for key, found in by_key.items():
        if found[0]["type"] == "extra_forbidden":
            lines[key] = unknown(section, key)
        else:
            field = section.model_fields[key]
            lines[key] = _line(key, Annotated[field.annotation, field], found, plain.get(key))
    return lines


def unknown(section: type[Section], key: str) -> str:
    """The line for a key that the section lacks."""
    owner = f"{section.owner}: " if section.owner else ""
    return f"{owner}key {quoted(key)} is unknown: {nearest(key, section.model_fields)}"


def check(section: type[Section], given: Mapping[str, Any]) -> None:
    """Raises UserError for the first key of a mapping that the section lacks or whose value is wrong."""
    for problem in problems(section, given).values():
        raise UserError(problem)


def valid(key: str, kind: Any, value: Any) -> Any:
    """The value as its type spells it (``sgd`` is ``SGD``). Raises UserError: one line that begins with the key."""
    one = _section_of_one(kind)
    try:
        return vars(one.model_validate({"value": value}))["value"]
    except ValidationError as error:
        field = one.model_fields["value"]
        found = error.errors(include_url=False)
        raise UserError(_line(key, Annotated[field.annotation, field], found, value)) from None


@cache
def _section_of_one(kind: Any) -> type[Section]:
    return create_model("One", __base__=Section, value=(kind, ...))


def section(name: str, kinds: Mapping[str, Any], base: type[Section] = Section) -> type[Section]:
    """``base`` with more keys. Annotations that pydantic cannot check, of another package, take any value."""
    own = {key: kind for key, kind in kinds.items() if key not in base.model_fields}

    def made(kinds: Mapping[str, Any]) -> type[Section]:
        fields: Any = {key: (kind, None) for key, kind in kinds.items()}
        return create_model(name, __base__=base, **fields)

    def checkable(kind: Any) -> bool:
        try:
            return bool(made({"value": kind}))
        except (PydanticUserError, PydanticUndefinedAnnotation):
            return False

    try:
        found = made(own)
    except (PydanticUserError, PydanticUndefinedAnnotation):
        found = made({key: kind if checkable(kind) else Any for key, kind in own.items()})
    found.owner = name
    return found


@cache
def parameters(cls: type) -> dict[str, Any]:
    """The parameters of a class's constructor and of those that it hands keyword arguments on to, each with its type;
    Any for those of FuxiCTR, which have none."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if "__init__" not in vars(base) or base.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        init: Any = vars(base)["__init__"]
        try:
            hints = get_type_hints(init, include_extras=True)
        except (NameError, AttributeError, TypeError):  # another package's, of names for type checkers alone
            hints = {}
        _, *named = inspect.signature(init).parameters.values()
        found |= {p.name: hints.get(p.name, Any) for p in named if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return found


class Validated:
    """A class whose constructor checks its keyword arguments, as their annotations say, before it runs."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
        if owner is not cls and issubclass(owner, Validated):  # checks; an object finds its constructor by its own MRO
            return
        init: Any = vars(owner)["__init__"]

        @wraps(init)
        def checked(self: Any, *args: Any, **given: Any) -> None:
            if type(self).__init__ is checked:  # not once more for each class that it is derived from
                type(self).check_arguments(given)
            init(self, *args, **given)

        type.__setattr__(cls, "__init__", checked)

    @classmethod
    def check_arguments(cls, given: Mapping[str, Any]) -> None:
        """Raises UserError for the first argument that is wrong."""
        owner: type = cls
        own = _arguments(owner)
        check(own, {key: value for key, value in given.items() if key in own.model_fields})


@cache
def _arguments(cls: type) -> type[Section]:
    return section(cls.__name__, parameters(cls))
