"""``ctr-pe report``: the page has the numbers of the store, opens from disk without a network, and reacts to clicks."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from ctr_pe.cli import main
from ctr_pe.config.yaml import parse_overrides
from ctr_pe.data.dataset import open_dataset
from ctr_pe.data.loader import BatchLoader
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.evaluation import evaluate
from ctr_pe.evaluation.paired import Difference, compare
from ctr_pe.evaluation.ranking import ranking_metrics, row_values
from ctr_pe.reporting.figures.runs import Wanted, drawn
from ctr_pe.reporting.html import Options, explorer
from ctr_pe.reporting.html.charts import curves, length_bins
from ctr_pe.reporting.html.content import as_json, colours, content, page, report, summary
from ctr_pe.study.benchmark import Request, run
from ctr_pe.study.differences import settings
from ctr_pe.study.executors import local
from ctr_pe.study.next_item import RankStatistics
from ctr_pe.study.store import Result, RunKey, Store
from ctr_pe.units import TargetAttention
from ctr_pe.utils.errors import UserError
from tests.support.browser import errors, opened, requested, waiting
from tests.support.worker_threads import WorkerThread

PES = ["none", "naive", "cape"]
SMALL = ["embedding_dim=4", "attention_hidden_units=[8]", "dnn_hidden_units=[8]", "epochs=2", "batch_size=100"]
SMALL += ["learning_rate=3e-3", "embedding_regularizer=1e-4"]  # after so few steps others give many rows one score


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generate(folder / "synthetic", users=60, valid_users=30, test_users=40, items=200, categories=10)
    return folder


@pytest.fixture(scope="module")
def made(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, dict[str, Any]]:
    """A benchmark's store, and the content of its page, read from the page."""
    out = tmp_path_factory.mktemp("results") / "small"
    params = parse_overrides(SMALL)
    how = {"dataset": "synthetic", "repeats": 2, "jobs": 1, "data_root": root, "keep_weights": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "_Worker", WorkerThread)
        assert run(Request(encodings=PES, params=params, out=out, **how)) == 0
    assert main(["report", str(out), "--data-root", str(root), "--users", "7"]) == 0
    return Store(out), embedded((out / "report.html").read_text(encoding="utf-8"))


def embedded(html: str) -> dict[str, Any]:
    found = re.findall(r'<script type="application/json" id="content">(.*?)</script>', html, re.DOTALL)
    assert len(found) == 1
    content: dict[str, Any] = json.loads(found[0])
    return content


def rows_of(store: Store, key: RunKey) -> tuple[Any, Any]:
    rows = store.rows(key.data_hash)
    assert rows is not None
    return rows


def copied(store: Store, folder: Path) -> Store:
    shutil.copytree(store.path, folder)
    return Store(folder)


def only_table(found: dict[str, Any]) -> dict[str, Any]:
    (table,) = found["tables"]
    return table  # type: ignore[no-any-return]


@pytest.mark.slow
def test_differences_are_those_of_the_table_and_of_the_scores(made: tuple[Store, dict[str, Any]]) -> None:
    store, found = made
    table = only_table(found)
    assert table["encodings"] == PES
    with open(store.path / "table.csv", encoding="utf-8", newline="") as file:
        lines = {line["pe"]: line for line in csv.DictReader(file)}
    for row in table["rows"]:
        assert row["gAUC_mean"] == float(lines[row["pe"]]["gAUC_mean"])
    assert table["differences"]["none"].keys() == {"naive", "cape"}
    for baseline, pes in {"none": {"naive", "cape"}, "naive": {"cape"}}.items():
        assert table["differences"][baseline].keys() == pes
        for pe, of in table["differences"][baseline].items():
            for metric, one in of.items():
                column = f"{metric}_minus_{baseline}"
                names = {name: column if name == "value" else f"{column}_{name}" for name in one}
                assert one == {name: float(lines[pe][named]) for name, named in names.items()}
    key = next(iter(store.read()))
    labels, users = rows_of(store, key)
    scores = {pe: {key.seed: store.scores(key) for key in store.read() if key.pe == pe} for pe in PES}
    for metric, one in compare(labels, users, scores)["cape"].items():
        assert float(lines["cape"][f"{metric}_minus_none_low"]) == pytest.approx(
            one.low, abs=0.02 * (one.high - one.low)
        )


