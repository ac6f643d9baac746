"""What a log has beside its user, item, time, order and label: one declaration for Python, YAML and flags.

A column is declared in words, ``"event, numeric"``, or as a mapping of the keys below, which are FuxiCTR's where it has
them. A column that is not declared is never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from ctr_pe.config.schema import Count, Width
from ctr_pe.utils.errors import UserError, explain, nearest

Source = Literal["user", "item", "event"]
Type = Literal["categorical", "numeric", "sequence", "embedding"]


class DeclaredColumn(BaseModel):
    """One declared column.

    ``source``: whose it is. A column of ``user`` or ``item`` comes from their table; one of ``event`` is the context of
    an event, such as its hour, device or price, and enters the target and the history; FuxiCTR's ``context`` is the
    same word. ``known``: ``afterwards`` for what exists only after the event, such as a watch time: histories have it,
    and the target has the id of missing values in its place. ``type``: ``categorical``; ``numeric``, in ``num_buckets``
    of as many training values each, or with a ``normalizer`` as one number that enters the target row alone;
    ``sequence``, several categories per value, as a list or split at ``splitter``, of which the first ``max_len`` are
    read and pooled by ``pooling``; ``embedding``, a vector of an item, from a list column or from the file
    ``pretrained_emb``, trained further unless ``freeze_emb``, and projected where a model's vectors are of another
    width. Categories rarer than ``min_categr_count`` in the training rows are unknown; with ``hash_buckets`` each takes
    one of so many ids by its text and none is unknown.
    ``share_embedding``, or ``share``: the column whose categories and embedding table this one has too.
    ``embedding_dim``: of this column alone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: Source
    type: Type = "categorical"
    known: Literal["before", "afterwards"] = "before"
    num_buckets: int = Field(20, ge=2, le=10_000)
    min_categr_count: Count = 1
    hash_buckets: int | None = Field(None, ge=1, le=10**8)
    splitter: str = Field("|", min_length=1)
    max_len: int = Field(5, ge=1, le=1000)
    pooling: Literal["mean", "sum", "attention"] = "mean"
    normalizer: Literal["StandardScaler", "MinMaxScaler"] | None = None
    pretrained_emb: Path | None = None
    freeze_emb: bool = True
    share_embedding: str | None = Field(None, validation_alias=AliasChoices("share_embedding", "share"))
    embedding_dim: Width | None = None

    @field_validator("source", mode="before")
    @classmethod
    def _fuxictr_s(cls, value: Any) -> Any:
        return "event" if value == "context" else value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.known == "afterwards" and self.source != "event":
            raise ValueError(f"a column of the {self.source} is not known: afterwards, one of the event can be")
        for key, types in OF_TYPE.items():
            if key in self.model_fields_set and self.type not in types:
                raise ValueError(f"'{key}' belongs to type {' or '.join(types)}, not to {self.type}")
        if self.type == "embedding" and self.source != "item":
            raise ValueError(f"a column of the {self.source} is no embedding: an embedding is a vector of an item")
        if self.normalizer and (self.source == "item" or self.known == "afterwards"):
            whose = "item" if self.source == "item" else "event that is known afterwards"
            raise ValueError(f"a number of the {whose} enters histories, in buckets: leave 'normalizer' out")
        for one, other in EXCLUSIVE:
            if {one, other} <= self.model_fields_set:
                raise ValueError(f"'{one}' leaves no choice of '{other}': leave one out")
        return self


OF_TYPE = {
    "num_buckets": ("numeric",),
    "min_categr_count": ("categorical", "sequence"),
    "hash_buckets": ("categorical", "sequence"),
    "splitter": ("sequence", "embedding"),
    "max_len": ("sequence",),
    "pooling": ("sequence",),
    "normalizer": ("numeric",),
    "pretrained_emb": ("embedding",),
    "freeze_emb": ("embedding",),
    "share_embedding": ("categorical", "sequence"),
}
"""Keys of a declaration -> the types that read them."""
EXCLUSIVE = (
    ("normalizer", "num_buckets"),
    ("pretrained_emb", "splitter"),
    *(("share_embedding", key) for key in ("min_categr_count", "hash_buckets", "embedding_dim")),
)
"""Keys of which a declaration has one."""
WORDS = {
    **dict.fromkeys([*get_args(Source), "context"], "source"),
    **dict.fromkeys(get_args(Type), "type"),
    "afterwards": "known",
}
"""Words of a declaration -> the key whose value they are."""


class Behaviours(BaseModel):
    """What an event was, such as a click or a purchase, by a ``column`` of the log; each of the ``values`` has a
    history of its own, and targets are events of the first. Also ``{column: values}``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    column: str = Field(min_length=1)
    values: tuple[int | str, ...] = Field(min_length=1, max_length=100)

    @model_validator(mode="before")
    @classmethod
    def _in_short(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and len(given) == 1 and not {"column", "values"} & given.keys():
            return {"column": next(iter(given)), "values": next(iter(given.values()))}
        return given

    @model_validator(mode="after")
    def _different(self) -> Self:
        if twice := [text for text in self.texts if self.texts.count(text) > 1]:
            raise ValueError(f"behaviours: '{twice[0]}' stands twice")
        return self

    @property
    def texts(self) -> tuple[str, ...]:
        """The values as they are compared with the column's: as text."""
        return tuple(map(str, self.values))

    def code(self) -> dict[str, int]:
        """Value as text -> its place in ``values``."""
        return {text: place for place, text in enumerate(self.texts)}


def in_words(text: Any) -> Any:
    """``"event, numeric, num_buckets=50"`` as the mapping it stands for; anything else unchanged.

    Raises ValueError for a word that is none.
    """
    if not isinstance(text, str):
        return text
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, given, value = part.partition("=")
        if not given and key not in WORDS:
            raise ValueError(f"'{key}' is no word of a column: {nearest(key, WORDS)}")
        found |= {key.strip(): value.strip()} if given else {WORDS[key]: key}
    return found


Declared = Annotated[DeclaredColumn, BeforeValidator(in_words)]


def declared(columns: Mapping[str, Any], where: str = "columns") -> dict[str, DeclaredColumn]:
    """The declarations of columns by name. Raises UserError naming the column and the key."""
    found = {}
    for name, given in columns.items():
        try:
            found[name] = given if isinstance(given, DeclaredColumn) else DeclaredColumn.model_validate(in_words(given))
        except ValidationError as error:
            raise UserError(f"{where}: {name}: {explain(error.errors()[0], DeclaredColumn)}") from None
        except ValueError as error:
            raise UserError(f"{where}: {name}: {error}") from None
    return found


def table_of(name: str, columns: Mapping[str, DeclaredColumn]) -> str:
    """The column whose embedding table a column has: its own, or the one at the end of ``share_embedding``.

    Raises UserError if columns share in a circle.
    """
    way = [name]
    while (one := columns.get(way[-1])) is not None and one.share_embedding is not None:
        way.append(one.share_embedding)
        if way[-1] in way[:-1]:
            raise UserError(f"columns: share_embedding goes round in a circle: {' → '.join(way)}")
    return way[-1]
