"""What a data set's report.json has to hold."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ctr_pe.utils.errors import explain


class FileFacts(BaseModel):
    """What is written down about a file."""

    model_config = ConfigDict(strict=True)

    bytes: int
    blake2b: str


class StoredGroup(BaseModel):
    model_config = ConfigDict(strict=True)

    target: list[str]
    history: list[str]
    age: str | None


class DatasetReport(BaseModel):
    """What is read of report.json; the rest is for readers."""

    model_config = ConfigDict(strict=True)

    files: dict[str, FileFacts]
    rows: dict[str, int]
    group_id: str | None
    label: str
    max_len: int
    groups: list[StoredGroup]


def report_problem(content: Any) -> str | None:
    """What is wrong with the content of a report, or None."""
    try:
        DatasetReport.model_validate(content)
    except ValidationError as error:
        return explain(error.errors(include_url=False)[0], DatasetReport)
    return None
