"""A data set is opened only when it is complete and unchanged, and FuxiCTR reads what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from ctr_pe.config.field_groups import Group
from ctr_pe.data.dataset import Dataset, open_dataset
from ctr_pe.data.root import data_root, list_datasets
from ctr_pe.data.writer import Content, DatasetWriter
from ctr_pe.utils.errors import UserError

GROUPS = (Group(("item_id",), ("item_history",), "age_history"),)
ITEM = {"type": "categorical", "source": "item", "padding_idx": 0, "oov_idx": 5, "vocab_size": 6}
FEATURES = {
    "user_id": {"type": "meta"},
    "item_id": ITEM,
    "item_history": {**ITEM, "type": "sequence", "share_embedding": "item_id", "feature_encoder": None, "max_len": 7},
    "age_history": {"type": "meta", "max_len": 7},
}


def write(out: Path, rows: int = 3, extra: str = "", **options: bool) -> Dataset:
    with DatasetWriter(out, **options) as writer:
        put_splits(writer.path, rows, extra)
        return finish(writer)


def put_splits(folder: Path, rows: int = 3, extra: str = "") -> None:
    columns = {
        "label": [1] * rows,
        "user_id": range(rows),
        "item_id": [2] * rows,
        "item_history": [[1, 2]] * rows,
        "age_history": [[9, 5]] * rows,
        **({extra: [1] * rows} if extra else {}),
    }
    for split in ("train", "valid", "test"):
        pl.DataFrame(columns).write_parquet(folder / f"{split}.parquet")


def interrupted(out: Path, **options: bool) -> None:
    with DatasetWriter(out, **options) as writer:
        put_splits(writer.path)
        raise KeyboardInterrupt


def finish(writer: DatasetWriter) -> Dataset:
    report = {"truncated": 4, "rows": "never replaces the writer's own"}
    return writer.finish(Content("label", "user_id", FEATURES, GROUPS, {"item_id": {"a": 1}}, report))


def test_a_finished_set_opens_again_by_name_and_by_path(tmp_path: Path) -> None:
    written = write(tmp_path / "shop")
    assert open_dataset("shop", tmp_path) == open_dataset(str(tmp_path / "shop")) == written
    assert written.rows == {"train": 3, "valid": 3, "test": 3}
    assert (written.groups, written.group_id, written.label, written.max_len) == (GROUPS, "user_id", "label", 7)
    assert written.split("valid") == tmp_path / "shop" / "valid.parquet"
    assert json.loads((tmp_path / "shop" / "report.json").read_text())["truncated"] == 4
    assert list_datasets(tmp_path) == [("shop", written.rows)]
    assert not list(tmp_path.glob("*.partial"))


def test_fuxictr_reads_the_feature_map_and_the_dataset_config(tmp_path: Path) -> None:
    from fuxictr.utils import load_dataset_config

    dataset = write(tmp_path / "shop")
    feature_map = dataset.feature_map(embedding_dim=8)
    assert feature_map.features == FEATURES
    assert (feature_map.labels, feature_map.group_id, feature_map.num_fields) == (["label"], "user_id", 2)
    stored = json.loads((dataset.path / "feature_map.json").read_text())
    assert feature_map.input_length == stored["input_length"]
    assert stored["total_features"] == 6  # the history shares the item's table
    assert feature_map.sum_emb_out_dim() == 16
    config = load_dataset_config(str(dataset.path), "shop")
    assert config["target_field"] == [["item_id"]]
    assert (
        yaml.safe_load((dataset.path / "dataset_config.yaml").read_text())["shop"].items() <= config.items()
    )  # no tags
    assert Path(config["data_root"], "shop") == dataset.path


def test_the_data_hash_is_of_the_content(tmp_path: Path) -> None:
    one, same, other = (write(tmp_path / folder / "shop", rows) for folder, rows in (("a", 3), ("b", 3), ("c", 4)))
    assert one.data_hash == same.data_hash != other.data_hash


def test_a_half_built_set_does_not_open(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "shop")
    assert not list(tmp_path.iterdir())
    (tmp_path / "shop").mkdir()
    put_splits(tmp_path / "shop")
    with pytest.raises(UserError, match=r"half-built.*ctr-pe data build"):
        open_dataset("shop", tmp_path)


def test_folders_of_others_beside_it_are_left_alone(tmp_path: Path) -> None:
    for name in ("shop.partial", "shop.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("mine")
    (tmp_path / "mall.old").mkdir()
    for out in ("shop", "mall"):
        write(tmp_path / out)
        write(tmp_path / out, overwrite=True)
        with pytest.raises(KeyboardInterrupt):
            interrupted(tmp_path / out, overwrite=True)
    for name in ("shop.partial", "shop.old"):
        assert [file.read_text() for file in (tmp_path / name).iterdir()] == ["mine"]
    assert {path.name for path in tmp_path.iterdir()} == {"shop", "mall", "shop.partial", "shop.old", "mall.old"}


def test_two_builds_of_one_set_do_not_mix(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "shop") as first, DatasetWriter(tmp_path / "shop") as second:
        put_splits(first.path, rows=3)
        put_splits(second.path, rows=4)
        assert finish(first).rows["train"] == 3
        with pytest.raises(UserError, match="exists already"):
            finish(second)
    assert open_dataset("shop", tmp_path).rows["train"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["shop"]


@pytest.mark.parametrize("file", ["train.parquet", "feature_map.json", "feature_vocab.json"])
def test_a_changed_or_missing_file_is_noticed(tmp_path: Path, file: str) -> None:
    path = write(tmp_path / "shop").path / file
    content = path.read_bytes()
    path.write_bytes(content + b" ")
    with pytest.raises(UserError, match=rf"{file}: changed since it was built"):
        open_dataset("shop", tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=rf"{file}: missing"):
        open_dataset("shop", tmp_path)
    path.write_bytes(content)
    open_dataset("shop", tmp_path)


def test_a_stale_feature_map_of_the_same_size_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "shop").path / "feature_map.json"
    path.write_text(path.read_text().replace('"vocab_size": 6', '"vocab_size": 9'))
    with pytest.raises(UserError, match=r"feature_map\.json: changed since it was built"):
        open_dataset("shop", tmp_path)


def test_a_feature_map_of_another_set_is_noticed(tmp_path: Path) -> None:
    """Even when report.json was patched to agree with the file: FuxiCTR itself would train on the wrong tables."""
    import hashlib

    path = write(tmp_path / "shop").path
    feature_map = path / "feature_map.json"
    feature_map.write_text(feature_map.read_text().replace('"dataset_id": "shop"', '"dataset_id": "mall"'))
    report = json.loads((path / "report.json").read_text())
    report["files"]["feature_map.json"]["blake2b"] = hashlib.blake2b(
        feature_map.read_bytes(), digest_size=16
    ).hexdigest()
    (path / "report.json").write_text(json.dumps(report))
    with pytest.raises(UserError, match="of data set 'mall', not 'shop'"):
        open_dataset("shop", tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1, "files": {}}', '{"format": 99, "files": {}}'])
def test_a_damaged_report_gives_one_line(tmp_path: Path, text: str) -> None:
    (write(tmp_path / "shop").path / "report.json").write_text(text)
    with pytest.raises(UserError, match=r"report|format") as error:
        open_dataset("shop", tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("files", None),
        ("files", []),
        ("files", {"train.parquet": {"bytes": "x", "blake2b": "x"}}),
        ("rows", -1.5),
        ("rows", {"train": "x"}),
        ("group_id", [[]]),
        ("label", None),
        ("max_len", "x"),
        ("groups", [{"target": "item_id"}]),
    ],
)
def test_a_report_of_another_content_gives_one_line(key: str, value: Any, tmp_path: Path) -> None:
    report = write(tmp_path / "mine").path / "report.json"
    report.write_text(json.dumps({**json.loads(report.read_text()), key: value}))
    with pytest.raises(UserError, match=rf"report\.json: not a readable report \('{key}[^\n]+ build it with `ctr-pe"):
        open_dataset("mine", tmp_path)


def test_a_missing_set_names_the_command_that_makes_it(tmp_path: Path) -> None:
    write(tmp_path / "shop")
    with pytest.raises(UserError, match=r"did you mean 'shop'"):
        open_dataset("shopp", tmp_path)
    with pytest.raises(UserError, match=r"ctr-pe data build --recipe amazon_sports .*--out \S*amazon_sports"):
        open_dataset("amazon_sports", tmp_path)
    with pytest.raises(UserError, match=r"ctr-pe data fetch kuaivideo_x1"):
        open_dataset("kuaivideo_x1", tmp_path)


def test_a_set_is_replaced_only_on_demand_and_other_folders_never(tmp_path: Path) -> None:
    write(tmp_path / "shop")
    with pytest.raises(UserError, match="overwrite=True"):
        write(tmp_path / "shop")
    assert write(tmp_path / "shop", rows=5, overwrite=True).rows["train"] == 5
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "shop", overwrite=True)
    assert open_dataset("shop", tmp_path).rows["train"] == 5
    (tmp_path / "home").mkdir()
    with pytest.raises(UserError, match="not a complete data set"):
        write(tmp_path / "home", overwrite=True)


def test_columns_must_be_those_of_the_feature_map(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="play_time"):
        write(tmp_path / "shop", extra="play_time")
    assert not list(tmp_path.iterdir())


def test_an_unknown_split_and_an_unpaired_group_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no split 'tests': did you mean 'test'"):
        write(tmp_path / "shop").split("tests")
    with pytest.raises(ValueError, match="pair up"):
        Group(("item_id", "cate_id"), ("item_history",))


def test_the_data_root_is_given_or_from_the_environment_or_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CTR_PE_DATA", raising=False)
    assert data_root() == Path("data")
    monkeypatch.setenv("CTR_PE_DATA", "/somewhere")
    assert data_root() == Path("/somewhere")
    assert data_root(Path("given")) == Path("given")