def test_curves_are_the_histories_of_the_rows(made: tuple[Store, dict[str, Any]]) -> None:
    store, found = made
    lines = [json.loads(line) for line in store.file.read_text().splitlines()]
    assert len(lines) == 6
    for line in lines:
        (curve,) = [one for one in only_table(found)["curves"][line["pe"]] if one["seed"] == line["seed"]]
        history = line["history"]
        assert curve["loss"] == [epoch["loss"] for epoch in history]
        assert curve["epochs"] == [1, 2]
        assert curve["metrics"]["gAUC"] == [epoch["metrics"]["gAUC"] for epoch in history]
        assert curve["seconds"] == pytest.approx(np.cumsum([epoch["seconds"] for epoch in history]))
        assert curve["best"] == line["epoch"] - 1
        assert history[-1]["loss"] < history[0]["loss"]


def test_evaluations_within_an_epoch_stand_where_they_were() -> None:
    history = [
        {
            "number": 1 + at // 2,
            "steps": 5 * (at + 1),
            "loss": 0.5,
            "metrics": {"gAUC": None if at else 0.6},
            "seconds": 2,
        }
        for at in range(4)
    ]
    result = SimpleNamespace(history=history, epoch=1)
    setting: Any = SimpleNamespace(runs={"none": {3: result, 4: SimpleNamespace(history=[])}})
    (curve,) = curves(setting)["none"]
    assert curve["seed"] == 3
    assert curve["epochs"] == [0.5, 1, 1.5, 2]
    assert curve["seconds"] == [2, 4, 6, 8]
    assert curve["metrics"] == {"gAUC": [0.6, None, None, None]}
    assert curve["best"] == 1


def test_calibration_bins_hold_every_row_once(made: tuple[Store, dict[str, Any]]) -> None:
    store, found = made
    (setting,) = settings(store)
    labels, _ = rows_of(store, setting.key)
    for pe, bins in only_table(found)["calibration"]["encodings"].items():
        scores = np.concatenate([store.scores(result.key) for result in setting.runs[pe].values()]).astype(float)
        rows = np.array(bins["rows"])
        assert rows.sum() == len(scores) == 2 * len(labels)
        assert rows.max() - rows.min() <= 0.1 * rows.sum()
        assert rows @ np.array(bins["predicted"]) / rows.sum() == pytest.approx(scores.mean())
        assert rows @ np.array(bins["observed"]) / rows.sum() == pytest.approx(labels.mean())
        assert bins["predicted"] == sorted(bins["predicted"])
        order = np.argsort(scores)
        lowest = order[: rows[0]]
        assert bins["observed"][0] == pytest.approx(np.tile(labels, 2)[lowest].mean())
        distance = np.abs(np.array(bins["predicted"]) - np.array(bins["observed"]))
        assert bins["error"] == pytest.approx(np.average(distance, weights=rows))


def test_gauc_by_length_is_that_of_rows_with_such_histories(made: tuple[Store, dict[str, Any]], root: Path) -> None:
    store, found = made
    frame = pl.read_parquet(root / "synthetic" / "test.parquet")
    lengths = frame["item_history"].list.len().to_numpy()
    by_length = only_table(found)["lengths"]
    assert sum(by_length["rows"]) == len(frame)
    for index, name in enumerate(by_length["bins"]):
        ends = [int(end) for end in name.split("–")]
        inside = (lengths >= ends[0]) & (lengths <= ends[-1])
        assert by_length["rows"][index] == inside.sum()
        assert by_length["users"][index] == frame.filter(inside)["user_id"].n_unique()
        for pe in PES:
            values = [
                evaluate(
                    frame["label"].to_numpy()[inside], store.scores(key)[inside], frame["user_id"].to_numpy()[inside]
                )
                for key in store.read()
                if key.pe == pe
            ]
            mean = by_length["encodings"][pe]["mean"][index]
            assert mean == pytest.approx(np.mean([one["gAUC"] for one in values]), abs=1e-12)


