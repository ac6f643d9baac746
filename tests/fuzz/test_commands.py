"""A canary's text at every key, through every command that reads a file or a value: nothing is run, nothing is written
outside the folders that are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctr_pe import load
from ctr_pe.commands import run_expid
from ctr_pe.model_zoo import MODELS
from ctr_pe.model_zoo.din import DIN
from ctr_pe.models.sections import model_section
from ctr_pe.utils.errors import UserError
from tests.support.fuzz import folders
from tests.support.fuzz.attempts import answer, files, prepared
from tests.support.fuzz.configs import DATASET, MODEL, RECIPE
from tests.support.fuzz.hostile import CANARY, FEATURE_MAP, TEXTS, places, with_texts

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {**MODEL, "epochs": 1, "batch_size": 20}
OUTSIDE = ["../../outside", "/tmp/outside"]
FEW = ("loss", "dnn_activations", "net_regularizer", "model_id")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a data set, three levels below what must stay as it is."""
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    prepared(folder)
    return folder


def outside(here: Path) -> set[str]:
    return {file for file in files(here.parents[1]) if not file.startswith(f"{here}/")}


def unharmed(here: Path, before: set[str], case: Any) -> None:
    assert not (here / "CANARY").exists(), case
    assert not Path("/tmp/outside").exists(), case
    assert outside(here) == before, case


def ran(command: list[str]) -> None:
    """A command that may be refused or not, but whose errors are lines."""
    code, shown = (answer if command[0] != "run_expid" else _run_expid)(command)
    assert code in (0, 1, 2), (command, shown)
    assert "Traceback" not in shown, (command, shown)


def _run_expid(command: list[str]) -> tuple[int, str]:
    return run_expid.main(command[1:]), ""


@pytest.mark.parametrize("model", MODELS)
def test_through_set_of_a_benchmark(model: str, here: Path) -> None:
    """A dry run builds the model and makes three steps with it, in this process."""
    before = outside(here)
    options = model_section(DIN).model_fields
    for index, key in enumerate(sorted(options if model == "DIN" else FEW)):
        for number, text in enumerate([*TEXTS[:3], *OUTSIDE]):
            value = (text, [text], {text: 1})[(index + number) % 3]  # next to other keys the others
            given = f"{key}={yaml.safe_dump(value, default_flow_style=True, width=10**6).splitlines()[0]}"
            asked = ["--model", model, "--pe", "cape", "--dataset", "mine", "--repeats", "1", "--out", "out"]
            ran(["benchmark", *asked, "--dry-run", "--set", given])
            unharmed(here, before, given)


def test_through_set_and_space_of_tune(here: Path) -> None:
    before = outside(here)
    asked = ["--dataset", "mine", "--trials", "1", "--out", "out", "--set", "epochs=1", "--set", "embedding_dim=4"]
    for key in sorted(model_section(DIN).model_fields):
        for option, value in (("--set", CANARY), ("--space", [CANARY]), ("--space", {"low": CANARY, "high": CANARY})):
            given = f"{key}={yaml.safe_dump(value, default_flow_style=True, width=10**6).splitlines()[0]}"
            ran(["tune", *asked, option, given])
            unharmed(here, before, given)
            shutil.rmtree(here / "out", ignore_errors=True)


def test_through_the_configs_of_run_expid(here: Path) -> None:
    """Of CSV files, so that a data set is built, too."""
    rows = ["user_id,item_id,clicks,label", *(f"u{n % 7},i{n % 5},i1^i{n % 3},{n % 2}" for n in range(40))]
    for split in ("train", "valid", "test"):
        (here / f"{split}.csv").write_text("\n".join(rows) + "\n")
    model = {**SMALL, "loss": "bce", "optimizer": "adam", "metrics": ["AUC"], "net_regularizer": "l2(1)"}
    right = {"model_config": {"X": {**model, "model_root": "kept"}}, "dataset_config": {"mine": DATASET}}
    shutil.rmtree(here / "data")
    before, accepted = outside(here), 0

    def attempt(content: dict[str, Any]) -> int:
        for name, sections in content.items():
            (here / "config" / f"{name}.yaml").write_text(yaml.safe_dump(sections))
        try:
            return run_expid.main(["--config", "config", "--expid", "X"])
        finally:
            for folder in ("data", "kept"):
                shutil.rmtree(here / folder, ignore_errors=True)

    assert attempt(right) == 0
    for changed in with_texts(right):
        accepted += attempt(changed) == 0
        unharmed(here, before, changed)
    assert accepted < len(list(places(right))) * len(TEXTS) / 2


