"""One training run: repeatable, paired across encodings, and honest about what it selects on."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from ctr_pe.data.dataset import Dataset
from ctr_pe.data.loader import BatchLoader
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.evaluation import evaluate
from ctr_pe.models.sections import check_params
from ctr_pe.pe import available_pes
from ctr_pe.sequence.batch import JaggedBatch
from ctr_pe.training import Outcome, Run, build_model, load, train
from ctr_pe.utils.devices import name_of
from ctr_pe.utils.errors import UserError

PARAMS: dict[str, Any] = {
    "embedding_dim": 4,
    "attention_hidden_units": [8],
    "attention_dropout": 0.2,
    "dnn_hidden_units": [8],
    "net_dropout": 0.2,
    "batch_norm": True,
    "batch_size": 100,
    "epochs": 2,
    "learning_rate": 0.01,
    "monitor": "AUC",
    "din_use_softmax": True,
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return generate(tmp_path_factory.mktemp("data") / "small", users=60, valid_users=30, test_users=40)


@pytest.fixture
def run(dataset: Dataset) -> Run:
    return Run("DIN", dataset.path, "cape", seed=3, params=PARAMS)


def test_equal_runs_give_equal_results_and_other_seeds_others(run: Run) -> None:
    first, again, other = train(run), train(run), train(replace(run, seed=4))
    assert first.metrics == again.metrics
    assert first.epoch == again.epoch
    assert np.array_equal(first.scores, again.scores)
    assert not np.array_equal(first.scores, other.scores)


def test_runs_that_differ_share_no_checkpoint(run: Run, dataset: Dataset, tmp_path: Path) -> None:
    """Below one ``model_root``, in processes side by side."""
    copy = Path(shutil.copytree(dataset.path, tmp_path / "copy" / dataset.path.name))
    other = replace(run, params={**PARAMS, "learning_rate": 0.02})
    runs = [run, replace(run, seed=4), replace(run, pe="none"), other, replace(run, dataset=copy)]
    files = [build_model(one, dataset, tmp_path).checkpoint for one in runs]
    assert len(set(files)) == len(runs)
    assert build_model(run, dataset, tmp_path).checkpoint == files[0]


def test_an_outcome_names_the_processor(run: Run) -> None:
    assert train(run).processor == name_of(torch.device("cpu")) != ""


def test_metrics_are_those_of_the_stored_scores_in_file_order(run: Run, dataset: Dataset) -> None:
    outcome = train(run)
    rows = pl.read_parquet(dataset.split("test"))
    assert outcome.scores.dtype == np.float32
    found = evaluate(rows["label"].to_numpy(), outcome.scores.astype(np.float64), rows["user_id"].to_numpy())
    assert found == pytest.approx(outcome.metrics, abs=1e-5)
    assert outcome.parameters == sum(p.numel() for p in build_model(run, dataset, "unused").parameters())


def test_kept_weights_are_those_of_the_metrics(run: Run, dataset: Dataset, tmp_path: Path) -> None:
    file = tmp_path / "weights" / "run.safetensors"
    outcome = train(replace(run, weights=file))
    assert outcome.metrics == train(run).metrics
    assert [path.name for path in file.parent.iterdir()] == ["run.safetensors"]
    model = build_model(run, dataset, "unused")
    load(model, file)
    rows = BatchLoader(model.feature_map, dataset.split("test"), split="test", batch_size=PARAMS["batch_size"])
    assert np.array_equal(model.predict(rows).astype(np.float32), outcome.scores)


def test_weights_that_cannot_be_written_are_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/run\.safetensors: "):
        train(replace(run, weights=tmp_path / "file" / "run.safetensors"))


def recorded(patch: pytest.MonkeyPatch) -> list[str]:
    """Digests of all training batches that a run sees, in order."""
    seen: list[str] = []

    class Recording(BatchLoader):
        def __iter__(self) -> Iterator[JaggedBatch]:
            for batch in super().__iter__():
                if self.shuffle:
                    joined = b"".join(batch[name].numpy().tobytes() for name in sorted(batch))
                    seen.append(hashlib.blake2b(joined).hexdigest())
                yield batch

    patch.setattr("ctr_pe.training.source.BatchLoader", Recording)
    return seen


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return recorded(monkeypatch)


@pytest.fixture(scope="module")
def by_encoding(dataset: Dataset) -> dict[str, tuple[list[str], float]]:
    """Of a run with each encoding: digests of its training batches, and what the random stream gives at its end."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        seen = recorded(patch)
        for name in available_pes():
            train(Run("DIN", dataset.path, name, seed=3, params=PARAMS))
            found[name] = (list(seen), torch.rand(1).item())
            seen.clear()
    return found


@pytest.mark.slow
def test_at_one_seed_all_encodings_see_the_same_batches_bit_for_bit(
    by_encoding: dict[str, tuple[list[str], float]], run: Run, batches: list[str]
) -> None:
    first, *others = [sequence for sequence, _ in by_encoding.values()]
    assert len(set(first)) == len(first) > 4  # epochs are shuffled anew
    assert all(sequence == first for sequence in others)
    train(replace(run, seed=4))
    assert batches[0] != first[0]


