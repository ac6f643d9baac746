"""Tables: the numbers of the store, marked with what a reader must know about them."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from ctr_pe.evaluation import evaluate
from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.evaluation.paired import Difference, compare, holm
from ctr_pe.study.differences import settings
from ctr_pe.study.rendering import Table, as_csv, as_markdown, as_text
from ctr_pe.study.store import Store
from ctr_pe.study.tables import difference_cells, difference_notes, make_tables, published
from tests.support.fake_training import fill, jobs_of, result_of, rows_of_test, scores_of


def store_of(folder: Path, *jobs: list[object]) -> Store:
    store = Store(folder)
    for some in jobs:
        fill(store, some)  # type: ignore[arg-type]
    return store


def tables_in(store: Store) -> list[Table]:
    return [table for setting in settings(store) for table in make_tables(setting)]


def tables_of(folder: Path, *jobs: list[object]) -> list[Table]:
    return tables_in(store_of(folder, *jobs))


def test_numbers_are_those_of_the_runs(tmp_path: Path) -> None:
    """Intervals but for the rounding of what is kept of the users."""
    pes = ["cape", "none", "naive", "rope"]
    tables = tables_of(tmp_path, jobs_of(pes, seeds=3), jobs_of(["cape"], seeds=5))
    labels, users = rows_of_test()
    scores = {pe: {seed: scores_of(pe, seed) for seed in (1, 2, 3)} for pe in ["none", "naive", "rope", "cape"]}
    scores["cape"] |= {seed: scores_of("cape", seed) for seed in (4, 5)}
    to_none = compare(labels, users, scores)
    to_naive = compare(labels, users, {pe: of for pe, of in scores.items() if pe != "none"}, "naive")
    lines = list(csv.DictReader(io.StringIO(as_csv(tables))))
    assert [line["pe"] for line in lines] == ["none", "naive", "rope", "cape"]
    for line in lines:
        pe = line["pe"]
        assert line["seeds"] == str(len(scores[pe]))
        for metric in METRICS:
            values = [evaluate(labels, of, users)[metric] for of in scores[pe].values()]
            assert float(line[f"{metric}_mean"]) == pytest.approx(np.mean(values), abs=1e-12)
            assert float(line[f"{metric}_sd"]) == pytest.approx(np.std(values, ddof=1), abs=1e-12)
            for baseline, expected in {"none": to_none, "naive": to_naive}.items():
                name = f"{metric}_minus_{baseline}"
                if pe not in expected:
                    assert line[name] == line[f"{name}_p_holm"] == ""
                    continue
                one = expected[pe][metric]
                assert float(line[name]) == pytest.approx(one.value, abs=1e-12)
                spread = one.high - one.low
                for field in ("low", "high", "detectable", "users_low", "users_high", "least_detectable"):
                    found = float(line[f"{name}_{field}"])
                    assert found == pytest.approx(getattr(one, field), abs=0.01 * spread)
                for field in ("p", "p_holm"):
                    assert float(line[f"{name}_{field}"]) == pytest.approx(getattr(one, field), abs=0.002)
    assert float(lines[3]["logloss_minus_none"]) < 0


def test_other_metrics_have_columns(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for job in jobs_of(["none", "cape"], seeds=2):
        measured = {**result_of(job.key).metrics, "NDCG@5": 0.25 * job.key.seed}
        store.append(result_of(job.key, metrics=measured), None)
    [table] = tables_in(store)
    assert [cells["NDCG@5"] for cells in table.cells] == ["0.3750 ± 0.1768"] * 2
    assert [line["NDCG@5_mean"] for line in table.lines] == [0.375] * 2


def test_terminal_table(tmp_path: Path) -> None:
    (table,) = tables_of(tmp_path, jobs_of(seeds=3))
    text = as_text(table)
    lines = text.splitlines()
    assert lines[0] == "DIN on made_up, protocol heldout, 3 seeds, 300 test rows of 40 users"
    assert lines[2].split() == "encoding gAUC AUC logloss gAUC − none [95 % interval] detectable p".split()
    none, cape = table.lines
    assert lines[3].startswith(f"none      {none['gAUC_mean']:.4f} ± ")
    assert lines[4].startswith(f"cape      {cape['gAUC_mean']:.4f} ± {cape['gAUC_sd']:.4f}  ")
    difference, low, high = (cape[f"gAUC_minus_none{name}"] for name in ("", "_low", "_high"))
    assert f"  {difference:+.4f} [{low:+.4f}, {high:+.4f}]" in lines[4]
    assert lines[4].endswith(f"  {cape['gAUC_minus_none_detectable']:.4f}      <0.001")
    explained = " ".join(lines[6:])
    for words in (
        "higher is better",
        "standard deviation",
        "other users and newly trained runs",
        "Holm",
        "80 % power",
        "any number of",
    ):
        assert words in explained
    assert max(map(len, lines)) <= 110
    assert "†" not in text


def test_the_p_that_is_shown_is_the_corrected_one(tmp_path: Path) -> None:
    tables = tables_of(tmp_path, jobs_of(["none", "naive", "rope", "cope"], seeds=3))
    line, others = tables[0].lines[2], [line["gAUC_minus_none_p"] for line in tables[0].lines[1:]]
    assert f"{line['gAUC_minus_none_p']:.3f}" != f"{line['gAUC_minus_none_p_holm']:.3f}"
    assert [line["gAUC_minus_none_p_holm"] for line in tables[0].lines[1:]] == holm(others)
    for baseline, table in zip(("none", "naive"), tables, strict=True):
        corrected = {line["pe"]: line[f"gAUC_minus_{baseline}_p_holm"] for line in tables[0].lines}
        compared = [row for row in table.cells if row["p"] is not None]
        assert len(compared) == {"none": 3, "naive": 2}[baseline]
        for row in compared:
            assert row["p"] == f"{corrected[str(row['encoding'])]:.3f}".replace("1.000", "–")
            assert as_text(table).split(f"\n{row['encoding']} ")[1].split("\n")[0].endswith(f"  {row['p']}")


def test_naive_has_a_table_of_its_own(tmp_path: Path) -> None:
    of_none, of_naive = tables_of(tmp_path, jobs_of(["none", "naive", "cape"], seeds=3))
    assert [row["encoding"] for row in of_naive.cells] == ["cape"]
    assert of_naive.title == f"{of_none.title}: differences to naive"
    one = of_none.lines[2]
    assert as_text(of_naive).splitlines()[3].startswith(f"cape      {one['gAUC_minus_naive']:+.4f} [")
    alone = tables_of(tmp_path / "alone", jobs_of(["none", "naive"], seeds=3))
    assert len(alone) == 1


def test_gauc_is_explained_once(tmp_path: Path) -> None:
    (table,) = tables_of(tmp_path, jobs_of(seeds=2))
    assert as_text(table).count("AUC within users") == 1
    assert as_markdown([table]).count("gAUC: AUC within users.") == 1


def test_a_p_of_one_is_no_number_and_the_legend_says_so(tmp_path: Path) -> None:
    store = store_of(tmp_path, jobs_of(["none"], seeds=4))
    like = {key.seed: (scores_of("none", key.seed), result) for key, result in store.read().items()}
    for job in jobs_of(["rope", "cape"], seeds=4):
        if job.key.pe == "rope":  # runs like those of none
            scores, result = like[job.key.seed]
            store.append(result_of(job.key, metrics=result.metrics), scores)
        else:
            store.append(result_of(job.key), scores_of("cape", job.key.seed))
    (table,) = tables_in(store)
    assert [line["gAUC_minus_none_p_holm"] for line in table.lines][1] == 1.0
    assert [row["p"] for row in table.cells] == [None, "–", "<0.001"]
    assert "1.000" not in as_text(table).split("gAUC − none:")[0]
    assert "corrected (Holm) for 2 comparisons, – where it is 1." in " ".join(as_text(table).split())
    (others,) = tables_of(tmp_path / "others", jobs_of())
    assert "where it is 1" not in as_text(others)


def test_a_difference_as_text() -> None:
    one = Difference(0.0123, -0.001, 0.0256, 0.04, 0.08, 0.0187, 0.005, 0.02, 0.0123)
    assert difference_cells("none", one) == {
        "gAUC − none [95 % interval]": "+0.0123 [-0.0010, +0.0256]",
        "detectable": "0.0187",
        "p": "0.080",
    }
    assert difference_cells("naive", one._replace(p_holm=0.0004))["p"] == "<0.001"
    assert set(difference_cells("none", one._replace(value=math.nan)).values()) == {None}


def test_a_table_says_what_more_seeds_could_show(tmp_path: Path) -> None:
    some = Difference(*[0.01] * 9)
    found = [some._replace(least_detectable=least) for least in (0.0025, 0.0012)]
    assert difference_notes("none", found)[0].endswith(
        "; with any number of seeds about 0.0012 to 0.0025, for these users."
    )
    assert difference_notes("none", found[:1])[0].endswith("; with any number of seeds about 0.0025, for these users.")
    (single,) = tables_of(tmp_path, jobs_of(seeds=1))
    assert "any number of seeds" not in as_text(single)


def test_a_logloss_above_that_of_the_click_rate_is_marked(tmp_path: Path) -> None:
    store = store_of(tmp_path, jobs_of(seeds=2))
    (plain,) = tables_in(store)
    assert math.isnan(plain.lines[0]["logloss_base_rate"])  # a store of an older version
    assert "‡" not in as_text(plain)
    labels, users = rows_of_test()
    rate = 0.5
    base = -np.mean(np.where(labels, np.log(rate), np.log(1 - rate)))
    none, cape = (line["logloss_mean"] for line in plain.lines)
    assert cape < base < none  # none: of scores that are too sure of themselves
    store.save_rows("d" * 32, labels, users, click_rate=rate)
    (table,) = tables_in(store)
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


def test_single_seed_has_no_interval_and_the_table_says_why(tmp_path: Path) -> None:
    (table,) = tables_of(tmp_path, jobs_of(["none", "rope"], seeds=3), jobs_of(["cape"], seeds=1))
    rope, cape = table.cells[1:]
    assert "[" in str(rope["gAUC − none [95 % interval]"])
    assert cape["gAUC − none [95 % interval]"] == f"{table.lines[2]['gAUC_minus_none']:+.4f}"
    assert (cape["detectable"], cape["p"]) == ("–", "–")
    assert "No interval where an encoding has a single run" in as_text(table)
    assert "corrected (Holm) for 2 comparisons" in " ".join(as_text(table).split())


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


def test_a_table_says_which_seeds_failed_and_how_many_a_mean_is_of(tmp_path: Path) -> None:
    store = store_of(tmp_path, jobs_of(["none", "cape"], seeds=3))
    why = "diverged in epoch 1, batch 2: the loss is nan"
    for job in [*jobs_of(["cape"], seeds=5)[3:], *jobs_of(["rope"], seeds=2)]:
        store.append(result_of(job.key, metrics={}, failed=why), None)
    (table,) = tables_in(store)
    assert "5 seeds" in table.title
    assert [cells["encoding"] for cells in table.cells] == ["none", "cape", "rope"]
    assert [cells["seeds"] for cells in table.cells] == ["3/5", "3/5, ✗ 2 failed", "0/5, ✗ 2 failed"]
    said = [
        "Not of all 5 seeds are the means of none 3, cape 3, rope 0.",
        f"✗ rope: the training of seeds 1, 2 failed: {why}.",
        f"✗ cape: the training of seeds 4, 5 failed: {why}.",
    ]
    assert [note for note in table.notes if note in said] == said
    lines = list(csv.DictReader(io.StringIO(as_csv([table]))))
    assert [line["seeds"] for line in lines] == ["3", "3", "0"]
    assert all(" ".join(said) in line["notes"] for line in lines)
    assert lines[2]["gAUC_mean"] == ""

    (job,) = jobs_of(["rope"], seeds=1)
    fill(store, [job])  # the next attempt was a success
    assert len(store.failures()) == 3
    assert tables_in(store)[0].cells[1]["seeds"] == "1/5, ✗ 1 failed"


def test_a_table_says_which_processors_its_runs_were_made_on_if_they_differ(tmp_path: Path) -> None:
    def notes(folder: str, *processors: str) -> list[str]:
        store, jobs = Store(tmp_path / folder), jobs_of(["none", "cape"])
        for job, processor in zip(jobs, processors, strict=True):
            store.append(result_of(job.key, processor=processor), None)
        return [note for note in tables_in(store)[0].notes if "processor" in note]

    assert notes("one", *["an Intel"] * 4) == notes("unknown", *[""] * 4) == []
    said = "Runs on different processors differ as if by their seed, for each rounds differently: "
    kinds = "an Intel (2 runs), one that is not recorded (1 run), an AMD (1 run)"
    assert notes("mixed", "an Intel", "an Intel", "", "an AMD") == [f"{said}{kinds}."]


def test_a_table_of_failures_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for job in jobs_of(["none", "cape"], seeds=1):
        store.append(result_of(job.key, metrics={}, failed="diverged"), None)
    (table,) = tables_in(store)
    assert [cells["gAUC"] for cells in table.cells] == ["–", "–"]
    assert [cells["seeds"] for cells in table.cells] == ["0/1, ✗ 1 failed"] * 2


def test_runs_of_all_seeds_are_compared(tmp_path: Path) -> None:
    """Runs of different encodings are not paired by their seeds."""
    jobs = [job for job in jobs_of(["none", "cape"], seeds=5) if (job.key.pe == "none") == (job.key.seed < 3)]
    (table,) = tables_of(tmp_path, jobs)
    ours = [evaluate(rows_of_test()[0], scores_of("cape", s), metrics="AUC")["AUC"] for s in (3, 4, 5)]
    theirs = [evaluate(rows_of_test()[0], scores_of("none", s), metrics="AUC")["AUC"] for s in (1, 2)]
    assert table.lines[1]["AUC_minus_none"] == pytest.approx(np.mean(ours) - np.mean(theirs), abs=1e-12)
    assert table.lines[1]["AUC_minus_none_p"] < 0.05


def test_intervals_need_the_scores_once(tmp_path: Path) -> None:
    store = store_of(tmp_path, jobs_of())
    store.save_rows("d" * 32, *rows_of_test(), click_rate=0.4)
    made = [as_csv(tables_in(store)), as_markdown(tables_in(store))]
    for file in (tmp_path / "scores").iterdir():
        file.unlink()
    assert [as_csv(tables_in(store)), as_markdown(tables_in(store))] == made

    (file,) = (tmp_path / "users").iterdir()
    file.unlink()
    (table,) = tables_in(store)
    assert table.lines[1]["gAUC_minus_none"] == pytest.approx(float(made[0].splitlines()[2].split(",")[10]), abs=1e-12)
    assert math.isnan(table.lines[1]["gAUC_minus_none_low"])
    assert "the test scores of a run are in neither users/ nor scores/." in " ".join(as_text(table).split())


def test_one_run_without_scores_takes_the_interval_of_its_encoding(tmp_path: Path) -> None:
    store = store_of(tmp_path, jobs_of(["none", "rope", "cape"]))
    next((tmp_path / "scores").glob("DIN-cape-1-*")).unlink()
    (table,) = tables_in(store)
    assert [math.isnan(line["gAUC_minus_none_low"]) for line in table.lines[1:]] == [False, True]


def test_a_seed_without_a_number_is_said_and_in_no_mean(tmp_path: Path) -> None:
    """As of a run that has diverged, whose line has null in place of a number."""
    jobs = jobs_of(seeds=3)
    store = store_of(tmp_path, jobs)
    (whole,) = tables_in(store)
    lines = [json.loads(line) for line in store.file.read_text().splitlines()]
    gone = next(line for line in lines if (line["pe"], line["seed"]) == ("cape", 1))
    gone["metrics"] |= {"gAUC": None, "logloss": None}
    shutil.rmtree(store.path / "runs")  # as of an earlier version, so that lines count
    store.file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (table,) = tables_in(store)
    kept = [line["metrics"]["gAUC"] for line in lines if line["pe"] == "cape" and line is not gone]
    assert table.lines[1]["gAUC_mean"] == pytest.approx(np.mean(kept), abs=1e-12)
    assert math.isfinite(table.lines[1]["gAUC_minus_none_p"])
    assert table.lines[1]["AUC_mean"] == whole.lines[1]["AUC_mean"]
    assert "cape: gAUC and logloss of 2 of 3 seeds; no number for 1 seed (1)." in table.notes
    assert not any("no number" in note for note in whole.notes)


def test_runs_of_other_hyper_parameters_are_not_mixed(tmp_path: Path) -> None:
    tables = tables_of(tmp_path, jobs_of(seeds=3), jobs_of(["none"], seeds=1, epochs=1))
    assert sorted(len(table.lines) for table in tables) == [1, 2]
    assert all(f"hyper-parameters {table.lines[0]['config_hash']}" in table.title for table in tables)


def test_runs_on_other_devices_are_not_mixed(tmp_path: Path) -> None:
    store = store_of(tmp_path, jobs_of(seeds=2))
    for job in jobs_of(seeds=1):
        store.append(result_of(job.key._replace(device="cuda")), scores_of(job.key.pe, job.key.seed))
    tables = tables_in(store)
    assert {"on cuda" in table.title: table.lines[0]["seeds"] for table in tables} == {False: 2, True: 1}
