"""FuxiCTR-form CSV: the ids mean what FuxiCTR's own mean, and nothing stale or half-built is ever used."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import polars as pl
import pytest
import sklearn.preprocessing
import yaml

from ctr_pe.commands.run_expid import main
from ctr_pe.config.field_groups import Group
from ctr_pe.config.validation import check
from ctr_pe.data.loader import BatchLoader
from ctr_pe.fuxictr.csv import REFUSED, FeatureColumn, build_csv, feature_specs
from ctr_pe.fuxictr.experiment import open_source
from ctr_pe.training import DataSource, Run, build_model, train
from ctr_pe.utils.errors import UserError

TRAIN = """label,user_id,item_id,cate_id,item_history,cate_history,price
1,u1,5,a,,,1.5
0,u1,6,b,5,a,
1,u2,5,a,7^6^5,a^b^a,2
0,u3,8,,9^5,c^,0.5
"""
TEST = """label,user_id,item_id,cate_id,item_history,cate_history,price
1,u4,99,zz,5^98^6,a^zz^b,1
0,u1,7,a,5,a,3
"""
HISTORY: dict[str, Any] = {"active": True, "dtype": "str", "type": "sequence", "splitter": "^", "max_len": 2}
COLUMNS: list[dict[str, Any]] = [
    {"name": "user_id", "active": True, "dtype": "str", "type": "meta", "remap": True},
    {"name": ["item_id", "cate_id"], "active": True, "dtype": "str", "type": "categorical"},
    {"name": "item_history", "share_embedding": "item_id", "feature_encoder": None, **HISTORY},
    {"name": "cate_history", "share_embedding": "cate_id", "feature_encoder": None, **HISTORY},
    {"name": "price", "active": True, "dtype": "float", "type": "numeric", "fill_na": 0},
]

GROUPS = [Group(("item_id", "cate_id"), ("item_history", "cate_history"))]


@pytest.fixture
def params(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "raw").mkdir()
    for name, text in (("train", TRAIN), ("valid", TEST), ("test", TEST)):
        (tmp_path / "raw" / f"{name}.csv").write_text(text)
    return {
        "data_root": str(tmp_path / "data"),
        "dataset_id": "tiny",
        "data_format": "csv",
        **{f"{split}_data": str(tmp_path / "raw" / f"{split}.csv") for split in ("train", "valid", "test")},
        "feature_cols": [dict(column) for column in COLUMNS],
        "label_col": {"name": "label", "dtype": "float"},
        "group_id": "user_id",
        "min_categr_count": 1,
    }


def change(params: dict[str, Any], name: str, /, **keys: Any) -> dict[str, Any]:
    entries = [(column, column["name"]) for column in params["feature_cols"]]
    named = [(column, names if isinstance(names, list) else [names]) for column, names in entries]
    alone = [{**column, "name": one} for column, names in named for one in names]
    columns = [{**column, **keys} if column["name"] == name else column for column in alone]
    return {**params, "feature_cols": columns}


def originals(params: dict[str, Any], column: str, split: str) -> list[Any]:
    """The column with its ids turned back into what they stand for; ? for the unknown."""
    dataset = build_csv(params)
    table = json.loads((dataset.path / "feature_vocab.json").read_text())[column.replace("_history", "_id")]
    name = {number: original for original, number in table.items()} | {0: "", table["__OOV__"]: "?"}
    values = pl.read_parquet(dataset.split(split))[column].to_list()
    return [[name[v] for v in value] if isinstance(value, list) else name[value] for value in values]


def test_ids_stand_for_the_original_values(params: dict[str, Any]) -> None:
    assert originals(params, "item_id", "train") == ["5", "6", "5", "8"]
    assert originals(params, "cate_id", "train") == ["a", "b", "a", "?"]
    assert originals(params, "item_id", "test") == ["?", "7"]
    assert originals(params, "item_history", "train") == [[], ["5"], ["6", "5"], ["9", "5"]]  # the most recent two
    assert originals(params, "cate_history", "train") == [[], ["a"], ["b", "a"], ["c", ""]]
    assert originals(params, "item_history", "test") == [["?", "6"], ["5"]]
    assert originals(params, "cate_history", "test") == [["?", "b"], ["a"]]


def test_numbers_groups_and_labels(params: dict[str, Any]) -> None:
    dataset = build_csv(params, [Group(("item_id",), ("item_history",))])
    train, test = (pl.read_parquet(dataset.split(split)) for split in ("train", "test"))
    assert train["price"].to_list() == [1.5, 0.0, 2.0, 0.5]
    assert train["label"].to_list() == [1, 0, 1, 0]
    groups = pl.concat([train["user_id"], test["user_id"]]).to_list()
    assert groups[0] == groups[1] == groups[5]  # u1, numbered over all splits
    assert len(set(groups)) == 4
    assert dataset.group_id == "user_id"
    assert dataset.groups[0].history == ("item_history",)
    (batch,) = BatchLoader(dataset.feature_map(4), dataset.split("train"))
    assert batch["item_history"].shape == (4, 2)


def test_the_first_rows_do_not_decide_what_a_column_holds(params: dict[str, Any]) -> None:
    """Hundreds of rows with one number in each list, then lists."""
    file = Path(params["train_data"])
    header, *rows = TRAIN.splitlines()
    file.write_text("\n".join([header, *["1,u1,5,a,7,a,1.5"] * 300, *rows, ""]))
    source = build_csv(params, GROUPS)
    assert pl.read_parquet(source.split("train"))["item_history"].list.len().to_list()[-4:] == [0, 1, 2, 2]


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize("normalizer", [None, "StandardScaler"])
@pytest.mark.parametrize(("fill", "number"), [({}, 0.0), ({"fill_na": 2}, 2.0), ({"fill_na": "-1.5"}, -1.5)])
def test_a_number_that_is_none_is_filled_and_counted(
    params: dict[str, Any], form: str, normalizer: str | None, fill: dict[str, Any], number: float
) -> None:
    """Null, NaN and infinite ones alike, before anything is normalised."""
    numbers, keys = ["", "nan", "inf", "-Infinity", "NULL", "3.5", "8"], {"normalizer": normalizer, **fill}
    for split in ("train", "valid", "test"):
        lines = [f"{row % 2},u{row % 3},5,a,,,{price}" for row, price in enumerate(numbers)]
        file = Path(params[f"{split}_data"])
        file.write_text("\n".join([TRAIN.splitlines()[0], *lines, ""]))
        if form == "parquet":
            prices = [None, float("nan"), float("inf"), float("-inf"), None, 3.5, 8.0]
            pl.read_csv(file, infer_schema=False).with_columns(price=pl.Series(prices)).write_parquet(file)
    for column in params["feature_cols"]:
        column.pop("fill_na", None)
    dataset = build_csv(change({**params, "data_format": form}, "price", **keys))
    wanted = np.array([number] * 5 + [3.5, 8.0])
    wanted = (wanted - wanted.mean()) / wanted.std() if normalizer else wanted
    np.testing.assert_allclose(pl.read_parquet(dataset.split("test"))["price"].to_numpy(), wanted)
    report = json.loads((dataset.path / "report.json").read_text())
    assert report["splits"]["train"]["price_filled"] == 5
    assert report["fill_na"] == {"price": number}


@pytest.mark.parametrize("fill", ["none", "nan", float("inf")])
def test_a_number_is_filled_with_a_finite_one(params: dict[str, Any], fill: Any) -> None:
    with pytest.raises(UserError, match="'price': fill_na of a numeric column is a finite number, not"):
        build_csv(change(params, "price", fill_na=fill))


def test_another_separator_is_named(params: dict[str, Any]) -> None:
    for split in ("train", "valid", "test"):
        file = Path(params[f"{split}_data"])
        file.write_text(file.read_text().replace(",", "\t"))
    with pytest.raises(UserError, match=r"train\.csv: line 1: tab is between columns, not ',': sep: .\\t., or"):
        build_csv(params)
    assert originals({**params, "sep": "\t"}, "item_id", "train") == ["5", "6", "5", "8"]


def test_what_is_cut_empty_and_unseen_is_counted(params: dict[str, Any]) -> None:
    report = json.loads((build_csv(params).path / "report.json").read_text())["splits"]
    train, test = report["train"], report["test"]
    assert (train["rows"], train["positives"]) == (4, 2)
    assert (train["item_history_truncated"], train["item_history_empty"]) == (1, 1)
    assert (train["cate_id_unseen"], train["item_id_unseen"]) == (1, 0)
    assert (test["item_id_unseen"], test["item_history_unseen"], test["cate_history_unseen"]) == (1, 1, 1)


def test_rare_values_are_unknown(params: dict[str, Any]) -> None:
    """Known is what one column of a table has often enough: 5 is 2 times a target and 3 times in a history."""
    params = {**params, "min_categr_count": 2}
    assert originals(params, "item_id", "train") == ["5", "?", "5", "?"]
    assert originals(params, "item_history", "train") == [[], ["5"], ["?", "5"], ["?", "5"]]
    assert originals(change(params, "item_history", min_categr_count=4), "item_id", "test") == ["?", "?"]


def test_groups_the_values_as_fuxictr_does(params: dict[str, Any], tmp_path: Path) -> None:
    """Against FuxiCTR's own FeatureProcessor on the same files: the same values are equal, known or unknown."""
    from fuxictr.preprocess import FeatureProcessor

    columns = [{**column, "padding": "pre"} if "max_len" in column else column for column in COLUMNS]
    processor = FeatureProcessor(**{**params, "dataset_id": "theirs", "feature_cols": columns, "min_categr_count": 2})

    def read(split: str) -> pl.LazyFrame:
        types = dict.fromkeys(("user_id", "item_id", "cate_id", "item_history", "cate_history"), pl.String)
        return processor.preprocess(pl.scan_csv(params[f"{split}_data"], schema_overrides=types))

    processor.fit(read("train"), min_categr_count=2)
    dataset = build_csv({**params, "min_categr_count": 2})
    specs = dataset.feature_map(4).features
    for split in ("train", "test"):
        batch = {name: column.to_numpy() for name, column in read(split).collect().to_dict().items()}
        theirs = processor.transform(batch)
        ours = pl.read_parquet(dataset.split(split))
        for name in ("item_id", "cate_id", "item_history", "cate_history"):
            assert specs[name]["vocab_size"] == processor.feature_map.features[name]["vocab_size"]
            pairs = set()
            for mine, other in zip(ours[name].to_list(), np.asarray(theirs[name]).tolist(), strict=True):
                if name.endswith("_history"):
                    padded = [0] * (2 - len(mine)) + mine
                    pairs |= set(zip(padded, other, strict=True))
                else:
                    pairs.add((mine, other))
            assert len(pairs) == len({mine for mine, _ in pairs}) == len({other for _, other in pairs})


