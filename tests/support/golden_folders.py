"""Which model folders are kept in folders/, and what a model folder says of its requests.

Only names that users call are used here: ``load``, the command ``ctr-pe predict`` and ``POST /rank``.

folders/NAME/model/            the model folder
folders/NAME/requests.parquet  what is asked: known, rare and unknown ids; users without and with long histories
folders/NAME/events.parquet    histories to ask it with, where the requests do not bring them as lists
folders/NAME/scores.json       the answers
folders/rank.json              requests to the service of some of these folders, with its answers
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl

from ctr_pe import load
from ctr_pe.serving import service

FOLDERS = Path(__file__).parents[1] / "golden" / "folders"
NAMES = ("din_cape", "dien_none", "bst_kernel", "sasrec_rope_cape", "tin_time_bias")


def events_of(name: str) -> Path | None:
    """The file of histories, if there is one."""
    file = FOLDERS / name / "events.parquet"
    return file if file.is_file() else None


def answers(name: str) -> dict[str, Any]:
    """What the model in a folder answers: scores with the histories given, and with those that it has itself where it
    has some, the three best items of every user, and what it did not know."""
    ranker, requests = load(FOLDERS / name / "model"), pl.read_parquet(FOLDERS / name / "requests.parquet")
    untimed = requests.select(name for name in requests.columns if name != ranker.time)
    events = None if events_of(name) is None else pl.read_parquet(FOLDERS / name / "events.parquet")
    found: dict[str, Any] = {"scores": ranker.predict_proba(requests, events)[:, 1].tolist()}
    found["unknown"] = ranker.unknown_
    if events is not None:
        best = ranker.rank(events, untimed, k=3)
        found["ranked"] = {column: best[column].to_list() for column in (ranker.user, ranker.item, "score", "rank")}
    if (FOLDERS / name / "model" / "histories.parquet").is_file():
        found["scores with stored histories"] = ranker.predict_proba(untimed)[:, 1].tolist()
        found["unknown with stored histories"] = ranker.unknown_
    return found


def of_service(name: str, body: dict[str, Any]) -> dict[str, Any]:
    """Status and answer of ``POST /rank`` to a body, without the hash that names the model."""
    from fastapi.testclient import TestClient

    with TestClient(service.application(FOLDERS / name / "model")) as client:
        answer = client.post("/rank", json=body)
    content = json.loads(answer.content)
    content.pop("model", None)
    return {"status": answer.status_code, "answer": content}