@pytest.mark.parametrize(
    ("lengths", "bins"),
    [
        ([4] * 9, [(4, 4)]),
        ([0, 0, 0, 0, 7, 9], [(0, 0), (7, 9)]),
        (list(range(12)), [(0, 3), (4, 7), (8, 11)]),
        ([1, 50], [(1, 1), (50, 50)]),
    ],
)
def test_length_bins_hold_every_length_once(lengths: list[int], bins: list[tuple[int, int]]) -> None:
    assert length_bins(np.array(lengths), 3) == bins


def test_speed_counts_rows_of_training_and_evaluation(made: tuple[Store, dict[str, Any]], root: Path) -> None:
    store, found = made
    rows = open_dataset("synthetic", root).rows
    for row in only_table(found)["speed"]:
        results = [result for result in store.read().values() if result.pe == row["pe"]]
        speeds = []
        for result in results:
            seconds = sum(epoch["seconds"] for epoch in result.history)
            speeds.append(2 * (rows["train"] + rows["valid"]) / seconds)
        assert row["rows_per_second"] == pytest.approx(np.mean(speeds))
        assert row["parameters"] == results[0].parameters
        assert row["seconds"] == pytest.approx(np.mean([result.seconds for result in results]))
    parameters = {row["pe"]: row["parameters"] for row in only_table(found)["speed"]}
    assert parameters["none"] < parameters["cape"]


def test_the_explorer_shows_rows_of_the_data_as_the_stored_runs_see_them(
    made: tuple[Store, dict[str, Any]], root: Path
) -> None:
    store, found = made
    shown = only_table(found)["explorer"]
    assert shown["seed"] == 0
    assert shown["encodings"] == PES
    assert shown["contextual"] == ["cape"]
    assert len(shown["users"]) == 7
    frame = pl.read_parquet(root / "synthetic" / "test.parquet").with_row_index("row")
    vocabulary = json.loads((root / "synthetic" / "feature_vocab.json").read_text())
    names = {field: {number: token for token, number in vocabulary[field].items()} for field in vocabulary}
    scores = {key.pe: store.scores(key) for key in store.read() if key.seed == 0}
    lengths = []
    for user in shown["users"]:
        own = frame.filter(pl.col("user_id").cast(pl.String) == user["user"])
        lengths.append(max(own["item_history"].list.len().to_list()))
        for side, label in (("clicked", 1), ("sampled", 0)):
            one = user[side]
            candidates = own.filter(pl.col("label") == label).iter_rows(named=True)
            rows = [
                row
                for row in candidates
                if [names["item_id"][row["item_id"]], names["cate_id"][row["cate_id"]]] == one["target"]
                and [age for age, *_ in one["history"]] == row["age_history"][::-1]
            ]
            assert len(rows) == 1
            history = [
                [names["item_id"][i], names["cate_id"][c]]
                for i, c in zip(rows[0]["item_history"], rows[0]["cate_history"], strict=True)
            ]
            assert [item for _, *item in one["history"]] == history[::-1]
            for pe in PES:
                assert one["scores"][pe] == pytest.approx(float(scores[pe][rows[0]["row"]]), abs=1e-5)
                unit = one["units"][0][pe]
                assert len(unit["weights"]) == unit["items"] == len(history)
                assert sum(unit["weights"]) == pytest.approx(1, abs=1e-3)
            positions = one["units"][0]["cape"]["positions"]
            assert all(0 < step < 1 for step in np.diff([0, *positions]))
            assert one["units"][0]["naive"]["positions"] is None
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_the_explorers_weights_are_those_of_the_unit(made: tuple[Store, dict[str, Any]], root: Path) -> None:
    store, found = made
    dataset, (one,) = drawn(Wanted(["cape"], store.path, seed=0, data_root=root))
    users, rows = explorer.choose(dataset, 7)
    batch = BatchLoader(one.after.feature_map, dataset.split("test"), split="valid").batch(np.asarray(rows))
    seen: list[torch.Tensor] = []
    (unit,) = [module for module in one.after.modules() if isinstance(module, TargetAttention)]
    attend = unit.attend
    vars(unit)["attend"] = lambda *given: (seen.append((out := attend(*given))[1]), out)[1]
    with torch.inference_mode():
        one.after.eval()(batch)
    lengths = batch.lengths["item_history"].tolist()
    for number, user in enumerate(only_table(found)["explorer"]["users"]):
        assert user["user"] == users[number]
        for side, row in (("clicked", 2 * number), ("sampled", 2 * number + 1)):
            expected = seen[0][row][-lengths[row] :].flip(0).tolist()  # the newest item in the last slot
            assert user[side]["units"][0]["cape"]["weights"] == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("model", ["DIN", "DIEN", "BST", "DMIN", "TIN", "SASRec"])
