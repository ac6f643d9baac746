"""Encodings and models of other packages: found by name and dotted name, imported only where that is allowed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctr_pe import available_pes, build_pe
from ctr_pe.cli import main
from ctr_pe.commands import run_expid
from ctr_pe.config.yaml import model_params
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.models.sections import model_class
from ctr_pe.utils import plugins
from ctr_pe.utils.errors import UserError

RECENCY = """
from pathlib import Path

import torch
from torch import nn

from ctr_pe import PositionEncoding

(Path(__file__).parent / "imported").touch()


class Recency(PositionEncoding):
    def __init__(self, dim, max_len, num_heads=1, *, recency_start: float = 0.5):
        super().__init__(dim, max_len, num_heads)
        self.table = nn.Parameter(torch.full((max_len + 1,), recency_start))

    def bias(self, logits, vectors, pairs):
        return logits + self.table[pairs.offset.clamp(0, self.max_len)]


class NoEncoding:
    pass
"""
MODELS = '''
from fuxictr.pytorch.layers import FeatureEmbedding, MLP_Block
from fuxictr.pytorch.models import BaseModel

from ctr_pe.model_zoo import DIN


class MyDIN(DIN):
    def __init__(self, feature_map, model_id="MyDIN", my_factor: float = 1.0, **kwargs):
        super().__init__(feature_map, model_id, **kwargs)
        self.my_factor = my_factor

    def interest(self, index, target, history, positions):
        interest, losses = super().interest(index, target, history, positions)
        return self.my_factor * interest, losses


class Plain(BaseModel):
    """A model of FuxiCTR's form, which knows nothing of this package."""

    def __init__(self, feature_map, model_id="Plain", learning_rate=1e-3, embedding_dim=4, **kwargs):
        super().__init__(feature_map, model_id=model_id, **kwargs)
        self.embedding_layer = FeatureEmbedding(feature_map, embedding_dim)
        self.mlp = MLP_Block(feature_map.sum_emb_out_dim(), [8], output_dim=1, output_activation="sigmoid")
        self.compile(kwargs["optimizer"], kwargs["loss"], learning_rate)
        self.reset_parameters()
        self.model_to_device()

    def forward(self, inputs):
        return {"y_pred": self.mlp(self.embedding_layer(self.get_inputs(inputs)).flatten(1))}
