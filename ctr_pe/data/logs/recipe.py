"""How `ctr-pe data build` reads a log: columns, protocol, split. From flags or from a YAML file."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from ctr_pe.config.columns import Behaviours, Declared, DeclaredColumn, Source, in_words
from ctr_pe.config.field_groups import LogHistory
from ctr_pe.config.yaml import load_yaml, packaged_yaml, parse_yaml
from ctr_pe.data.dataset import ID, ITEM, LABEL, USER, WEIGHT, open_dataset
from ctr_pe.data.logs.clock import Unit
from ctr_pe.data.logs.labels import label_column, several_labels
from ctr_pe.data.logs.places import Address, beside, place
from ctr_pe.data.root import REPORT
from ctr_pe.utils.errors import UserError, explain, nearest, option, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

Value = int | str
NEXT_ITEM = ("leave-one-out", "temporal")
PROTOCOLS_OF = {
    "negatives": ("impressions",),
    "split": ("impressions",),
    "valid_fraction": ("impressions", "temporal"),
    "test_fraction": ("impressions", "temporal"),
    "behaviours": ("din", "impressions"),
    "weight": ("din", "impressions"),
    "windows": NEXT_ITEM,
}
"""Keys that not every protocol has -> those that have them."""


Table = Annotated[Path | Address, PlainValidator(place), PlainSerializer(str)]


class SplitColumn(BaseModel):
    """Rows whose ``column`` equals ``test`` or ``valid`` go there, all others train."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    column: str
    test: Value
    valid: Value

    @model_validator(mode="after")
    def _different(self) -> Self:
        if self.test == self.valid:
            raise ValueError(f"test and valid are the same rows, those of {shown(self.test)}")
        return self


