"""What ``POST /rank`` and ``/recommend`` take and give, and what is wrong with a request, by the path of each field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, NoReturn, TypeVar

import polars as pl
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ctr_pe.data.id_map import EXACT
from ctr_pe.serving.scorer import Scorer
from ctr_pe.serving.service_options import Limits
from ctr_pe.utils.errors import UserError

LARGEST = 2**63 - 1
MOST_PROBLEMS = 20  # of a request that are named


class BadRequest(Exception):
    """``problems``: ``loc``, path of a field; ``msg``; ``type``. Without the values that were sent."""

    def __init__(self, problems: list[dict[str, Any]]) -> None:
        super().__init__(problems[0]["msg"])
        self.problems = problems


def _item(value: Any) -> Any:
    if isinstance(value, float) and value % 1 == 0 and abs(value) < EXACT:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError("an item's raw id is a whole number or a string")
    if isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        raise ValueError("larger than 64 bits")
    if isinstance(value, str):
        value.encode()  # half a surrogate pair is a ValueError
    return value


def _time(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("a time is a number or a date as text")
    if isinstance(value, (int, float)) and not -LARGEST <= value <= LARGEST:
        raise ValueError("larger than 64 bits")
    return value


def _value(value: Any) -> Any:
    if any(isinstance(one, (dict, list)) for one in (value if isinstance(value, list) else [value])):
        raise ValueError("a value is text, a number, true, false or null, or a list of these")
    return value


Item = Annotated[int | str, BeforeValidator(_item)]
Value = Annotated[int | float | str | bool | list[int | float | str | bool | None] | None, BeforeValidator(_value)]
Time = Annotated[int | float | str, BeforeValidator(_time)]


class RankRequest(BaseModel):
    """One user's candidates. ``times``: of the history, as ``now``: numbers in the unit of the log, or dates as text;
    only encodings that read ages need them."""

    model_config = ConfigDict(extra="forbid")
    history: list[Item] = Field(default=[], description="raw ids of the items that the user chose, the oldest first")
    candidates: list[Item] = Field(min_length=1, description="raw ids of the items to rank")
    times: list[Time] | None = Field(None, description="when each item of the history was chosen, rising")
    now: Time | None = Field(None, description="time of the request; by default that of the newest item")
    k: int | None = Field(None, strict=True, ge=1, description="how many of the best to return; by default all")
    user: Item | None = Field(None, description="raw id of the user, by which the model's own fields are looked up")
    context: dict[str, Value] = Field({}, description="field of the request, or of the user -> raw value")
    history_context: dict[str, list[Value]] = Field(
        {}, description="field of the event, or the column of behaviours -> raw value of each history item"
    )
    candidate_context: dict[str, list[Value]] = Field({}, description="field -> raw value of each candidate")


class RankedItem(BaseModel):
    item: int | str
    score: float = Field(description="click probability")


class RankResponse(BaseModel):
    """``ranked``: the best first, of equal scores the one that was asked for first; ``model``: which one scored.
    ``counts`` is left out where there is nothing to count."""

    ranked: list[RankedItem]
    unknown_candidates: int = Field(description="candidates of the request that the model does not know")
    unknown_history: int
    counts: dict[str, int] = Field({}, description="what else was not as in the log, such as fields without a value")
    model: str


class RecommendRequest(BaseModel):
    """A user of the log that the model was fitted on, or a history, which may be empty. ``times`` and ``now`` as in
    :class:`RankRequest`."""

    model_config = ConfigDict(extra="forbid")
    user: Item | None = Field(None, description="raw id of a user whose history the model folder has")
    history: list[Item] | None = Field(None, description="raw ids of the items that the user chose, the oldest first")
    times: list[Time] | None = Field(None, description="when each item of the history was chosen, rising")
    now: Time | None = Field(None, description="time of the request; by default that of the newest item")
    k: int = Field(10, strict=True, ge=1, description="how many items to recommend")
    filter_seen: bool = Field(True, strict=True, description="leave out the newest items of the history")
    history_context: dict[str, list[Value]] = Field(
        {}, description="attribute -> raw value of each history item, for items that the model does not know"
    )


class RecommendedItem(BaseModel):
    item: int | str
    score: float = Field(description="product of the vectors of history and item; no probability")
    rank: int = Field(description="from 1")


class RecommendResponse(BaseModel):
    """``recommended``: the best first, of equal scores the more frequent item, fewer than ``k`` where no more are left;
    ``model``: which one scored. ``counts`` is left out where there is nothing to count."""

    recommended: list[RecommendedItem]
    unknown_history: int
    counts: dict[str, int] = Field({}, description="what else was not as in the log, such as an unknown user")
    model: str


Wanted = TypeVar("Wanted", RankRequest, RecommendRequest)


def parsed(body: bytes, kind: type[Wanted]) -> Wanted:
    """Raises BadRequest."""
    try:
        content = json.loads(body)
    except RecursionError:
        wrong((), "JSON in too many levels")
    except ValueError as error:  # no UTF-8, no JSON, or a number of thousands of digits
        wrong((), f"no JSON in UTF-8: {error}")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise BadRequest(_problems(error)) from None


def _problems(error: ValidationError) -> list[dict[str, Any]]:
    found = error.errors(include_url=False, include_context=False, include_input=False)[:MOST_PROBLEMS]
    return [
        {"loc": ["body", *one["loc"]], "msg": one["msg"].removeprefix("Value error, "), "type": one["type"]}
        for one in found
    ]


def check(request: RankRequest | RecommendRequest, scorer: Scorer, limits: Limits) -> None:
    """Raises BadRequest with the path of the first field that cannot be used."""
    catalogue, history = scorer.encoder.catalogue, request.history or []
    numbers = catalogue is not None and catalogue.dtype == pl.Int64
    if isinstance(request, RecommendRequest):
        if (request.user is None) == (request.history is None):
            wrong((), "a user or a history, one of them" + ("" if request.user is None else ", not both"))
        if request.user is not None and scorer.histories is None:
            wrong(("user",), "the model folder has no histories of users: give the history")
        if request.user is not None and request.history_context:
            wrong(("history_context",), "of the items of a history, which the model folder has of this user")
        if request.k > limits.candidates:
            wrong(("k",), f"at most {limits.candidates:,} items, not {request.k:,}")
    for field, most in {"history": limits.history, "candidates": limits.candidates}.items():
        values = getattr(request, field, None) or []
        if len(values) > most:
            wrong((field,), f"at most {most:,} items, not {len(values):,}")
        for place, value in enumerate(values):
            if catalogue is not None and isinstance(value, int) != numbers:
                kind = "whole numbers" if numbers else "strings"
                wrong((field, place), f"the raw ids of this model's items are {kind}")
    times = request.times
    if times is None:
        if scorer.encoder.needs_age and history:
            wrong(("times",), "this model reads the age of events: give the time of each item of the history")
        return
    if len(times) != len(history):
        wrong(("times",), f"{len(times)} for {len(history)} items of the history")
    at = moments("times", times, scorer)
    for place, (before, after) in enumerate(pairwise(at), 1):
        if after < before:
            wrong(("times", place), "before the time of the item that precedes it: the oldest comes first")
    if request.now is not None and times and moments("now", [request.now], scorer)[0] < at[-1]:
        wrong(("now",), "before the newest item of the history")


def moments(field: str, times: Sequence[Any], scorer: Scorer) -> list[int]:
    """In nanoseconds."""
    try:
        return [int(at) for at in scorer.encoder.moments(times, field)]
    except UserError as error:
        wrong((field,), str(error))


def wrong(path: tuple[str | int, ...], message: str) -> NoReturn:
    raise problem(path, message)


def problem(path: tuple[str | int, ...], message: str, *where: str) -> BadRequest:
    """``where``: of the request, by default the body."""
    return BadRequest([{"type": "value_error", "loc": [*(where or ("body",)), *path], "msg": message}])
