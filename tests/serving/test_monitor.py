"""``ctr-pe monitor``: planted drift is found and named, its absence is not; what the profile of training rows holds."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from ctr_pe import CTRRanker, load
from ctr_pe.cli import main
from ctr_pe.commands.monitor import DRIFT
from ctr_pe.data.logs.log import build
from ctr_pe.data.logs.recipe import load_recipe
from ctr_pe.serving.model_folder import MANIFEST, PROFILE, keep_model
from ctr_pe.serving.monitor import DriftLimits, monitor
from ctr_pe.training import Run, train
from ctr_pe.utils.errors import UserError
from tests.support.fuzz.small_log import SMALL
from tests.support.golden_folders import FOLDERS, NAMES, events_of

USERS, DAY = 300, 86_400
QUICK = {**SMALL, "epochs": 3, "learning_rate": 0.02}


def shown(events: int, seed: int, first: int = 0) -> pl.DataFrame:
    """Impressions of 40 items, most of the first; those of even number are clicked often, at any price and hour."""
    draw = np.random.default_rng(seed)
    item = np.minimum(draw.geometric(0.06, events) - 1, 39)
    return pl.DataFrame(
        {
            "user_id": draw.integers(0, USERS, events),
            "item_id": [f"item {i}" for i in item],
            "timestamp": first + np.sort(draw.integers(0, DAY, events)),
            "hour": draw.integers(0, 24, events).astype(str),
            "price": draw.normal(10, 2, events),
            "label": (draw.random(events) < np.where(item % 2 == 0, 0.7, 0.2)).astype(np.int8),
        }
    ).unique(["user_id", "item_id", "timestamp"], maintain_order=True)


COLUMNS = {"hour": "event", "price": "event, numeric, normalizer=StandardScaler"}
OLD, NEW = shown(8000, 0), shown(2500, 1, DAY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "model"
    CTRRanker("DIN", "none", columns=COLUMNS, **QUICK).fit(OLD).save(folder)
    return folder


@pytest.fixture
def called(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def call(events: pl.DataFrame, *options: str, model: Path = folder) -> tuple[int, str]:
        events.write_parquet(tmp_path / "new.parquet")
        code = main(["monitor", "--model", str(model), "--events", str(tmp_path / "new.parquet"), *options])
        caught = capsys.readouterr()
        return code, caught.out if code in (0, DRIFT) else caught.err

    return call


def test_without_drift_no_limit_is_crossed(called: Callable[..., tuple[int, str]]) -> None:
    code, out = called(NEW)
    assert (code, out.splitlines()[-1]) == (0, "drift: none, no limit is crossed")


def test_users_of_whole_floats_are_those_of_whole_numbers(folder: Path, called: Callable[..., tuple[int, str]]) -> None:
    """As in training; so it is where a model is evaluated."""
    floats = NEW.with_columns(pl.col("user_id").cast(pl.Float64))
    assert called(floats) == called(NEW)
    ranker = CTRRanker.load(folder)
    assert ranker.evaluate(floats) == ranker.evaluate(NEW)


def even(share: float) -> pl.Expr:
    """Whether a row is among a share of them, whatever it holds."""
    return pl.int_range(pl.len()) % 100 < 100 * share


FEW_KNOW = pl.when(even(0.2)).then(pl.lit("never seen")).otherwise("item_id").alias("item_id")
PLANTED = {  # change, the sentence, and what else it moves
    "new items": (FEW_KNOW, r"item_id: 2.*% unknown ids, 0", {"gAUC"}),
    "other items": (
        pl.when(even(0.6)).then(pl.lit("item 20")).otherwise("item_id").alias("item_id"),
        r"item_id: population stability index \d.*, above 0.2",
        {"gAUC", "mean"},
    ),
    "other hours": (
        pl.when(even(0.7)).then(pl.lit("3")).otherwise("hour").alias("hour"),
        r"hour: population stability index \d.*, above 0.2",
        set(),
    ),
    "other prices": (pl.col("price") * 1.3, r"price: population stability index \d.*, above 0.2", set()),
    "fewer clicks": (
        pl.col("label") * even(0.6),
        r"mean prediction .*, click rate .*: more than 0.1 of it off",
        {"gAUC"},
    ),
    "opposite clicks": ((1 - pl.col("label")).alias("label"), r"gAUC .*, more than 0.02 below 0\.", {"mean"}),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_drift_is_named(planted: str, called: Callable[..., tuple[int, str]]) -> None:
    change, message, others = PLANTED[planted]
    code, out = called(NEW.with_columns(change))
    named = [line.removeprefix("drift: ") for line in out.splitlines() if line.startswith("drift: ")]
    assert code == DRIFT
    assert any(re.match(message, line) for line in named), named
    assert {line.split()[0] for line in named} <= {message.split()[0], *others}


def test_a_limit_is_an_option_and_its_sentence_goes(called: Callable[..., tuple[int, str]]) -> None:
    changed = NEW.with_columns(PLANTED["other hours"][0])
    assert called(changed, "--psi", "9")[0] == 0
    changed = NEW.with_columns(FEW_KNOW)
    assert "unknown ids" not in called(changed, "--unknown", "0.5")[1]
    code, error = called(changed, "--unknown", "-1")
    assert (code, error) == (2, "ctr-pe: error: --unknown -1.0: a number from 0\n")


def test_few_rows_raise_no_alarm(called: Callable[..., tuple[int, str]]) -> None:
    assert called(NEW.head(12))[0] == 0


def test_users_without_history_are_drift(called: Callable[..., tuple[int, str]]) -> None:
    events = NEW.with_columns(user_id=pl.int_range(pl.len()) + 10_000)
    code, out = called(events, "--json")
    report = json.loads(out)
    assert code == DRIFT
    assert report["counts"]["requests of users without stored events"] == NEW.height
    (length,) = [one for one in report["columns"] if one["name"].startswith("length of")]
    assert length["unknown"]["value"] == pytest.approx(1)
    assert any("100.0% rows without history" in sentence for sentence in report["drift"])
    assert report["metrics"]["gAUC"] == {"value": None, "low": None, "high": None}
    assert "gAUC: none of" in " ".join(report["notes"])


def test_the_json_has_what_the_report_has(folder: Path, tmp_path: Path, called: Callable[..., tuple[int, str]]) -> None:
    _, out = called(NEW, "--json")
    found, report = json.loads(out), monitor(folder, tmp_path / "new.parquet")
    assert found == json.loads(json.dumps(report.content()))
    assert [one["name"] for one in found["columns"]] == ["item_id", "hour", "price", "length of item_history"]
    metrics = found["metrics"]
    assert metrics["gAUC"]["low"] < metrics["gAUC"]["value"] < metrics["gAUC"]["high"]
    assert found["calibration"]["observed"] == pytest.approx(NEW["label"].mean())
    assert sum(found["calibration"]["bins"]["rows"]) == NEW.height


def test_the_page_has_the_sentences_and_the_columns(tmp_path: Path, called: Callable[..., tuple[int, str]]) -> None:
    pytest.importorskip("jinja2")
    page = tmp_path / "drift.html"
    _, out = called(NEW.with_columns(PLANTED["other prices"][0]), "--out", str(page))
    html = page.read_text(encoding="utf-8")
    for line in out.splitlines():
        if line.startswith("drift: "):
            assert line.removeprefix("drift: ") in html
    assert html.count('<div class="bins">') == 4
    assert "<script" not in html


def test_labels_and_files_that_say_little(called: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    """One class, no labels, no rows, no column, no file: a note or one line."""
    _, out = called(NEW.with_columns(label=pl.lit(0)))
    assert "AUC: all rows have label 0" in out
    code, out = called(NEW.drop("label"))
    assert code == 0
    assert "no column 'label': no quality and calibration" in out
    assert "gAUC" not in out
    for events, message in (
        (NEW.clear(), r"new\.parquet: no rows"),
        (NEW.drop("item_id"), r"new\.parquet: no column 'item_id'"),
        (NEW.drop("hour"), r"new\.parquet: no column 'hour'"),
        (NEW.with_columns(label=pl.lit(3)), r"label column 'label' holds"),
    ):
        code, error = called(events)
        assert code == 2
        assert re.search(message, error)
        assert error.count("\n") == 1
    assert main(["monitor", "--model", str(tmp_path), "--events", str(tmp_path / "new.parquet")]) == 2


def test_a_folder_without_profile_takes_its_data_set(
    folder: Path, tmp_path: Path, called: Callable[..., tuple[int, str]]
) -> None:
    OLD.head(7000).write_parquet(tmp_path / "log.parquet")
    given = {"interactions": tmp_path / "log.parquet", "protocol": "impressions", "columns": COLUMNS}
    dataset = build(load_recipe(None, given), tmp_path / "data" / "log")
    made = tmp_path / "kept"
    params = {**QUICK, "epochs": 1, "max_len": 50}
    train(Run("DIN", dataset.path, "none", 0, "heldout", params, keep=lambda *of: keep_model(made, *of)))
    profile = pl.read_parquet(made / PROFILE)
    without = shutil.copytree(made, tmp_path / "old")
    (without / PROFILE).unlink()
    manifest = json.loads((without / MANIFEST).read_text())
    del manifest["files"][PROFILE]
    (without / MANIFEST).write_text(json.dumps(manifest))
    _, out = called(NEW, "--log", str(tmp_path / "log.parquet"), model=without)
    assert "old: no profile.parquet, written by an earlier version: --dataset NAME compares with its data set" in out
    options = ["--log", str(tmp_path / "log.parquet"), "--json"]
    _, want = called(NEW, *options, model=made)
    _, found = called(NEW, *options, "--dataset", str(dataset.path), model=without)
    assert json.loads(found) == {**json.loads(want), "model": str(without)}
    code, error = called(NEW, "--dataset", str(dataset.path), model=folder)
    assert code == 2
    assert "not the data set that" in error
    rows = pl.read_parquet(dataset.split("train"))
    for name in ("item_id", "hour"):
        of_column = profile.filter(pl.col("column") == name).select(pl.col("value").cast(pl.Int64), "rows", "chosen")
        counted = rows.group_by(pl.col(name).cast(pl.Int64)).agg(rows=pl.len(), chosen=pl.col("label").sum())
        assert of_column.sort("value").rows() == counted.sort(name).rows()
    prices = profile.filter(pl.col("column") == "price")
    assert prices["rows"].sum() == rows.height
    assert prices["rows"].max() < 2 * rows.height / 100 + 2


def test_training_rows_have_not_drifted_in_any_column(tmp_path: Path) -> None:
    """Scored as requests they are, column by column, what training counted: categories, several of them, numbers in
    buckets and as such, columns of users and items, lengths."""
    draw = np.random.default_rng(3)
    log = OLD.head(3000).with_columns(
        tags=pl.Series([draw.choice(list("abcde"), draw.integers(0, 4), replace=False).tolist() for _ in range(3000)]),
        amount=pl.when(pl.int_range(pl.len()) % 7 > 0).then("price"),
        timestamp=DAY + pl.int_range(pl.len()),
    )
    users = pl.DataFrame({"user_id": range(USERS), "city": [None if i % 9 == 0 else f"c{i % 5}" for i in range(USERS)]})
    items = pl.DataFrame({"item_id": [f"item {i}" for i in range(40)], "brand": [f"b{i % 6}" for i in range(40)]})
    columns = {**COLUMNS, "tags": "event, sequence", "amount": "event, numeric", "city": "user"}
    ranker = CTRRanker("DIN", "none", columns=columns, **{**QUICK, "epochs": 1}).fit(log, items=items, users=users)
    ranker.save(tmp_path / "model")
    log.head(ranker.report_["rows"]["train"]).write_parquet(tmp_path / "new.parquet")
    log.write_parquet(tmp_path / "log.parquet")
    report = monitor(tmp_path / "model", tmp_path / "new.parquet", tmp_path / "log.parquet")
    found = {one.name: one for one in report.columns}
    assert found.keys() == {"item_id", "brand", "hour", "price", "tags", "amount", "city", "length of item_history"}
    for name, one in found.items():
        assert one.psi == pytest.approx(0, abs=1e-9), name
        if name != "price":
            assert one.unknown.value == pytest.approx(one.unknown_trained), name
    assert found["amount"].missing > 0
    assert report.calibration is not None
    assert report.calibration.trained == report.calibration.observed
    assert not any(sentence.startswith(f"{name}:") for sentence in report.drift for name in found)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_of_an_earlier_version_is_compared_as_far_as_can_be(name: str, tmp_path: Path) -> None:
    """Whatever its columns are called, with a catalogue and without."""
    names = load(FOLDERS / name / "model").scorer_.encoder.columns
    events = pl.read_parquet(FOLDERS / name / "requests.parquet")
    clicked = np.random.default_rng(0).integers(0, 2, events.height)
    events.with_columns(pl.Series(names.label, clicked)).write_parquet(tmp_path / "new.parquet")
    report = monitor(FOLDERS / name / "model", tmp_path / "new.parquet", events_of(name))
    assert report.notes[0].endswith("written by an earlier version: dataset='NAME' compares with its data set")
    assert report.metrics["gAUC"].low < report.metrics["gAUC"].high
    assert report.columns
    assert all(np.isnan(one.psi) and np.isnan(one.unknown_trained) for one in report.columns)
    assert not any("in training" in sentence for sentence in report.drift)


def test_an_update_counts_the_rows_that_it_trained_on(folder: Path) -> None:
    ranker = load(folder)
    before = ranker.scorer_.profile
    ranker.partial_fit(NEW.with_columns(item_id=pl.lit("new item")).unique(["user_id", "timestamp"]))
    after = ranker.scorer_.profile
    old, new = (dict(one.group_by("column").agg(pl.col("rows").sum()).rows()) for one in (before, after))
    rows = ranker.updates_[0]["rows"]
    assert new == {name: count + rows for name, count in old.items()}
    ids = ranker.scorer_.encoder.vocabularies["item_id"]
    assert after.filter((pl.col("column") == "item_id") & (pl.col("value") == ids["new item"]))["rows"].sum() == rows


def test_chosen_events_are_compared_with_chosen_ones(tmp_path: Path, called: Callable[..., tuple[int, str]]) -> None:
    """A model of clicks saw sampled items, too: these are not what comes in."""
    clicks = OLD.filter(pl.col("label") == 1).drop("label", "hour", "price")
    CTRRanker("DIN", "none", **QUICK).fit(clicks).save(tmp_path / "model")
    new = NEW.filter(pl.col("label") == 1).drop("label", "hour", "price")
    code, out = called(new, "--json", model=tmp_path / "model")
    report = json.loads(out)
    assert (code, report["compared"]) == (0, "chosen")
    assert next(one["psi"] for one in report["columns"] if one["name"] == "item_id") < 0.05


@pytest.mark.parametrize("limit", [float("nan"), -0.1])
def test_a_limit_is_a_number_from_0(limit: float) -> None:
    with pytest.raises(UserError, match=r"psi=.*: a number from 0"):
        DriftLimits(psi=limit)


def test_the_exit_code_of_drift_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["monitor", "--help"])
    assert re.search(r"^  3    drift: a limit is crossed$", capsys.readouterr().out, re.MULTILINE)
