"""The store of results: nothing finished is lost, nothing foreign is touched."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctr_pe.study.runner import Job
from ctr_pe.study.store import Store, hash_of, repair
from ctr_pe.utils.errors import UserError
from ctr_pe.utils.files import replacing
from tests.support.fake_training import append_many, fill, jobs_of, result_of, rows_of_test, scores_of


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "folder")
    job = jobs_of(dataset="Spielzeug-ü")[0]
    epoch = {"number": 1, "steps": 3, "loss": 0.7, "metrics": {"gAUC": 0.5}, "seconds": 0.1, "auxiliary": {}}
    history = [epoch, epoch | {"number": 2, "loss": float("nan"), "metrics": {"gAUC": float("nan")}}]
    result = result_of(job.key, metrics={"gAUC": float("nan"), "AUC": 0.1 + 0.2, "logloss": 0.5}, history=history)
    store.append(result, scores_of("none", 1))
    store.save_rows("d" * 32, *rows_of_test())

    record = json.loads(store.file.read_text(encoding="utf-8"))
    assert list(record)[:6] == ["model", "dataset", "pe", "seed", "protocol", "metrics"]
    assert record.keys() >= {"epoch", "config_hash", "data_hash", "revision", "versions", "seconds", "threads"}
    assert record["metrics"] == {"gAUC": None, "AUC": 0.1 + 0.2, "logloss": 0.5}
    (found,) = Store(store.path).read().values()
    assert math.isnan(found.metrics.pop("gAUC"))
    result.metrics.pop("gAUC")
    history[1] |= {"loss": None, "metrics": {"gAUC": None}}  # JSON has no NaN
    assert found == result
    saved = store.scores(job.key)
    assert saved is not None
    np.testing.assert_array_equal(saved, scores_of("none", 1))
    rows = store.rows("d" * 32)
    assert rows is not None
    np.testing.assert_array_equal(rows[0], rows_of_test()[0])
    np.testing.assert_array_equal(rows[1], rows_of_test()[1])


def test_what_older_versions_did_not_keep_is_added(tmp_path: Path) -> None:
    store = Store(tmp_path)
    labels, users = rows_of_test()
    store.save_rows("d" * 32, labels, users)
    assert store.about("d" * 32).keys() == {"labels", "users"}
    store.save_rows("d" * 32, labels, users, lengths=labels + 5)
    store.save_rows("d" * 32, labels, users)  # keeps what is there
    kept = store.about("d" * 32)
    np.testing.assert_array_equal(kept["lengths"], labels + 5)
    np.testing.assert_array_equal(kept["labels"], labels)
    store.file.write_text(  # a line of an earlier version, without runs/
        json.dumps({name: value for name, value in asdict(result_of(jobs_of()[0].key)).items() if name != "history"})
        + "\n"
    )
    (found,) = store.read().values()
    assert found.history == []


def old(path: Path, jobs: Sequence[Job]) -> Store:
    """A store of an earlier version: it has lines alone."""
    store = Store(path)
    fill(store, jobs)
    shutil.rmtree(path / "runs")
    return store


def test_a_line_cut_anywhere_is_reported_and_replaced(tmp_path: Path) -> None:
    jobs = jobs_of(seeds=1)
    store = old(tmp_path, jobs)
    whole = store.file.read_bytes()
    first = whole.index(b"\n") + 1
    for end in {first + 1, first + 5, first + 9, first + 40, (first + len(whole)) // 2, len(whole) - 2}:
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        store.file.write_bytes(whole[:end])
        cut = Store(tmp_path)
        assert list(cut.read()) == [jobs[0].key]
        assert len(cut.notices) == 1
        assert "results.jsonl: the last line is cut off" in cut.notices[0]
        assert store.file.read_bytes() == whole[:end]  # reading changes nothing
        fill(cut, jobs)
        assert store.file.read_bytes() == whole


def test_a_last_line_without_its_newline_counts(tmp_path: Path) -> None:
    jobs = jobs_of(seeds=2)
    store = old(tmp_path, jobs[:2])
    store.file.write_bytes(store.file.read_bytes()[:-1])
    again = Store(tmp_path)
    assert len(again.read()) == 2
    assert again.notices == []
    fill(again, jobs)
    assert len(store.file.read_text().splitlines()) == 4
    assert list(Store(tmp_path).read()) == [job.key for job in jobs]


@pytest.mark.parametrize(
    "content", [b"hello", b'{"a": 1}\n', b"[1]\n", b"\xff\x00", b"\n", b'{"model": "DIN"}\n', b'{"model" cut\n{"model"']
)
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "results.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=r"results.jsonl: line 1 is not a benchmark result: choose another --out$"):
        Store(tmp_path)
    assert (tmp_path / "results.jsonl").read_bytes() == content


def test_a_damaged_line_in_the_middle_is_refused(tmp_path: Path) -> None:
    store = old(tmp_path, jobs_of())
    lines = store.file.read_bytes().splitlines(keepends=True)
    store.file.write_bytes(lines[0] + lines[1][:50] + b"\n" + lines[2])
    with pytest.raises(UserError, match="line 2 is not"):
        Store(tmp_path)


def spoilt(path: Path, change: Any, seeds: int = 2) -> list[bytes]:
    """A store whose third line is another, as its lines."""
    store = old(path, jobs_of(seeds=seeds))
    lines = store.file.read_bytes().splitlines(keepends=True)
    lines[2:3] = [change(lines[2])] if isinstance(change(lines[2]), bytes) else change(lines[2])
    store.file.write_bytes(b"".join(lines))
    return lines


def of_type(**wrong: Any) -> Any:
    return lambda line: json.dumps({**json.loads(line), **wrong}).encode() + b"\n"


DAMAGE = [
    (lambda line: b"\n", "empty"),
    (lambda line: b"hello\n", "no JSON"),
    (lambda line: b"[" * 100_000 + b"\n", "no JSON"),
    (lambda line: b"[1]\n", "no result"),
    (lambda line: b'{"a": 1}\n', "'model' is missing"),
    (lambda line: line.replace(b'"seed"', b'"sead"'), "'seed' is missing"),
    (of_type(seed="x"), r"'seed': input should be a valid integer \(given: 'x'\)"),
    (of_type(seed=[1]), "'seed': input should be a valid integer"),
    (of_type(pe=None), "'pe': input should be a valid string"),
    (of_type(metrics={"gAUC": "high"}), r"'metrics.gAUC': input should be a valid number"),
    (of_type(metrics=[]), "'metrics': input should be an object"),
    (of_type(history=[5]), "'history.0': input should be"),
    (of_type(params=7), "'params': input should be"),
    (of_type(epoch=1.5), "'epoch': input should be a valid integer"),
]


@pytest.mark.parametrize(("change", "problem"), DAMAGE, ids=[problem[:24] for _, problem in DAMAGE])
def test_a_bad_line_is_named_and_repair_sets_it_aside(tmp_path: Path, change: Any, problem: str) -> None:
    lines = spoilt(tmp_path, change)
    with pytest.raises(
        UserError, match=rf"line 3 is not a benchmark result \({problem}.*--repair sets it aside$"
    ) as error:
        Store(tmp_path)
    assert len(str(error.value).removeprefix(str(tmp_path))) < 200
    assert (tmp_path / "results.jsonl").read_bytes() == b"".join(lines)
    assert "1 line (line 3) moved to" in repair(tmp_path)
    assert (tmp_path / "results.jsonl").read_bytes() == b"".join(lines[:2] + lines[3:])
    assert (tmp_path / "results.rejected.jsonl").read_bytes() == lines[2]
    assert len(Store(tmp_path).read()) == 3
    assert "nothing to repair" in repair(tmp_path)
    fill(Store(tmp_path), jobs_of(seeds=2))
    assert len(Store(tmp_path).read()) == 4
    assert {path.name for path in tmp_path.iterdir()} == {"results.jsonl", "results.rejected.jsonl", "runs", "scores"}


def test_a_foreign_file_is_not_repaired(tmp_path: Path) -> None:
    assert "nothing to repair" in repair(tmp_path)
    (tmp_path / "results.jsonl").write_text("my notes\n")
    with pytest.raises(UserError, match="no line is a benchmark result"):
        repair(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]
    assert (tmp_path / "results.jsonl").read_text() == "my notes\n"


def test_a_run_is_stored_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store, jobs_of())
    before = store.file.read_bytes()
    fill(Store(tmp_path), jobs_of())
    assert store.file.read_bytes() == before


def test_of_two_lines_for_one_run_the_first_counts(tmp_path: Path) -> None:
    """As two processes may write them whose file system has no locks."""
    store = Store(tmp_path)
    first, second = (result_of(jobs_of()[0].key, metrics={"gAUC": gauc}) for gauc in (0.6, 0.7))
    lines = [json.dumps(asdict(result)) + "\n" for result in (first, second)]
    store.file.write_text("".join(lines))
    assert [result.metrics for result in Store(tmp_path).read().values()] == [{"gAUC": 0.6}]
    store.file.write_text("".join(reversed(lines)))
    assert [result.metrics for result in Store(tmp_path).read().values()] == [{"gAUC": 0.7}]


def test_processes_may_share_a_store(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=append_many, args=(str(tmp_path), first, 30)) for first in (1, 21)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert sorted(key.seed for key in Store(tmp_path).read()) == list(range(1, 51))
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 50  # both wrote 21 to 30
    assert not list(tmp_path.rglob("*.partial"))


def test_a_run_is_a_file_and_a_line(tmp_path: Path) -> None:
    store, jobs = Store(tmp_path), jobs_of(seeds=3)
    fill(store, jobs)
    files = {file.stem: file.read_bytes() for file in (tmp_path / "runs").iterdir()}
    assert store.file.read_bytes() == b"".join(files[job.key.name] for job in jobs)
    (tmp_path / "runs" / f"{jobs[2].key.name}.json").unlink()  # to train it anew
    assert list(store.read()) == [job.key for job in jobs if job != jobs[2]]
    store.file.unlink()  # the lines are made again
    fill(store, jobs)
    assert len(store.file.read_bytes().splitlines()) == 6
    assert list(store.read())[-1] == jobs[2].key


@pytest.mark.parametrize("size", [0, 1, 40, 200])
def test_a_damaged_file_of_a_run_is_reported_and_loses_no_other(tmp_path: Path, size: int) -> None:
    store, jobs = Store(tmp_path), jobs_of(seeds=2)
    fill(store, jobs)
    file = tmp_path / "runs" / f"{jobs[1].key.name}.json"
    whole = file.read_bytes()
    file.write_bytes(whole[:size])
    again = Store(tmp_path)
    assert list(again.read()) == [job.key for job in jobs if job != jobs[1]]
    assert again.notices == [f"{file}: not a benchmark result (no JSON), that run is not counted"]
    fill(again, jobs)
    assert Store(tmp_path).notices == []
    assert len(Store(tmp_path).read()) == len(store.file.read_bytes().splitlines()) == 4


def test_a_store_of_lines_alone_keeps_all_of_them(tmp_path: Path) -> None:
    jobs = jobs_of(seeds=3)
    store = old(tmp_path, jobs[:4])
    before = store.file.read_bytes()
    assert list(Store(tmp_path).read()) == [job.key for job in jobs[:4]]
    assert not (tmp_path / "runs").exists()  # reading changes nothing
    fill(store, jobs)
    assert store.file.read_bytes().startswith(before)
    assert len(list((tmp_path / "runs").glob("*.json"))) == len(store.file.read_bytes().splitlines()) == 6


def test_a_folder_of_that_name_which_is_not_ours_is_not_used(tmp_path: Path) -> None:
    """No line of an earlier version is lost where its files cannot be made."""
    jobs = jobs_of(seeds=2)
    store = old(tmp_path, jobs[:2])
    (tmp_path / "runs" / "events").mkdir(parents=True)
    with pytest.raises(UserError, match="not empty"):
        fill(store, jobs)
    assert list(Store(tmp_path).read()) == [job.key for job in jobs[:2]]
    assert [file.name for file in (tmp_path / "runs").iterdir()] == ["events"]


def test_a_run_that_another_process_adds_meanwhile_has_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the process that lists first and writes last would drop it."""
    store, (first, second) = Store(tmp_path), jobs_of(seeds=1)
    fill(store, [first])
    other = jobs_of(["rope"], seeds=1)[0]

    @contextmanager
    def slow(file: Path) -> Iterator[Path]:
        with replacing(file) as partial:
            yield partial
            if file == store.file and other.key not in store.read():
                monkeypatch.setattr("ctr_pe.study.store.replacing", replacing)
                fill(Store(tmp_path), [other])

    monkeypatch.setattr("ctr_pe.study.store.replacing", slow)
    fill(store, [second])
    assert {json.loads(line)["pe"] for line in store.file.read_text().splitlines()} == {"none", "cape", "rope"}