'''
SMALL = ["--set", "epochs=1", "--set", "embedding_dim=4", "--set", "dnn_hidden_units=[8]"]
ONCE = ["--repeats", "1", "--jobs", "1"]
DOTTED = "my_pkg.recency:Recency"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generate(folder / "synthetic", users=60, valid_users=30, test_users=30, items=100, categories=10)
    return folder


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, my_pkg_forgotten: None) -> Iterator[Path]:
    """The folder of ``my_pkg``, which lies in the working directory and is not installed."""
    folder = tmp_path / "my_pkg"
    folder.mkdir()
    for name, text in {"__init__": "", "recency": RECENCY, "models": MODELS}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    plugins.registered.cache_clear()
    yield folder
    plugins.registered.cache_clear()


@pytest.fixture
def installed(package: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, installed with entry points."""
    install(package.parent, "my-pkg", {"recency": DOTTED}, {"MyDIN": "my_pkg.models:MyDIN"})
    monkeypatch.syspath_prepend(str(package.parent))
    return package


def install(folder: Path, name: str, encodings: dict[str, str], models: dict[str, str] | None = None) -> None:
    info = folder / f"{name.replace('-', '_')}-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.3\n")
    groups = {"ctr_pe.encodings": encodings, "ctr_pe.models": models or {}}
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in of.items()) for group, of in groups.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    plugins.registered.cache_clear()


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_a_registered_encoding_is_one_of_all(installed: Path) -> None:
    assert available_pes()[-1] == "recency"
    pe = build_pe("rope+recency", 8, 10, recency_start=2.0)
    assert pe.encodings[1].table.tolist() == [2.0] * 11
    with pytest.raises(UserError, match="did you mean 'recency'"):
        build_pe("recencie", 8, 10)
    with pytest.raises(UserError, match="did you mean 'recency_start'"):
        build_pe("recency", 8, 10, recency_stat=1)
    with pytest.raises(UserError, match="did you mean 'MyDIN'"):
        model_class("MyDINN")


def test_list_says_where_they_come_from_and_imports_nothing(
    installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(installed.parent, "other", {"cape": "other:Cape"})
    assert main(["list"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "recency my_pkg.recency:Recency (my-pkg 0.3)" in lines
    assert "MyDIN my_pkg.models:MyDIN (my-pkg 0.3)" in lines
    assert "cape other:Cape (other 0.3) — not used: the name is built in" in lines
    assert not (installed / "imported").exists()


def test_a_name_that_two_packages_register_is_nobodys(installed: Path) -> None:
    install(installed.parent, "other", {"recency": "other.module:Recency"})
    with pytest.raises(UserError) as error:
        build_pe("recency", 8, 10)
    assert "registered twice: my_pkg.recency:Recency (my-pkg 0.3), other.module:Recency (other 0.3)" in str(error.value)
    assert "cape" in available_pes()
    build_pe("cape", 8, 10)  # others are as before


def test_a_broken_package_hurts_only_who_uses_it(
    installed: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (installed / "recency.py").write_text("import no_such_module")
    build_pe("cape", 8, 10)
    build_pe("rope", 8, 10)
    assert len(caplog.records) == 1
    with pytest.raises(UserError, match=r"'recency': my_pkg.recency cannot be imported \(ModuleNotFoundError: No mod"):
        build_pe("recency", 8, 10)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_pkg.recency:Recencie", "my_pkg.recency has no Recencie: did you mean 'Recency'?"),
        ("my_pkg.recency:NoEncoding", "my_pkg.recency:NoEncoding is no subclass of PositionEncoding"),
        ("my_pkg.recence:Recency", "my_pkg.recence cannot be imported"),
    ],
)
def test_dotted_names_that_lead_nowhere(package: Path, name: str, message: str) -> None:
    plugins.allow("my_pkg")
    with pytest.raises(UserError) as error:
        build_pe(name, 8, 10)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", ["my_pkg.recency", "my_pkg", DOTTED])
def test_what_is_allowed(package: Path, given: str) -> None:
    plugins.allow(given)
    build_pe(f"rope+{DOTTED}", 8, 10)
    with pytest.raises(UserError, match="--plugins my_pkg_2"):
        build_pe("my_pkg_2.recency:Recency", 8, 10)


def test_a_config_imports_nothing_by_itself(
    package: Path, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Suites, model configs, parameters of the command line's own kind: one line that names the option."""
    grid = {"models": ["DIN"], "encodings": ["none", DOTTED], "datasets": ["synthetic"]}
    Path("suite.yaml").write_text(yaml.safe_dump({"title": "mine", "seeds": 1, "grids": [grid]}))
    section = {**model_params("DIN", "synthetic"), "position_encoding": DOTTED, "data_root": str(root), "epochs": 1}
    sections = {
        "encoded": section,
        "modelled": {**section, "model": "my_pkg.models:MyDIN", "position_encoding": "none"},
    }
    Path("model.yaml").write_text(yaml.safe_dump(sections))
    asked: list[list[str]] = [
        ["benchmark", "--suite", "suite.yaml", "--data-root", str(root), "--out", "out"],
        ["validate", "suite.yaml", "--data-root", str(root)],
        ["validate", "model.yaml", "--data-root", str(root)],
    ]
    for argv in asked:
        assert main(argv) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines
        assert all(
            "is code of a package that the command line does not name: --plugins my_pkg" in line for line in lines
        )
    for expid in sections:
        assert run_expid.main(["--config", "model.yaml", "--expid", expid]) == 2
        assert "--plugins my_pkg" in capsys.readouterr().err
    assert not (package / "imported").exists()
    assert "my_pkg" not in sys.modules

    for argv in asked[1:]:
        assert main([*argv, "--plugins", "other,my_pkg"]) == 0
    assert run_expid.main(["--config", "model.yaml", "--expid", "encoded", "--plugins", "my_pkg"]) == 0
    assert (package / "imported").exists()


def test_plugins_of_the_command_line_are_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["list", "--plugins", "my-pkg"])
    assert "'my-pkg' is not the name of a package" in capsys.readouterr().err


@pytest.mark.slow
def test_benchmark_takes_dotted_names(package: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In worker processes, from the working directory, with options and the configuration of the base class."""
    models = "my_pkg.models:MyDIN"
    argv = [
        "benchmark",
        "--model",
        models,
        "--pe",
        f"none,{DOTTED}",
        "--dataset",
        "synthetic",
        "--data-root",
        str(root),
        "--out",
        "out",
        *SMALL,
        *ONCE,
    ]
    assert main([*argv, "--set", "recency_start=0.1", "--set", "my_factor=0.5"]) == 0, capsys.readouterr().err
    none, recency = results(Path("out"))
    assert (none["model"], none["pe"], recency["pe"]) == (models, "none", DOTTED)
    assert none["origins"] == {models: models}
    assert recency["origins"] == {models: models, DOTTED: DOTTED}
    assert none["metrics"] != recency["metrics"]
    assert none["config_hash"] == recency["config_hash"]
    assert none["params"]["attention_hidden_units"] == model_params("DIN", "synthetic")["attention_hidden_units"]
    assert main(["benchmark", "--pe", f"none,{DOTTED}", "--set", "recency_stat=1"]) == 2
    assert "did you mean 'recency_start'?" in capsys.readouterr().err


@pytest.mark.slow
def test_rows_name_class_and_package_and_are_not_mixed(
    installed: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["benchmark", "--pe", "none,recency", "--dataset", "synthetic", "--data-root", str(root), "--out", "out"]
    argv += [*SMALL, *ONCE]
    assert main(argv) == 0, capsys.readouterr().err
    assert [row["origins"] for row in results(Path("out"))] == [{}, {"recency": "my_pkg.recency:Recency (my-pkg 0.3)"}]
    entry = installed.parent / "my_pkg-0.3.dist-info" / "entry_points.txt"
    entry.write_text(entry.read_text().replace("recency:Recency", "recency:NoEncoding"))
    plugins.registered.cache_clear()
    assert main(argv) == 2
    assert "its runs of 'recency' are of my_pkg.recency:Recency (my-pkg 0.3), now" in capsys.readouterr().err


def test_models_of_fuxictrs_form_are_trained_too(
    package: Path, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take no encoding; and nothing of theirs is run as code."""
    section = {**model_params("DIN", "synthetic"), "model": "my_pkg.models:Plain", "data_root": str(root), "epochs": 1}
    keys = ("data_root", "dataset_id", "model", "metrics", "monitor", "optimizer", "loss", "epochs", "verbose", "task")
    given = {key: section[key] for key in keys} | {"embedding_dim": 4}
    specs = [{"name": ["item_history", "cate_history"], "feature_encoder": "layers.MaskedAveragePooling()"}]
    Path("model.yaml").write_text(yaml.safe_dump({"plain": {**given, "feature_specs": specs}}))
    call = ["--config", "model.yaml", "--expid", "plain", "--plugins", "my_pkg"]
    assert run_expid.main(call) == 0, capsys.readouterr().err
    assert "[val] gAUC" in Path("model.csv").read_text()
    for wrong in ("position_encoding=cape", "loss=__import__('os')", "embedding_initializer=print(1)"):
        assert run_expid.main([*call, "--set", wrong]) == 2
    specs[0]["feature_encoder"] = "__import__('pathlib').Path('ran').touch()"
    Path("model.yaml").write_text(yaml.safe_dump({"plain": {**given, "feature_specs": specs}}))
    assert run_expid.main(call) == 2
    assert not Path("ran").exists()


@pytest.mark.parametrize("pe", [DOTTED, f"rope+{DOTTED}"])
@pytest.mark.slow
def test_draw_and_tune_take_dotted_names(
    package: Path, root: Path, pe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--dataset", "synthetic", "--data-root", str(root)]
    assert main(["draw", f"none,{pe}", "--out", "bias.png", *where, "--set", "embedding_dim=4"]) == 0
    argv = ["tune", "--pe", pe, *where, "--trials", "1", "--out", "tuned", *SMALL]
    assert main([*argv, "--space", "recency_start=[0.1, 0.2]"]) == 0, capsys.readouterr().err