def test_every_backbone_has_weights_for_every_item_of_a_history(root: Path, model: str) -> None:
    """Also of one item, and of more than the model reads."""
    params = parse_overrides(["embedding_dim=4", "dnn_hidden_units=[8]", "max_len=20", "position_dim=4"])
    params |= {} if model in ("DIN", "DIEN", "TIN") else {"num_heads": 2}
    dataset, (one,) = drawn(Wanted(["cape"], model=model, dataset="synthetic", seed=0, data_root=root, params=params))
    lengths = pl.read_parquet(dataset.split("test"))["item_history"].list.len().to_numpy()
    rows = [int(lengths.argmin()), int(lengths.argmax()), 3]
    assert lengths.max() > 20
    batch = BatchLoader(one.before.feature_map, dataset.split("test"), split="valid").batch(np.asarray(rows))
    targets, histories = explorer.named(dataset, one.before, batch)
    assert [len(history) for history in histories] == [min(20, int(lengths[row])) for row in rows]
    scores, units = explorer.look(dataset, one.before, batch)
    assert len(scores) == len(targets) == len(rows)
    assert units
    for by_row in units.values():
        for unit, history in zip(by_row, histories, strict=True):
            assert len(unit["weights"]) == len(history)
            known = [weight for weight in unit["weights"] if weight is not None]
            beside = unit["items"] - len(known)  # the target itself, where it is in the sequence, or the query
            assert 0 <= beside <= 1
            if unit["softmax"]:
                assert sum(known) <= 1 + 1e-4
                assert beside or sum(known) == pytest.approx(1, abs=1e-4)


def test_users_are_chosen_with_both_kinds_of_rows(tmp_path: Path) -> None:
    dataset = generate(tmp_path / "set", users=20, valid_users=10, test_users=30, items=50, categories=5)
    frame = pl.read_parquet(dataset.split("test"))
    users, rows = explorer.choose(dataset, 1000)
    both = frame.group_by("user_id").agg(pl.col("label").mean()).filter(pl.col("label").is_between(0, 1, closed="none"))
    assert sorted(users) == sorted(both["user_id"].cast(pl.String))
    chosen = frame[rows]
    assert chosen["label"].to_list() == [1, 0] * len(users)
    assert chosen["user_id"].cast(pl.String).to_list() == [user for user in users for _ in range(2)]
    assert explorer.choose(dataset, 1)[0]