def test_scores_are_there_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    job = jobs_of()[0]
    seen: list[bool] = []

    @contextmanager
    def spying(file: Path) -> Iterator[Path]:
        with replacing(file) as partial:
            yield partial
        if file.parent.name == "runs":
            seen.append(store.scores(job.key) is not None)

    monkeypatch.setattr("ctr_pe.study.store.replacing", spying)
    fill(store, [job])
    assert seen == [True]


def test_lost_or_broken_files_are_none(tmp_path: Path) -> None:
    store = Store(tmp_path)
    key = jobs_of()[0].key
    assert store.scores(key) is None
    assert store.rows("d" * 32) is None
    fill(store, jobs_of())
    for file in (tmp_path / "scores").iterdir():
        file.write_bytes(file.read_bytes()[:60])
    assert store.scores(key) is None
    assert store.rows("d" * 32) is None


def test_an_out_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="Not a directory"):
        Store(tmp_path / "file")


@pytest.mark.parametrize("other", [{"a": 1, "b": [1, 3]}, {"a": 1.5, "b": [1, 2]}, {"a": 1}])
def test_hash_tells_hyper_parameters_apart(other: dict[str, Any]) -> None:
    assert hash_of({"a": 1, "b": (1, 2)}) == hash_of({"b": [1, 2], "a": 1})
    assert hash_of({"a": 1, "b": [1, 2]}) != hash_of(other)