@pytest.mark.slow
def test_at_one_seed_all_encodings_draw_the_same_dropout(by_encoding: dict[str, tuple[list[str], float]]) -> None:
    """The stream that dropout draws from ends where it ends for none."""
    assert len({end for _, end in by_encoding.values()}) == 1


def test_backbones_start_from_the_same_weights_bit_for_bit(run: Run, dataset: Dataset) -> None:
    states = []
    for name in available_pes():
        state = build_model(replace(run, pe=name), dataset, "unused").state_dict()
        states.append({key: value for key, value in state.items() if ".pe." not in key})
    assert all(torch.equal(state[key], states[0][key]) for state in states[1:] for key in states[0])


@pytest.mark.parametrize(("protocol", "trained_on", "selected_on"), [("heldout", 60, 30), ("paper", 90, 40)])
def test_protocols(
    protocol: str, trained_on: int, selected_on: int, run: Run, batches: list[str], dataset: Dataset
) -> None:
    states: list[Mapping[str, Any]] = []
    outcome = train(replace(run, protocol=protocol), states.append)
    users = {name: pl.read_parquet(dataset.split(name))["user_id"].n_unique() for name in ("train", "valid", "test")}
    assert users == {"train": 60, "valid": 30, "test": 40}
    last = [state["batches"] for state in states if "batch" in state][-1]
    requests = dataset.rows["train"] // 60
    assert last == -(-trained_on * requests // 100)
    validated = [state["valid"]["AUC"] for state in states if "valid" in state]
    assert len(validated) == 2
    if protocol == "paper":  # what selects is the test set itself
        assert outcome.metrics["AUC"] == pytest.approx(max(validated), abs=1e-9)
    assert outcome.epoch == 1 + validated.index(max(validated))
    assert selected_on == users["valid" if protocol == "heldout" else "test"]


@pytest.mark.parametrize(("protocol", "split"), [("heldout", "valid"), ("paper", "test")])
def test_the_epoch_is_selected_on_the_split_of_the_protocol(
    protocol: str, split: str, run: Run, dataset: Dataset, tmp_path: Path
) -> None:
    """The metrics that select it are those of its weights on the rows of that split."""
    file = tmp_path / "best.safetensors"
    outcome = train(replace(run, protocol=protocol, weights=file))
    model = build_model(run, dataset, "unused")
    load(model, file)
    rows = pl.read_parquet(dataset.split(split))
    scores = model.predict(BatchLoader(model.feature_map, dataset.split(split), split=split, batch_size=100))
    expected = evaluate(rows["label"].to_numpy(), scores, rows["user_id"].to_numpy())
    assert outcome.valid == pytest.approx(expected, abs=1e-6)
    assert outcome.valid["AUC"] == max(epoch.metrics["AUC"] for epoch in outcome.history)


def test_paper_protocol_trains_on_train_and_valid_rows(
    run: Run, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    users: list[int] = []

    class Recording(BatchLoader):
        def __iter__(self) -> Iterator[JaggedBatch]:
            for batch in super().__iter__():
                if self.shuffle:
                    users.extend(batch["user_id"].tolist())
                yield batch

    monkeypatch.setattr("ctr_pe.training.source.BatchLoader", Recording)
    train(replace(run, protocol="paper", params=PARAMS | {"epochs": 1}))
    wanted = pl.concat([pl.read_parquet(dataset.split(name))["user_id"] for name in ("train", "valid")])
    assert sorted(users) == sorted(wanted.to_list())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "DINN"}, "model 'DINN' is unknown: did you mean 'DIN'"),
        ({"pe": "cappe"}, "did you mean 'cape'"),
        ({"protocol": "papers"}, "did you mean 'paper'"),
        ({"params": PARAMS | {"net_droput": 0}}, "did you mean 'net_dropout'"),
        ({"dataset": Path("nowhere")}, "nowhere"),
    ],
)
def test_mistakes(change: dict[str, Any], message: str, run: Run) -> None:
    with pytest.raises(UserError, match=message):
        train(replace(run, **change))


def test_check_params() -> None:
    check_params("DIN", PARAMS | {"position_dim": 8})
    with pytest.raises(UserError, match="did you mean 'position_dim'"):
        check_params("DIN", {"position_dims": 8})


@pytest.mark.slow
def test_cape_beats_none_on_the_built_in_set(tmp_path: Path) -> None:
    """The effect planted there depends on how many unlike items lie between; none cannot see it."""
    from ctr_pe.config.yaml import model_params, training_recipe

    built_in = generate(tmp_path / "synthetic")
    short = {**training_recipe("fuxictr"), "learning_rate": 1e-3, "epochs": 5}
    params = model_params("DIN", "synthetic", short)
    outcomes: dict[str, Outcome] = {
        name: train(Run("DIN", built_in.path, name, seed=0, params=params)) for name in ("none", "naive", "cape")
    }
    gauc = {name: outcome.metrics["gAUC"] for name, outcome in outcomes.items()}
    assert gauc["cape"] > gauc["naive"] > gauc["none"] + 0.03
    assert gauc["cape"] > gauc["none"] + 0.06