def test_what_is_missing_is_said_with_the_command_that_adds_it(
    made: tuple[Store, dict[str, Any]], root: Path, tmp_path: Path
) -> None:
    store = copied(made[0], tmp_path / "old")
    shutil.rmtree(store.path / "weights")
    lines = [json.loads(line) for line in store.file.read_text().splitlines()]
    for line in lines:
        del line["history"]
    shutil.rmtree(store.path / "runs")  # as of an earlier version, so that lines count
    store.file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (rows,) = (store.path / "scores").glob("rows-*.npz")
    with np.load(rows) as kept:
        np.savez_compressed(rows, labels=kept["labels"], users=kept["users"])
    elsewhere = tmp_path / "no data"
    (elsewhere / "synthetic").mkdir(parents=True)  # a data set that is not complete
    table = only_table(content(Options(store.path, data_root=elsewhere)))
    runs = "ctr-pe benchmark --model DIN --pe none,naive,cape --dataset synthetic --protocol heldout"
    assert f"`{runs} --repeats 2 --set" in table["missing"]["curves"]
    assert "half-built" in table["missing"]["lengths"]
    assert "half-built" in table["missing"]["data"]
    assert "differences" not in table["missing"]
    assert table["lengths"] is table["data"] is None
    assert all(math.isnan(row["rows_per_second"]) for row in table["speed"])
    assert f"--keep-weights --out {store.path}-weights" in table["explorer"]["missing"]
    assert f"`ctr-pe report {store.path} --weights {store.path}-weights`" in table["explorer"]["missing"]

    table = only_table(content(Options(store.path, data_root=root, weights=made[0].path)))
    assert table["lengths"] == only_table(made[1])["lengths"]  # from the data set, and kept
    assert table["data"] == only_table(made[1])["data"]
    assert [one["name"] for one in table["data"]["columns"]] == ["item_id", "cate_id"]
    assert "data" not in table["missing"]
    assert "lengths" in store.about(settings(store)[0].key.data_hash)
    assert table["explorer"]["users"]

    for file in (store.path / "scores").glob("DIN-naive-1-*.npy"):
        file.unlink()
    table = only_table(content(Options(store.path, data_root=root)))
    assert "The test scores of 1 run are not in scores/" in table["missing"]["calibration"]
    assert table["calibration"] is None
    assert math.isfinite(table["differences"]["none"]["naive"]["gAUC"]["low"])  # what is needed of them is in users/
    shutil.rmtree(store.path / "users")
    table = only_table(content(Options(store.path, data_root=root)))
    assert math.isnan(table["differences"]["none"]["naive"]["gAUC"]["low"])
    assert math.isfinite(table["differences"]["none"]["cape"]["gAUC"]["low"])
    assert page({**made[1], "tables": [table]})


def test_weights_of_some_encodings_are_shown_and_the_others_named(
    made: tuple[Store, dict[str, Any]], root: Path, tmp_path: Path
) -> None:
    store = copied(made[0], tmp_path / "some")
    for file in (store.path / "weights").glob("DIN-naive-*"):
        file.unlink()
    shown = only_table(content(Options(store.path, data_root=root)))["explorer"]
    assert shown["encodings"] == ["none", "cape"]
    assert "The trained weights of naive were not kept" in shown["note"]


def test_one_encoding_alone_has_a_page_too(made: tuple[Store, dict[str, Any]], root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "alone"
    store = copied(made[0], folder)
    lines = [line for line in store.file.read_text().splitlines(keepends=True) if '"pe": "cape"' in line]
    shutil.rmtree(store.path / "runs")  # as of an earlier version, so that lines count
    store.file.write_text(lines[0])
    table = only_table(content(Options(folder, data_root=root)))
    assert table["differences"] == {}
    assert "`ctr-pe benchmark --model DIN --pe none,cape" in table["missing"]["differences"]
    assert table["lengths"]["encodings"]["cape"]["mean"]


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match=r"no results of a benchmark: `ctr-pe benchmark --keep-weights --out .*` makes them"
    ):
        report(Options(tmp_path / "nothing"))
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(UserError, match=re.escape("pip install 'ctr_pe[report]'")):
        report(Options(tmp_path / "nothing"))