class Recipe(BaseModel):
    """How a log becomes a data set.

    The columns ``time``, ``order``, ``label`` and ``attributes`` are used when the files have them under their default
    names, must exist when they are named, and are left alone when they are set to null. ``order`` decides what is
    earlier; without it ``time`` does, and events of the same time are not each other's history. ``append_to``: a data
    set of an earlier log, whose ids all stay; its rules hold where no others are given, and it knows its items.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    interactions: Table
    items: Table | None = None
    users: Table | None = None
    append_to: Path | None = None
    protocol: Literal["din", "impressions", "leave-one-out", "temporal"]
    user: str = "user_id"
    item: str = "item_id"
    time: str | None = "timestamp"
    order: str | None = "position"
    label: str | None = "label"  # or a threshold, "rating >= 4"
    weight: str | None = None  # of a row in the loss, 0 or more; of an event in protocol din
    attributes: tuple[str, ...] | None = ("cate_id",)
    columns: dict[str, Declared] = {}  # what else is read, see ctr_pe.config.columns
    time_unit: Unit = "s"  # of times that are numbers
    time_format: str | None = None  # of times that are texts, if they are not in the form of ISO 8601
    separator: str | None = None  # of the columns of text files; without it a tab in .tsv, a comma in .csv
    keep: Literal["first", "last", "all"] | None = None  # of rows of one event: same user, item, time and order
    strict: bool = False  # whether missing values of attributes and declared columns are an error
    max_len: int = Field(100, ge=1, le=10**6)  # most recent items kept of a history
    seed: int = Field(0, ge=0, lt=2**32)  # of the sampled negatives
    drop: dict[str, Value | list[Value]] = {}  # rows whose column has this value (or one of these)
    behaviours: Behaviours | None = None  # a history per value of a column
    negatives: bool = False  # impressions: a second history of the user's earlier negatives
    windows: Literal["all", "newest"] = "all"  # next-item: of a history longer than max_len, in training
    split: SplitColumn | None = None  # impressions; without it by time:
    valid_fraction: float = Field(0.1, gt=0, lt=1)  # of the rows, before the test rows; temporal: 0.02 by default
    test_fraction: float = Field(0.1, gt=0, lt=1)  # of the rows, the newest; temporal: 0.03 by default

    @model_validator(mode="before")
    @classmethod
    def _percentiles(cls, given: Any) -> Any:
        """Protocol temporal splits at the percentiles 95 and 97 (Nabiev 2026, section 5.1)."""
        if isinstance(given, dict) and given.get("protocol") == "temporal":
            return {"valid_fraction": 0.02, "test_fraction": 0.03, **given}
        return given

    @field_validator("separator")
    @classmethod
    def _one_sign(cls, given: str | None) -> str | None:
        sign = {"tab": "\t", "\\t": "\t"}.get(given or "", given)
        if sign is not None and (len(sign.encode()) != 1 or sign in '"\r\n'):
            raise ValueError("one sign, such as ; or |, or tab")
        return sign

    @field_validator("label", mode="before")
    @classmethod
    def _one(cls, label: Any) -> Any:
        if isinstance(label, (list, tuple)):
            raise ValueError(several_labels(label))
        return label

    @field_serializer("columns")
    def _as_given(self, columns: dict[str, DeclaredColumn]) -> dict[str, Any]:
        return {name: column.model_dump(mode="json", exclude_defaults=True) for name, column in columns.items()}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key in sorted(PROTOCOLS_OF.keys() & self.model_fields_set):
            if self.protocol not in PROTOCOLS_OF[key] and getattr(self, key) is not None:
                where = " and ".join(PROTOCOLS_OF[key])
                raise ValueError(f"'{key}' belongs to protocol {where}, not to {self.protocol}")
        roles = {role: getattr(self, role) for role in ("user", "item", "time", "order", "label")}
        if self.behaviours:
            roles["behaviours"] = self.behaviours.column
        if self.label is not None and (made_of := label_column(self.label)) != self.label:
            roles["label"] = made_of
            if (column := self.columns.get(made_of)) and column.known == "afterwards":
                del roles["label"]  # histories may have what the label is made of, targets may not
        if self.item in (self.attributes or ()):
            roles["attributes"] = self.item
        for name in filter(None, (*roles.values(), *(self.attributes or ()), *self.columns)):
            if name == "*" or (name.startswith("^") and name.endswith("$")):
                raise ValueError(f"column '{name}': polars takes this name for several columns: rename it")
        own = {LABEL, USER, ITEM, *([WEIGHT] if self.weight else [])}
        attributes = [name for name in self.attributes or () if name != self.item]
        for name in (*attributes, *self.columns):
            where = "columns" if name in self.columns else "attributes"
            if name in own | ({*roles.values()} if name in self.columns else set()):
                raise ValueError(f"{where}: '{name}' is the name of another column of the data set: rename it")
            if "." in name:
                raise ValueError(f"{where}: '{name}': an input's name has no dot (torch reads it as a path): rename it")
            if name.endswith(ID):
                raise ValueError(f"{where}: '{name}': names that end with '{ID}' are those of ids: rename it")
        for name, column in self.columns.items():
            if name == "user" and column.source == "user":
                raise ValueError("columns: 'user' is the name of the key of the table of users: rename it")
            if column.source == "item" and name in (self.attributes or ()) and "attributes" in self.model_fields_set:
                raise ValueError(f"'{name}' is both in attributes and in columns")
        for (role, name), (other, same) in combinations(roles.items(), 2):
            if name == same is not None:
                raise ValueError(f"column '{name}' is both '{role}' and '{other}': a column has one role")
        if self.valid_fraction + self.test_fraction >= 1:
            raise ValueError("valid_fraction + test_fraction leave no training rows")
        return self

    @property
    def next_item(self) -> bool:
        """Whether rows ask which item comes next, of all items."""
        return self.protocol in NEXT_ITEM

    @property
    def chosen_only(self) -> bool:
        """Whether all events of the log were chosen: rows with label 0 are left out and counted."""
        return self.protocol != "impressions"

    @property
    def histories(self) -> tuple[LogHistory, ...]:
        """Those of a row."""
        texts = self.behaviours.texts if self.behaviours else ()
        found = [LogHistory(re.sub(r"\W", "_", text) + "_history", behaviour=text) for text in texts] or [LogHistory()]
        return (*found, *([LogHistory("neg_history", chosen=False)] if self.negatives else ()))

    def of(self, source: Source) -> dict[str, DeclaredColumn]:
        """The declared columns of the user, item or event."""
        return {name: column for name, column in self.columns.items() if column.source == source}

    def of_history(self) -> dict[str, DeclaredColumn]:
        """Those of the event that histories have too."""
        return {name: column for name, column in self.of("event").items() if column.normalizer is None}

    def of_rows(self) -> dict[str, DeclaredColumn]:
        """Those of the user, and of the event those that histories have not."""
        in_history = self.of_history()
        both = self.of("user") | self.of("event")
        return {name: column for name, column in both.items() if name not in in_history}

    def demanded(self, role: str) -> bool:
        """Whether the column of this role was named, so that its absence is an error."""
        return role in self.model_fields_set and getattr(self, role) is not None


def load_recipe(name: str | None, given: Mapping[str, Any]) -> Recipe:
    """The recipe of that name or file, with the values in ``given`` on top. Raises UserError naming the wrong key."""
    content = {} if name is None else _read(name)
    if earlier := given.get("append_to") or content.get("append_to"):
        content = _rules_of(Path(earlier)) | content
    try:
        return Recipe.model_validate({**content, **given})
    except ValidationError as error:
        problem = error.errors()[0]
        absent = problem["type"] == "missing" and len(problem["loc"]) == 1
        how = f": {option(str(problem['loc'][0]))}" if absent else ""
        raise UserError(f"{name or 'options'}: {explain(problem, Recipe, SplitColumn, Behaviours)}{how}") from None


def _rules_of(folder: Path) -> dict[str, Any]:
    """What the recipe of a data set says about columns, protocol and split."""
    dataset = open_dataset(str(folder.resolve()))
    recipe = json.loads((dataset.path / REPORT).read_text(encoding="utf-8")).get("recipe")
    if not isinstance(recipe, dict):
        raise UserError(f"{folder}: not a data set of a log: it has no recipe to go on with")
    files = {"interactions", "items", "users", "append_to"}
    default = {key: field.default for key, field in Recipe.model_fields.items() if key in recipe.keys() - files}
    default = {key: list(value) if isinstance(value, tuple) else value for key, value in default.items()}  # as in JSON
    return {key: recipe[key] for key, value in default.items() if recipe[key] != value}


def _read(name: str) -> dict[str, Any]:
    path, shipped = Path(name), packaged_yaml("recipe")
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UserError(f"{name}: no such recipe file")
        content = load_yaml(path)
    elif name in shipped:
        content = parse_yaml(shipped[name], name)
    else:
        raise UserError(f"--recipe {name}: no such recipe, a file ends with .yaml: {nearest(name, shipped)}")
    if not isinstance(content, dict):
        raise UserError(f"{name}: a recipe is a mapping of keys: {nearest('', Recipe.model_fields)}")
    for key in ("interactions", "items", "users", "append_to"):  # beside the recipe, wherever the command runs
        if isinstance(content.get(key), str):
            content[key] = beside(path.parent, content[key])
    if isinstance(columns := content.get("columns"), dict):
        content["columns"] = {name: _beside(path, given) for name, given in columns.items()}
    return content


def _beside(recipe: Path, column: Any) -> Any:
    """A declaration whose file of vectors is named from where the recipe is."""
    keys = in_words(column)
    if not isinstance(keys, dict) or not isinstance(keys.get("pretrained_emb"), str):
        return column
    return {**keys, "pretrained_emb": recipe.parent / keys["pretrained_emb"]}