def test_a_second_call_reads_what_is_there(params: dict[str, Any]) -> None:
    first = build_csv(params)
    before = first.split("train").stat().st_mtime_ns
    assert build_csv(params).data_hash == first.data_hash
    assert first.split("train").stat().st_mtime_ns == before


def test_changed_files_or_columns_build_it_again(
    params: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = build_csv(params)
    with (tmp_path / "raw" / "train.csv").open("a") as file:
        file.write("1,u9,77,a,5,a,1\n")
    second = build_csv(params)
    assert second.rows["train"] == first.rows["train"] + 1
    longer = [{**column, "max_len": 3} if "max_len" in column else column for column in params["feature_cols"]]
    assert build_csv({**params, "feature_cols": longer}).max_len == 3
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 2


def test_a_build_that_fails_leaves_nothing(params: dict[str, Any], tmp_path: Path) -> None:
    """FuxiCTR leaves feature_map.json, and the next call takes that for a finished build."""
    (tmp_path / "raw" / "valid.csv").write_text(TEST.replace("0,u1,7", ",u1,7"))
    with pytest.raises(UserError, match=r"valid\.csv: label 'label' has value None"):
        build_csv(params)
    assert [path for path in (tmp_path / "data").rglob("*") if path.is_file()] == []
    (tmp_path / "raw" / "valid.csv").write_text(TEST)
    assert build_csv(params).rows == {"train": 4, "valid": 2, "test": 2}


def test_another_data_set_in_its_place_is_left_alone(params: dict[str, Any], tmp_path: Path) -> None:
    from ctr_pe.data.synthetic.bursts import generate

    generate(tmp_path / "data" / "tiny" / "ctr_pe", users=5, valid_users=5, test_users=5)
    with pytest.raises(UserError, match="not made from CSV files"):
        build_csv(params)


def test_copies_and_vectors(params: dict[str, Any], tmp_path: Path) -> None:
    """As the KuaiVideo config: a second table over the item ids, from vectors; all ids with a vector are known."""
    with h5py.File(tmp_path / "vectors.h5", "w") as file:
        file["key"], file["value"] = np.array([5, 99, 1]), np.arange(6.0).reshape(3, 2)
    entry = {"active": True, "dtype": "str", "embedding_dim": 2, "pretrained_emb": str(tmp_path / "vectors.h5")}
    emb = {"name": "item_emb", "type": "categorical", "preprocess": "copy_from(item_id)", **entry}
    history = {"name": "emb_history", "share_embedding": "item_emb", "preprocess": "copy_from(item_history)", **entry}
    columns = [*params["feature_cols"], emb, {**HISTORY, **history, "feature_encoder": None}]
    params = {**params, "feature_cols": columns}
    dataset = build_csv(params)
    from fuxictr.pytorch.layers import FeatureEmbeddingDict

    layer = FeatureEmbeddingDict(dataset.feature_map(4), 4)
    (batch,) = BatchLoader(dataset.feature_map(4), dataset.split("test"))
    vectors = layer({name: batch[name] for name in ("item_emb", "emb_history")})
    assert vectors["item_emb"][0].tolist() == [2.0, 3.0]  # 99, which no train row has
    assert vectors["emb_history"][1, 0].tolist() == [0.0, 1.0]  # 5


@pytest.mark.parametrize("normalizer", ["StandardScaler", "MinMaxScaler"])
@pytest.mark.parametrize("constant", [False, True])
def test_numbers_are_normalized_as_by_scikit_learn(params: dict[str, Any], normalizer: str, constant: bool) -> None:
    """Fitted on the train rows, missing ones filled first, and applied to all splits."""
    fitted = np.array([[2.0]] * 4 if constant else [[1.5], [0.0], [2.0], [0.5]])
    if constant:
        train = Path(params["train_data"])
        rows = [line.rpartition(",")[0] for line in train.read_text().splitlines()]
        train.write_text("\n".join([f"{rows[0]},price", *(f"{row},2" for row in rows[1:])]))
    dataset = build_csv(change(params, "price", normalizer=normalizer))
    scaler = getattr(sklearn.preprocessing, normalizer)().fit(fitted)
    for split, raw in (("train", fitted), ("test", np.array([[1.0], [3.0]]))):
        found = pl.read_parquet(dataset.split(split))["price"].to_numpy()
        np.testing.assert_allclose(found, scaler.transform(raw)[:, 0])
    assert json.loads((dataset.path / "report.json").read_text())["normalizers"]["price"]


def write_vectors(file: Path, keys: Any, values: Any) -> None:
    if file.suffix == ".npz":
        np.savez(file, key=keys, value=values)
    elif file.suffix == ".h5":
        with h5py.File(file, "w") as content:
            content["key"], content["value"] = keys, values
    else:
        pl.DataFrame({"key": keys, "value": values.tolist()}).write_parquet(file)


@pytest.mark.parametrize("usage", ["init", "sum", "concat"])
@pytest.mark.parametrize("suffix", [".npz", ".parquet", ".h5"])
def test_pretrained_vectors(params: dict[str, Any], tmp_path: Path, suffix: str, usage: str) -> None:
    """FuxiCTR's own layer finds them under our ids, also for ids that train rows lack, and a model learns."""
    file, values = tmp_path / f"vectors{suffix}", np.arange(12.0).reshape(4, 3)
    write_vectors(file, np.array([5, 99, 1, 8]), values)
    given = {"pretrained_emb": str(file), "pretrain_usage": usage, "pretrain_dim": 3}
    dataset = build_csv(change(params, "item_id", **given), GROUPS)
    vocabulary = json.loads((dataset.path / "feature_vocab.json").read_text())["item_id"]
    hyper = {"embedding_dim": 4, "dnn_hidden_units": [4], "attention_hidden_units": [4], "metrics": ["AUC"]}
    run = Run(
        "DIN", DataSource.of(dataset), "cape", 1, params={**hyper, "monitor": "AUC", "epochs": 2, "net_regularizer": 0}
    )
    layer = build_model(run, dataset, str(tmp_path)).embedding_layer.embedding_layers["item_id"]
    for original, vector in zip(("5", "99", "1", "8"), values, strict=True):
        assert layer.pretrain_embedding.weight[vocabulary[original]].tolist() == vector.tolist()
    assert layer.pretrain_embedding.weight[vocabulary["7"]].tolist() == [0.0] * 3
    assert not layer.pretrain_embedding.weight.requires_grad
    assert np.isfinite(train(run).scores).all()


@pytest.mark.parametrize(
    ("suffix", "keys", "values", "message"),
    [
        (".npz", [1, 2], np.zeros((2, 4)), "vectors of dim 4, but 'item_id' has pretrain_dim: 3"),
        (".npz", [1, 2], np.zeros((3, 3)), "2 keys, values of shape (3, 3): one vector per key"),
        (".npz", [1, 2], np.zeros(2), "one vector per key"),
        (".npz", np.array(["a", None], object), np.zeros((2, 3)), "no .npz file with 'key' and 'value'"),
        (".parquet", [1, 2], np.array([[1.0], [1.0, 2.0]], object), "no .parquet file with 'key' and 'value'"),
        (".csv", None, None, "are in .h5, .npz, .parquet files"),
        (".npz", None, None, "no .npz file with 'key' and 'value'"),
        (".h5", None, None, "no .h5 file with 'key' and 'value'"),
        (".parquet", None, None, "no .parquet file with 'key' and 'value'"),
    ],
)
def test_mistakes_in_vectors(
    params: dict[str, Any], tmp_path: Path, suffix: str, keys: Any, values: Any, message: str
) -> None:
    file = tmp_path / f"vectors{suffix}"
    if keys is None:
        file.write_text("nothing of the kind")
    else:
        write_vectors(file, np.asarray(keys), values)
    with pytest.raises(UserError) as error:
        build_csv(change(params, "item_id", pretrained_emb=str(file), pretrain_dim=3))
    assert message in str(error.value)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="no such file"):
        build_csv(change(params, "item_id", pretrained_emb=str(tmp_path / "vector.npz")))


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("price", {"normalizer": "RobustScaler"}, "'normalizer': input should be 'StandardScaler' or 'MinMaxScaler'"),
        ("cate_id", {"normalizer": "MinMaxScaler"}, "a categorical column has no normalizer"),
        ("item_history", {"share_embedding": "itemid"}, "did you mean 'item_id'?"),
        ("item_history", {"max_lenght": 3}, "'item_history': key 'max_lenght' is unknown: did you mean 'max_len'?"),
        ("item_history", {"max_len": "3"}, "'item_history': 'max_len': input should be a valid integer"),
        ("item_history", {"type": "sequences"}, "'item_history': 'type': input should be 'categorical'"),
        ("item_history", {"preprocess": "__import__('os')"}, "is not copy_from(column)"),
        ("price", {"preprocess": "convert_weekday"}, "write what it makes as a column of the files"),
        ("price", {"pretrained_emb": "x.npz"}, "a numeric column has no ids: pretrained_emb has vectors of ids"),
        ("cate_id", {"remap": False}, "remap: false is for meta columns"),
        ("cate_id", {"category_processor": "hash_bucket", "num_buckets": 9}, "is not read: FuxiCTR 2.3 cannot build"),
        ("cate_id", {"vocab_size": 9}, "'vocab_size' is not read: ids are counted in the train rows"),
        ("cate_id", {"embedding_callback": "nn.Linear(4, 4)"}, "is not read: now feature_encoder"),
        ("item_history", {"feature_encoder": "default", "encoder": "MaskedSumPooling"}, "key 'encoder' is unknown"),
        ("price", {"dtype": "__import__('os')"}, "'price': 'dtype': input should be 'str', 'int', 'float' or 'list'"),
        ("price", {"name": "item_id"}, "'item_id' is given twice"),
        ("price", {"name": "prise"}, "no column 'prise': did you mean 'price'?"),
        ("price", {"fill_na": None, "name": "item_history", "type": "numeric"}, "'item_history' is given twice"),
    ],
)
def test_mistakes_in_feature_cols(params: dict[str, Any], name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        build_csv(change(params, name, **keys))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_data": "nowhere.csv"}, "nowhere.csv: no such file"),
        ({"valid_data": None, "valid_size": 0.1}, "valid_data is missing: the file of the valid rows"),
        ({"label_col": {"name": "lable"}}, "did you mean 'label'?"),
        ({"label_col": None}, "label_col"),
        ({"feature_cols": None}, "feature_cols is missing"),
    ],
)
def test_mistakes_in_the_rest(params: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        build_csv({**params, **changes})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_every_option_of_fuxictr_is_read_or_refused_and_in_the_documents(checkout: Path) -> None:
    from fuxictr.preprocess import feature_processor

    source = Path(str(feature_processor.__file__)).read_text()
    written = re.findall(r'col\["(\w+)"|col\.get\("(\w+)"|"(\w+)" (?:not )?in col\b', source)
    options = {name for found in written for name in found} - {""}
    options |= {"na_value", "encoder", "embedding_callback", "embedding_hook"}  # of FuxiCTR before 2.1
    assert {"normalizer", "category_processor", "vocab_size", "fill_na"} <= options
    known = {*FeatureColumn.model_fields, "na_value", "encoder"}
    assert not known & REFUSED.keys()
    assert options <= known | REFUSED.keys()
    table = (checkout / "docs" / "fuxictr.md").read_text().partition("## Options of a column")[2].partition("\n## ")[0]
    assert [name for name in [*known, *REFUSED] if f"`{name}`" not in table] == []


@pytest.mark.parametrize("key", ["fill_na", "na_value"])
def test_the_value_of_missing_ones_is_missing(params: dict[str, Any], key: str) -> None:
    """As in FuxiCTR: unknown as an id, nothing as an item of a history."""
    params = change(change(params, "cate_id", **{key: "b"}), "cate_history", **{key: "a"})
    assert originals(params, "cate_id", "train") == ["a", "?", "a", "?"]
    assert originals(params, "cate_history", "train") == [[], [], ["b", ""], ["c", ""]]
    whole = change(params, "item_id", dtype="int", **{key: 5})
    assert originals(whole, "item_id", "train") == ["?", "6", "?", "8"]


def test_encoders_before_2_1(params: dict[str, Any]) -> None:
    for old, new in {"MaskedSumPooling": "layers.MaskedSumPooling()", "null": None}.items():
        columns = [{**column} for column in params["feature_cols"]]
        columns[2] = {key: value for key, value in columns[2].items() if key != "feature_encoder"} | {"encoder": old}
        assert feature_specs({**params, "feature_cols": columns})["item_history"].get("feature_encoder") == new


def test_test_rows_are_optional(params: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained and evaluated on the validation rows, as in FuxiCTR, and validated alike."""
    monkeypatch.chdir(tmp_path)
    dataset = {key: value for key, value in params.items() if key not in ("dataset_id", "test_data")}
    model = {"model": "DIN", "dataset_id": "tiny", "epochs": 1, "embedding_dim": 4, "dnn_hidden_units": [4]}
    model |= {"attention_hidden_units": [4], "metrics": ["AUC", "NDCG(k=2)", "MRR"], "monitor": {"MRR": 1, "AUC": 0.5}}
    model |= {"target_field": [["item_id"]], "sequence_field": [["item_history"]]}
    dataset["feature_cols"] = [column for column in COLUMNS if column["name"] != "cate_history"]
    Path("config").mkdir()
    Path("config/dataset_config.yaml").write_text(yaml.safe_dump({"tiny": dataset}))
    Path("config/model_config.yaml").write_text(yaml.safe_dump({"X": model}))
    for file in ("dataset_config", "model_config"):
        assert check(Path(f"config/{file}.yaml"), tmp_path)[1] == []
    assert main(["--config", "config", "--expid", "X"]) == 0
    [line] = Path("config.csv").read_text().splitlines()
    assert "[val] AUC: " in line
    assert "NDCG(k=2): " in line
    assert line.endswith("[test] ")


def test_values_of_the_wrong_type_name_the_file(params: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "raw" / "train.csv"
    file.write_text(TRAIN.replace("1.5", "cheap"))
    with pytest.raises(UserError, match="train") as error:
        build_csv(params)
    assert "\n" not in str(error.value)
    assert not os.path.exists(tmp_path / "data" / "tiny" / "ctr_pe")


def test_parquet_files_give_what_csv_files_give(params: dict[str, Any], tmp_path: Path) -> None:
    """With histories as lists or as text."""
    expected = build_csv(params, GROUPS)
    for as_lists in (True, False):
        files = {}
        for split in ("train", "valid", "test"):
            frame = pl.read_csv(params[f"{split}_data"])
            if as_lists:
                lists = pl.col("item_history", "cate_history").cast(pl.String).str.split("^")
                frame = frame.with_columns(lists)
                frame = frame.with_columns(pl.col("item_history").list.eval(pl.element().cast(pl.Int64)))
            files[f"{split}_data"] = str(tmp_path / f"{split}-{as_lists}.parquet")
            frame.write_parquet(files[f"{split}_data"])
        given = {**params, **files, "data_format": "parquet", "dataset_id": f"lists {as_lists}"}
        dataset = open_source(given).dataset
        assert dataset is not None
        for split in ("train", "valid", "test"):
            found, wanted = pl.read_parquet(dataset.split(split)), pl.read_parquet(expected.split(split))
            assert found.equals(wanted)
        vocab = "feature_vocab.json"
        assert (dataset.path / vocab).read_text() == (expected.path / vocab).read_text()


def test_a_vector_in_every_row(params: dict[str, Any], tmp_path: Path) -> None:
    """Type ``embedding``, as in FuxiCTR's demo: its numbers reach the model through a projection."""
    random = np.random.default_rng(0)
    files = {}
    for split in ("train", "valid", "test"):
        frame = pl.read_csv(params[f"{split}_data"])
        lists = [pl.col(name).cast(pl.String).str.split("^") for name in ("item_history", "cate_history")]
        frame = frame.with_columns(*lists, image=pl.Series(random.random((len(frame), 3)).tolist()))
        files[f"{split}_data"] = str(tmp_path / f"{split}.parquet")
        frame.write_parquet(files[f"{split}_data"])
    image = {"name": "image", "active": True, "dtype": "list", "type": "embedding", "pretrain_dim": 3}
    params = {**params, **files, "data_format": "parquet", "feature_cols": [*params["feature_cols"], image]}
    dataset = build_csv(params, GROUPS)
    (batch,) = BatchLoader(dataset.feature_map(4), dataset.split("test"))
    raw = pl.read_parquet(params["test_data"])["image"].to_list()
    np.testing.assert_allclose(batch["image"].numpy(), raw, rtol=1e-6)
    hyper = {"embedding_dim": 4, "dnn_hidden_units": [4], "attention_hidden_units": [4], "metrics": ["AUC"]}
    run = Run("DIN", DataSource.of(dataset), "cape", 1, params={**hyper, "monitor": "AUC", "epochs": 1})
    model = build_model(run, dataset, str(tmp_path)).eval()
    assert tuple(model.embedding_layer.feature_encoders["image"].weight.shape) == (4, 3)
    other = model({**batch, "image": batch["image"] + 1})["y_pred"]
    assert not np.array_equal(other.detach().numpy(), model(batch)["y_pred"].detach().numpy())
    assert np.isfinite(train(run).scores).all()
    for change_of, message in (
        ({"pretrain_dim": 4}, "has 3 numbers in a row, but pretrain_dim is 4"),
        (
            {"pretrain_dim": None},
            "an embedding column needs pretrain_dim",
        ),
    ):
        with pytest.raises(UserError, match=message):
            build_csv({**params, "feature_cols": [*params["feature_cols"][:-1], {**image, **change_of}]}, GROUPS)


@pytest.mark.parametrize("as_lists", [False, True], ids=["text", "parquet"])
@pytest.mark.parametrize(
    ("items", "kinds", "wanted"),
    [
        ("1^2^3", "^y^z", [("1", ""), ("2", "y"), ("3", "z")]),
        ("1^2^3", "x^y^", [("1", "x"), ("2", "y"), ("3", "")]),
        ("1^^3", "x^y^z", [("1", "x"), ("", "y"), ("3", "z")]),
        ("^2^3", "x^y^z", [("", "x"), ("2", "y"), ("3", "z")]),
        ("1^2^", "x^y^", [("1", "x"), ("2", "y"), ("", "")]),
        ("1", "", [("1", "")]),
        ("", "", []),
    ],
)
def test_an_item_without_a_value_stays_where_it_is_and_is_counted(
    items: str, kinds: str, wanted: list[tuple[str, str]], as_lists: bool, params: dict[str, Any], tmp_path: Path
) -> None:
    """Where every list of a column has one length, too: FuxiCTR would have padded it."""
    for split in ("train", "valid", "test"):
        frame = pl.DataFrame({"label": [0, 1], "user_id": ["u", "v"], "item_id": ["1", "2"], "cate_id": ["x", "y"]})
        frame = frame.with_columns(item_history=pl.lit(items), cate_history=pl.lit(kinds), price=pl.lit(1.0))
        if as_lists:
            texts = pl.col("item_history", "cate_history")
            lists = texts.str.split("^").list.eval(pl.element().replace("", None))
            frame = frame.with_columns(pl.when(texts == "").then(pl.lit([])).otherwise(lists).name.keep())
        file = tmp_path / f"{split}.{'parquet' if as_lists else 'csv'}"
        frame.write_parquet(file) if as_lists else frame.write_csv(file)
        params[f"{split}_data"] = str(file)
    for column in params["feature_cols"]:
        column |= {"max_len": 3} if column.get("type") == "sequence" else {}
    params["data_format"] = "parquet" if as_lists else "csv"
    dataset = build_csv(params, GROUPS)
    vocabulary = json.loads((dataset.path / "feature_vocab.json").read_text())
    (batch,) = BatchLoader(dataset.feature_map(4), dataset.split("train"))
    assert batch.lengths["item_history"].tolist() == batch.lengths["cate_history"].tolist() == [len(wanted)] * 2
    known = [vocabulary[name] | {"": 0} for name in ("item_id", "cate_id")]
    ids = [[of[one] for one in column] for of, column in zip(known, zip(*wanted, strict=True), strict=bool(wanted))]
    for name, column in zip(("item_history", "cate_history"), ids or [[], []], strict=True):
        assert batch.histories[name].tolist() == column * 2
    counts = json.loads((dataset.path / "report.json").read_text())["splits"]["train"]
    assert counts["item_history_missing"] == 2 * sum(not item for item, _ in wanted)
    assert counts["cate_history_missing"] == 2 * sum(not kind for _, kind in wanted)


def test_columns_of_one_history_have_one_length(params: dict[str, Any]) -> None:
    file = Path(params["train_data"])
    file.write_text(TRAIN + "0,u3,8,,9^5,c^a^b,0.5\n")
    with pytest.raises(
        UserError, match=r"train\.csv: row 5: of one history 'item_history' has 2 items, 'cate_history' 3"
    ):
        build_csv(params, GROUPS)