def test_summary_speaks_of_intervals_not_of_points() -> None:
    differences = {
        "a": Difference(0.01, -0.01, 0.03, 0.02, 0.06, 0.0234, math.nan, math.nan, 0.01),
        "b": Difference(0.1, 0.05, 0.15, 0.01, 0.03, 0.04, math.nan, math.nan, 0.01),
        "c": Difference(-0.1, -0.2, -0.05, 0.02, 0.06, 0.05, math.nan, math.nan, 0.01),
    }
    means = {"none": 0.7, "a": 0.7, "b": 0.8, "c": 0.7}
    runs = {pe: {seed: SimpleNamespace(metrics={"gAUC": mean}) for seed in range(2)} for pe, mean in means.items()}
    setting: Any = SimpleNamespace(runs=runs)
    to_none = {"none": {pe: {"gAUC": one} for pe, one in differences.items()}}
    interval = "The 95 % interval of the difference to none, for other users and newly trained runs,"
    assert summary(setting, "gAUC", to_none) == [
        "The highest mean gAUC (AUC within users) is that of b: 0.8000 over 2 seeds.",
        f"{interval} lies above zero for b (+0.1000).",
        f"{interval} lies below zero for c (−0.1000).",
        f"{interval} includes zero for a: these runs do not tell it from none.",
        "They would have shown a true difference of 0.0234 in four of five cases (p < 0.05); with any number of seeds "
        "these users would show one of about 0.0100.",
        "Corrected for 3 comparisons, p is below 0.05 for b.",
    ]


def test_names_cannot_leave_the_numbers(made: tuple[Store, dict[str, Any]]) -> None:
    nasty = '</script><script>alert("&")</script>\u2028'
    found = {**made[1], "title": nasty}
    assert "<" not in as_json(found)
    html = page(found)
    assert embedded(html)["title"] == nasty
    assert "<script>alert" not in html
    assert json.loads(as_json({"a": math.nan, "b": [math.inf, 1.5]})) == {"a": None, "b": [None, 1.5]}


def test_an_encoding_has_one_colour(made: tuple[Store, dict[str, Any]]) -> None:
    from ctr_pe.pe import available_pes

    found = colours(available_pes())
    assert len(set(found.values())) == len(found)
    assert colours(["cape", "mine"])["cape"] == found["cape"] == made[1]["colours"]["cape"]


# In a browser.


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_opens_from_disk_without_errors_and_without_a_network(
    made: tuple[Store, dict[str, Any]], browser: Any, width: int
) -> None:
    file = made[0].path / "report.html"
    opened(browser, file.as_uri(), width)
    figures = 'return document.querySelectorAll(".js-plotly-plot .main-svg").length'
    waiting(browser).until(lambda _: browser.execute_script(figures) >= 5)
    shown = browser.execute_script("""return {
        empty: [...document.querySelectorAll(".figure")].filter((one) => !one.children.length).map((one) => one.id),
        overflow: document.documentElement.scrollWidth - window.innerWidth,
        users: document.querySelectorAll("#user option").length,
        rows: document.querySelectorAll("#metrics tbody tr").length,
    }""")
    assert shown["empty"] == []
    assert shown["overflow"] <= 0
    assert shown["users"] == 7
    assert shown["rows"] == len(PES)
    assert errors(browser) == []
    urls = requested(browser, file.as_uri())
    assert file.as_uri() in urls
    assert [url for url in urls if url != file.as_uri() and not url.startswith(("data:", "blob:"))] == []