def test_names_of_score_files_differ() -> None:
    keys = [job.key for job in jobs_of() + jobs_of(x=1) + jobs_of(dataset="b") + jobs_of(protocol="paper")]
    assert len({key.name for key in keys}) == len(keys)


def test_the_device_is_part_of_what_a_run_is(tmp_path: Path) -> None:
    """Rows from before there was a device are those of the CPU, unless they name a GPU; names of their files stay."""
    (job,) = jobs_of(["none"], 1)
    of_gpu = job.key._replace(device="cuda")
    store = Store(tmp_path)
    for key in (job.key, of_gpu):
        store.append(result_of(key), rows_of_test()[0].astype(np.float32))
    assert list(store.read()) == [job.key, of_gpu]
    assert job.key.name != of_gpu.name
    assert job.key.name.endswith(hashlib.blake2b(json.dumps(job.key[:7]).encode(), digest_size=8).hexdigest())
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    lines.sort(key=lambda line: line["device"])
    for line, gpu in zip(lines, (-1, 0), strict=True):
        del line["device"]
        line["gpu"] = gpu
    earlier = tmp_path / "old"
    earlier.mkdir()
    (earlier / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(Store(earlier).read()) == [job.key, of_gpu]


def test_the_published_runs_can_be_read(checkout: Path, tmp_path: Path) -> None:
    files = list((checkout / "benchmark" / "results").glob("*/results.jsonl"))
    assert len(files) >= 3
    for file in files:
        device = "cuda" if file.parent.name.endswith("-gpu") else "cpu"
        assert {key.device for key in Store(file.parent).read()} == {device}
