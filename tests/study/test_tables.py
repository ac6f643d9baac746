"""Tables: the numbers of the store, marked with what a reader must know about them."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import numpy as np
import pytest
from fake_training import fill, jobs_of, result_of, rows_of_test, scores_of

from ctr_pe.evaluation import evaluate
from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.evaluation.paired import compare
from ctr_pe.study.rendering import Table, as_csv, as_markdown, as_text
from ctr_pe.study.store import Store
from ctr_pe.study.tables import make_tables, published


def store_of(folder: Path, *jobs: list[object]) -> Store:
    store = Store(folder)
    for some in jobs:
        fill(store, some)  # type: ignore[arg-type]
    return store


def tables_of(folder: Path, *jobs: list[object]) -> list[Table]:
    return list(make_tables(store_of(folder, *jobs)).values())


def test_numbers_are_those_of_the_runs(tmp_path: Path) -> None:
    pes = ["cape", "none", "rope"]
    (table,) = tables_of(tmp_path, jobs_of(pes, seeds=3))
    labels, users = rows_of_test()
    scores = {pe: {seed: scores_of(pe, seed) for seed in (1, 2, 3)} for pe in ["none", "rope", "cape"]}
    expected = compare(labels, users, scores)
    lines = list(csv.DictReader(io.StringIO(as_csv([table]))))
    assert [line["pe"] for line in lines] == ["none", "rope", "cape"]
    for line in lines:
        pe = line["pe"]
        assert line["seeds"] == "3"
        for metric in METRICS:
            values = [evaluate(labels, scores[pe][seed], users)[metric] for seed in (1, 2, 3)]
            assert float(line[f"{metric}_mean"]) == pytest.approx(np.mean(values), abs=1e-12)
            assert float(line[f"{metric}_sd"]) == pytest.approx(np.std(values, ddof=1), abs=1e-12)
            if pe == "none":
                assert line[f"{metric}_difference"] == line[f"{metric}_p_holm"] == ""
                continue
            found = [float(line[f"{metric}_{name}"]) for name in ("difference", "low", "high", "p", "p_holm")]
            assert found == pytest.approx(expected[pe][metric], abs=1e-12)
    assert (lines[2]["gAUC_seeds_won"], lines[2]["gAUC_seeds_compared"]) == ("3", "3")
    assert float(lines[2]["logloss_difference"]) < 0
    assert lines[2]["logloss_seeds_won"] == "3"  # lower is better


def test_terminal_table(tmp_path: Path) -> None:
    (table,) = tables_of(tmp_path, jobs_of(seeds=3))
    text = as_text(table)
    lines = text.splitlines()
    assert lines[0] == "DIN on made_up, protocol heldout, 3 seeds, 300 test rows of 40 users"
    assert lines[2].split() == "encoding gAUC AUC logloss gAUC − none [95 % interval] won p".split()
    none, cape = table.lines
    assert lines[3].startswith(f"none      {none['gAUC_mean']:.4f} ± ")
    assert lines[4].startswith(f"cape      {cape['gAUC_mean']:.4f} ± {cape['gAUC_sd']:.4f}  ")
    difference, low, high = (cape[f"gAUC_{name}"] for name in ("difference", "low", "high"))
    assert f"  {difference:+.4f} [{low:+.4f}, {high:+.4f}]" in lines[4]
    assert lines[4].endswith("  3/3  0.002")
    explained = " ".join(lines[6:])
    for word in ("higher is better", "standard deviation", "user-level paired bootstrap", "1,000 resamples", "Holm"):
        assert word in explained
    assert max(map(len, lines)) <= 110
    assert "†" not in text


def test_gauc_is_explained_once(tmp_path: Path) -> None:
    (table,) = tables_of(tmp_path, jobs_of(seeds=2))
    assert as_text(table).count("AUC within users") == 1
    assert as_markdown([table]).count("gAUC: AUC within users.") == 1


def test_a_p_of_one_is_no_number_and_the_legend_says_so(tmp_path: Path) -> None:
    store = store_of(tmp_path, jobs_of(["none"]))
    like = {key.seed: scores_of("none", key.seed) for key in store.read()}
    for job in jobs_of(["naive", "cape"]):
        scores = like[job.key.seed] if job.key.pe == "naive" else scores_of("cape", job.key.seed)
        store.append(result_of(job.key), scores)
    (table,) = make_tables(store).values()
    assert [line["gAUC_p_holm"] for line in table.lines[1:]] == [1.0, pytest.approx(0.004, abs=1e-4)]
    assert [row["p"] for row in table.cells] == [None, "–", "0.004"]
    assert "1.000" not in as_text(table).split("gAUC − none:")[0]
    assert "corrected (Holm) for 2 comparisons, – where it is 1." in " ".join(as_text(table).split())
    (others,) = tables_of(tmp_path / "others", jobs_of())
    assert "where it is 1" not in as_text(others)


def test_a_logloss_above_that_of_the_click_rate_is_marked(tmp_path: Path) -> None:
    store = store_of(tmp_path, jobs_of(seeds=2))
    (plain,) = make_tables(store).values()
    assert math.isnan(plain.lines[0]["logloss_base_rate"])  # a store of an older version
    assert "‡" not in as_text(plain)
    labels, users = rows_of_test()
    rate = 0.5
    base = -np.mean(np.where(labels, np.log(rate), np.log(1 - rate)))
    none, cape = (line["logloss_mean"] for line in plain.lines)
    assert cape < base < none  # none: of scores that are too sure of themselves
    store.save_rows("d" * 32, labels, users, click_rate=rate)
    (table,) = make_tables(store).values()
    assert [line["logloss_base_rate"] for line in table.lines] == pytest.approx([base] * 2)
    for text in (as_text(table), as_markdown([table])):
        assert text.count(f"{none:.4f} ± ") == 1
        assert f"{table.lines[0]['logloss_sd']:.4f} ‡" in text
        assert text.count("‡") == 2  # the number and the legend
        assert (
            f"‡ worse than no model: to predict the click rate of the training rows for each row gives {base:.4f}."
            in (" ".join(text.split()))
        )


def test_markdown_has_the_same_cells(tmp_path: Path) -> None:
    tables = tables_of(tmp_path, jobs_of(seeds=3), jobs_of(seeds=3, dataset="another"))
    text = as_markdown(tables)
    assert text.count("\n## ") + text.startswith("## ") == 2
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 8
    assert {row.count("|") for row in rows} == {8}


def test_single_seed_has_no_deviation(tmp_path: Path) -> None:
    (table,) = tables_of(tmp_path, jobs_of(seeds=1))
    assert "±" not in as_text(table).splitlines()[3]
    assert "1 seed," in table.title
    assert next(csv.DictReader(io.StringIO(as_csv([table]))))["gAUC_sd"] == ""


def test_paper_protocol_is_marked_everywhere(tmp_path: Path) -> None:
    heldout, paper = tables_of(tmp_path, jobs_of(), jobs_of(protocol="paper"))
    assert "†" not in as_markdown([heldout]) + as_csv([heldout])
    for text in (as_text(paper), as_markdown([paper])):
        assert "DIN on made_up, protocol paper†" in text
        assert "none† " in text
        assert "cape† " in text
        assert "† trained on train + validation rows, and the epoch selected on the test rows" in text
    lines = list(csv.DictReader(io.StringIO(as_csv([paper]))))
    assert [line["pe"] for line in lines] == ["none†", "cape†"]
    assert all("selected on the test rows" in line["notes"] for line in lines)


def test_published_figures_stand_beside_ours(tmp_path: Path) -> None:
    electronics, kuai, other = tables_of(
        tmp_path,
        jobs_of(dataset="amazonelectronics_x1"),
        jobs_of(dataset="kuaivideo_x1"),
        jobs_of(dataset="synthetic"),
    )
    line = next(line for line in as_text(electronics).splitlines() if line.startswith("cape"))
    assert line.endswith("  0.8857 / 0.8882 / 0.4285")
    assert "| 0.8835 / 0.8860 / 0.4302 |" in as_markdown([electronics])
    assert "| CAPE paper† |" in as_markdown([electronics])
    assert [line["gAUC_published"] for line in csv.DictReader(io.StringIO(as_csv([kuai])))] == [
        "0.661646",
        "0.665215",
    ]
    assert "first 100 of the items" in " ".join(as_text(kuai).split())
    assert "first 100 of the items" in as_csv([kuai])
    assert "first 100" not in as_markdown([electronics])
    assert "paper" not in as_markdown([other])


def test_all_of_the_published_table_is_there() -> None:
    for dataset in ("amazonelectronics_x1", "kuaivideo_x1"):
        for model in ("DIN", "DIEN", "BST", "SASRec", "DMIN"):
            figures = published(dataset, model)
            assert list(figures) == ["none", "naive", "rope", "cope", "cape"]
            for values in figures.values():
                assert 0.65 < values["gAUC"] < values["AUC"] < 0.9
                assert 0.42 < values["logloss"] < 0.47
    assert published("kuaivideo_x1", "DMIN")["rope"] == {"gAUC": 0.660126, "AUC": 0.745036, "logloss": 0.433466}
    assert published("synthetic", "DIN") == published("kuaivideo_x1", "TIN") == {}


def test_without_none_there_are_no_differences(tmp_path: Path) -> None:
    (table,) = tables_of(tmp_path, jobs_of(["rope", "cape"]))
    text = as_text(table)
    assert text.splitlines()[2].split() == ["encoding", "gAUC", "AUC", "logloss"]
    assert "taken to 'none', which has not been run" in text


def test_seeds_that_none_lacks_are_not_compared(tmp_path: Path) -> None:
    jobs = [job for job in jobs_of(["none", "rope", "cape"], seeds=3) if (job.key.pe, job.key.seed) != ("none", 3)]
    jobs = [job for job in jobs if job.key.pe != "rope" or job.key.seed == 3]
    (table,) = tables_of(tmp_path, jobs)
    _, rope, cape = table.lines
    assert math.isnan(rope["gAUC_difference"])
    assert (cape["gAUC_seeds_won"], cape["gAUC_seeds_compared"]) == (2, 2)
    recorded = [evaluate(rows_of_test()[0], scores_of("cape", s), metrics="AUC")["AUC"] for s in (1, 2)]
    base = [evaluate(rows_of_test()[0], scores_of("none", s), metrics="AUC")["AUC"] for s in (1, 2)]
    assert cape["AUC_difference"] == pytest.approx(np.mean(recorded) - np.mean(base), abs=1e-12)


def test_without_the_scores_there_are_no_intervals(tmp_path: Path) -> None:
    store = store_of(tmp_path, jobs_of())
    (full,) = make_tables(store).values()
    next((tmp_path / "scores").glob("DIN-cape-1-*")).unlink()
    (table,) = make_tables(store).values()
    assert table.lines[1]["gAUC_difference"] == pytest.approx(full.lines[1]["gAUC_difference"], abs=1e-12)
    assert math.isnan(table.lines[1]["gAUC_low"])
    assert "No intervals: the test scores of 1 run are not in scores/." in as_text(table)
    for file in (tmp_path / "scores").iterdir():
        file.unlink()
    (table,) = make_tables(store).values()
    assert "No intervals" in as_text(table)


def test_runs_of_other_hyper_parameters_are_not_mixed(tmp_path: Path) -> None:
    tables = tables_of(tmp_path, jobs_of(seeds=3), jobs_of(["none"], seeds=1, epochs=1))
    assert sorted(len(table.lines) for table in tables) == [1, 2]
    assert all(f"hyper-parameters {table.lines[0]['config_hash']}" in table.title for table in tables)


def test_runs_on_other_devices_are_not_mixed(tmp_path: Path) -> None:
    store = store_of(tmp_path, jobs_of(seeds=2))
    for job in jobs_of(seeds=1):
        store.append(result_of(job.key._replace(device="cuda")), scores_of(job.key.pe, job.key.seed))
    tables = make_tables(store).values()
    assert {"on cuda" in table.title: table.lines[0]["seeds"] for table in tables} == {False: 2, True: 1}