def test_the_explorer_and_the_figures_react_to_clicks(made: tuple[Store, dict[str, Any]], browser: Any) -> None:
    store, found = made
    opened(browser, (store.path / "report.html").as_uri(), 1280)
    users = only_table(found)["explorer"]["users"]

    def one(selector: str) -> Any:
        return browser.find_element("css selector", selector)

    def click(selector: str) -> None:
        browser.execute_script("arguments[0].click()", one(selector))

    def named(target: list[str]) -> str:
        return f"cate_id {target[1]} · item_id {target[0]}"

    middle = len(users) // 2
    assert one("#side-clicked .name").text == named(users[middle]["clicked"]["target"])
    click("#next")
    user = users[middle + 1]
    assert one("#side-clicked .name").text == named(user["clicked"]["target"])
    assert one("#side-sampled .name").text == named(user["sampled"]["target"])
    rows = browser.find_elements("css selector", "#side-clicked tbody tr")
    assert len(rows) == len(user["clicked"]["history"])
    assert one("#detail").text == ""
    click("#side-clicked tr[data-row='1']")
    detail = one("#detail").text
    for pe in PES:
        assert f"{user['clicked']['units'][0][pe]['weights'][1]:.4f}" in detail
        assert f"{user['sampled']['units'][0][pe]['weights'][1]:.4f}" in detail
    assert f"{user['clicked']['units'][0]['cape']['positions'][1]:.2f}" in detail
    bars = "#side-clicked tr[data-row='0'] .strip"
    assert len(browser.find_elements("css selector", bars)) == 3
    width = "return [...document.querySelectorAll(arguments[0])].map((bar) => parseFloat(bar.style.width))"
    widths = browser.execute_script(width, bars)
    weights = [user["clicked"]["units"][0][pe]["weights"][0] for pe in PES]
    np.testing.assert_allclose(np.array(widths) / widths[0], np.array(weights) / weights[0], rtol=1e-3)
    click("#explorer-legend button[data-value='naive']")
    assert len(browser.find_elements("css selector", bars)) == 2

    click("#baseline button[data-value='naive']")
    click("#metric button[data-value='AUC']")
    drawn_points = browser.execute_script(
        "return document.getElementById('forest').data.map((trace) => [trace.y[0], trace.x[0]])"
    )
    expected = only_table(found)["differences"]["naive"]
    assert drawn_points == [["cape", expected["cape"]["AUC"]["value"]]]
    click("#curve-legend button[data-value='cape']")
    assert len(browser.execute_script("return document.getElementById('curve-valid').data")) == 4
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def ranked_store(folder: Path) -> Store:
    """Runs of a next-item model on a data set of which figures are published; the ranks of rope are better."""
    store, users, draw = Store(folder), np.repeat(np.arange(40), 2), np.random.default_rng(0)
    store.save_rows("d", np.ones(80), users, lengths=np.tile([3, 9], 40), next_item=np.array(True))
    names = ("Recall@10", "NDCG@10", "COV@10")
    epoch = {"number": 1, "steps": 5, "loss": 3.0, "seconds": 1.0, "metrics": {"NDCG@10": 0.2, "Recall@10": 0.4}}
    for pe, seed in product(("none", "naive", "rope"), range(2)):
        ranks = draw.integers(1, 20 if pe == "rope" else 60, 80).astype(np.float32)
        ranks[0] = np.inf
        store.append(
            Result(
                model="SASRec", dataset="amazon_beauty_next", pe=pe, seed=seed, protocol="heldout",
                metrics=ranking_metrics(ranks, names, {10: 0.5}), epoch=1, config_hash="c", data_hash="d",
                revision=None, versions={}, seconds=1.0, threads=1, parameters=9, finished="2026-01-01",
                history=[epoch], params={"embedding_dim": 8},
            ),
            ranks,
        )  # fmt: skip
    return store