def test_through_a_feature_map_of_run_expid(here: Path) -> None:
    theirs = here / "data" / "theirs"
    theirs.mkdir()
    for split in ("train", "valid", "test"):
        shutil.copy(here / "data" / "mine" / f"{split}.parquet", theirs)
    given = {f"{split}_data": f"data/theirs/{split}.parquet" for split in ("train", "valid", "test")}
    fields = {"target_field": "item_id", "sequence_field": "clicks", "dataset_id": "theirs", "data_format": "parquet"}
    config = {"X": {**SMALL, **fields, **given, "model_root": "kept"}}
    (here / "config" / "model_config.yaml").write_text(yaml.safe_dump(config))
    before = outside(here)
    for changed in with_texts(FEATURE_MAP):
        (theirs / "feature_map.json").write_text(json.dumps(changed))
        try:
            assert run_expid.main(["--config", "config", "--expid", "X"]) == 2, changed
        except UserError as error:
            pytest.fail(f"{changed}: {error}")
        unharmed(here, before, changed)


def test_through_recipes_and_options_of_data_build(here: Path) -> None:
    rows = ["user_id,item_id,timestamp,label,day"]
    rows += [f"u{n % 9},i{n % 7},{1_600_000_000 + 3600 * n},{n % 2},{n // 30}" for n in range(90)]
    (here / "log.csv").write_text("\n".join(rows) + "\n")
    right = {**RECIPE, "item": "item_id", "time": "timestamp", "label": "label", "time_unit": "s", "order": "timestamp"}
    before = outside(here)
    for changed in with_texts({**right, "attributes": ["x"], "drop": {"day": [5]}}):
        (here / "recipe.yaml").write_text(yaml.safe_dump(changed))
        ran(["data", "build", "--recipe", "recipe.yaml", "--out", "built"])
        unharmed(here, before, changed)
    for option in ("recipe", "interactions", "items", "user", "item", "time", "order", "label", "attributes", "out"):
        for text in [*TEXTS, *OUTSIDE]:
            if (option, text) not in [("out", path) for path in OUTSIDE]:  # which asks for it
                base = ["--interactions", "log.csv", "--protocol", "impressions", "--out", "built"]
                ran(["data", "build", *base, f"--{option}", text])
                unharmed(here, before, (option, text))


def test_through_a_model_folder_of_predict_and_serve(here: Path, tmp_path: Path) -> None:
    """``ctr_pe.load`` has each of them, in test_folders.py."""
    sound = folders.made(tmp_path / "sound")
    folders.REQUESTS.write_parquet(here / "asked.parquet")
    before = outside(here)
    hostile = [case for case in folders.changed_folders(sound) if "CANARY" in str(getattr(case.change, "args", ""))]
    for case in hostile[::3]:
        folder = folders.placed(case, sound, here / "model")
        ran(["predict", "--model", str(folder), "--input", "asked.parquet", "--output", "scored.parquet"])
        unharmed(here, before, case)
        (here / "scored.parquet").unlink(missing_ok=True)
        shutil.rmtree(folder)
    for case in hostile[::9]:
        folder = folders.placed(case, sound, here / "model")
        try:
            load(folder)  # serve would wait for requests
        except UserError:
            assert answer(["serve", "--model", str(folder), "--port", "0"])[0] == 2, case
        unharmed(here, before, case)
        shutil.rmtree(folder)