def test_of_next_item_runs_the_page_has_metrics_of_ranking(tmp_path: Path) -> None:
    store = ranked_store(tmp_path / "results")
    found = content(Options(store.path, data_root=tmp_path))
    table = only_table(found)
    assert table["metrics"] == ["NDCG@10", "Recall@10", "COV@10"]
    statistics = RankStatistics(store, "d")
    (setting,) = settings(store)
    for base, pes in {"none": {"naive", "rope"}, "naive": {"rope"}}.items():
        assert table["differences"][base].keys() == pes
        for metric in table["metrics"]:
            one = statistics.difference(setting.runs["rope"], setting.runs[base], metric)
            shown = table["differences"][base]["rope"][metric]
            assert (shown["value"], shown["low"], shown["high"]) == (one.value, one.low, one.high)
    row = next(row for row in table["rows"] if row["pe"] == "rope")
    assert row["NDCG@10_minus_none"] == table["differences"]["none"]["rope"]["NDCG@10"]["value"] > 0
    assert "The highest mean NDCG@10 is that of rope" in table["summary"][0]
    lengths = table["lengths"]
    assert (lengths["metric"], lengths["bins"], lengths["rows"]) == ("NDCG@10", ["3", "9"], [40, 40])
    ranks = [store.scores(run.key) for run in setting.runs["rope"].values()]
    values = [row_values(one[1::2], "NDCG@10").mean() for one in ranks if one is not None]
    assert lengths["encodings"]["rope"]["mean"][1] == pytest.approx(np.mean(values))
    assert (table["calibration"], table["explorer"], "calibration" in table["missing"]) == (None, None, False)
    assert table["command"].startswith("ctr-pe benchmark --task next-item --model SASRec --pe none,naive,rope")
    assert "--set embedding_dim=8" in table["command"]
    assert "batch_size" not in table["command"]


def test_the_page_of_next_item_runs_in_a_browser(tmp_path: Path, browser: Any) -> None:
    store = ranked_store(tmp_path / "results")
    report(Options(store.path, data_root=tmp_path))
    browser.get_log("browser")
    opened(browser, (store.path / "report.html").as_uri(), 1280)
    shown = browser.execute_script("""return {
        sections: [...document.querySelectorAll("main section")].filter((one) => one.offsetParent).map((one) => one.id),
        links: [...document.querySelectorAll("nav a")].filter((one) => one.offsetParent).length,
        header: [...document.querySelectorAll("#metrics th")].map((one) => one.textContent),
        points: document.getElementById("forest").data.map((trace) => trace.y[0]),
        title: document.getElementById("lengths-title").textContent,
    }""")
    assert shown["sections"] == ["differences", "curves", "lengths", "speed", "data", "environment"]
    assert shown["links"] == 6
    compared = ["NDCG@10 − none", "95 % interval", "detectable", "p"]
    assert shown["header"] == ["encoding", "NDCG@10", *compared, "seeds", "Recall@10", "COV@10"]
    assert shown["points"] == ["naive", "rope"]
    assert shown["title"] == "NDCG@10 by length of the history"
    browser.execute_script("document.querySelector(\"#metric button[data-value='Recall@10']\").click()")
    points = browser.execute_script("return document.getElementById('forest').data.map((trace) => trace.x[0])")
    wanted = only_table(content(Options(store.path, data_root=tmp_path)))["differences"]["none"]
    assert points == pytest.approx([wanted[pe]["Recall@10"]["value"] for pe in ("naive", "rope")])
    assert errors(browser) == []


@pytest.mark.slow
def test_intervals_stand_beside_the_figure_whatever_the_names(browser: Any, checkout: Path, tmp_path: Path) -> None:
    """The longer the names of encodings are, the narrower the figure is."""
    shutil.copytree(checkout / "benchmark" / "results" / "DIN-synthetic_context", tmp_path / "results")
    assert main(["report", str(tmp_path / "results"), "--quiet"]) == 0
    opened(browser, (tmp_path / "results" / "report.html").as_uri(), 1000)
    waiting(browser).until(
        lambda _: browser.execute_script('return document.querySelectorAll("#forest .annotation").length') == 5
    )
    figure, page, texts = browser.execute_script("""return [
        document.querySelector("#forest .nsewdrag").getBoundingClientRect().right,
        document.querySelector("#forest").getBoundingClientRect().right,
        [...document.querySelectorAll("#forest .annotation-text")].map((one) => {
            const box = one.getBoundingClientRect();
            return [box.left, box.right];
        }),
    ]""")
    assert all(figure <= left and right <= page for left, right in texts)
