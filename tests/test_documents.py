"""Every block of code in README, CONTRIBUTING and docs/ is run, or checked as far as it can be; none is passed over.

- ``python``: the blocks of a page are run as one script, in a folder of its own. That of README.md runs in
  ``test_readme.py``, and the one that serves a file without torch in ``tests/serving/test_export.py``.
  FuxiCTR's ``grid_search`` (docs/fuxictr.md) is not started: it would train 24 models.
- ``yaml``: checked as ``ctr-pe validate`` does.
- ``bash``, line by line. Run: ``ctr-pe data build`` on a small log, ``data generate`` of a small share,
  ``recommend``, ``ctr-pe validate``, ``ctr-pe draw`` of new models, ``ctr-pe benchmark`` on small data as a dry run,
  which builds each model and trains a few steps, and ``run_expid.py`` up to its training, and ``ctr-pe predict``,
  ``monitor``, ``pack`` and ``unpack`` of a small model. Only read by their parser: ``ctr-pe tune``, ``report``,
  ``draw --run``, ``data fetch`` (network), ``serve`` and ``export`` (tests/serving runs them), and recipes of the
  real logs. Of ``run_expid.py --plugins`` only the options are compared. What ``curl`` sends is read as the service
  does. Compared with the files they name: ``pip`` (extras, constraints), ``make`` (targets), ``python`` and ``bash``
  with a script of the repository, ``docker`` and ``kubectl``.
  ``.ci/run`` runs the README's installation and tests as they stand.
- ``text`` is output, ``toml`` is parsed.

Links, paths and dotted names in the text lead to a file or a name that is there.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import textwrap
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pytest

from ctr_pe import cli
from ctr_pe.config.validation import check
from ctr_pe.data.synthetic.built_in import BUILT_IN, DEFAULT
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.study.rendering import GAUC
from tests.support.next_item import dataset, events, random_histories

CHECKOUT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "data/README.md", "benchmark/results/README.md"]
PAGES += sorted(str(page.relative_to(CHECKOUT)) for page in (CHECKOUT / "docs").glob("*.md"))
LANGUAGES = {"python", "yaml", "bash", "text", "toml"}
SMALL = {"users": 20, "valid_users": 10, "test_users": 10, "items": 50, "categories": 5}


class Block(NamedTuple):
    page: str
    language: str
    code: str


def blocks_of(page: str) -> list[Block]:
    text = (CHECKOUT / page).read_text(encoding="utf-8")
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE)
    assert 2 * len(found) == len(re.findall(r"^ *```", text, re.MULTILINE)), f"{page}: a block without an end"
    return [Block(page, language, textwrap.dedent(code)) for _, language, code in found]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


LARGE = "--suite small_ablation_fusion"
"""A suite of many cells, whose dry run is slow."""

FIRST = ("README.md", "docs/index.md", "docs/first_run.md", "docs/next_item.md", "docs/pipeline.md")


def lines_of(language: str) -> list[Any]:
    """The commands of all pages; slow are large ones, and those of pages that a newcomer does not read first."""
    slow = [pytest.mark.slow]
    return [
        pytest.param(
            block.page,
            line.strip(),
            id=f"{block.page}: {line.strip()[:50]}",
            marks=slow * (LARGE in line or block.page not in FIRST),
        )
        for block in BLOCKS
        if block.language == language
        for line in block.code.splitlines()
        if line.strip()
    ]


def config_of_readme() -> str:
    (config,) = (block.code for block in blocks_of("README.md") if block.language == "yaml")
    return config


def test_every_block_says_what_it_is() -> None:
    assert {"README.md", "docs/from_log_to_ranking.md", "docs/own_encoding.md", "docs/results.md"} <= set(PAGES)
    strange = [(block.page, block.language, block.code[:60]) for block in BLOCKS if block.language not in LANGUAGES]
    assert not strange


def is_there(name: str) -> bool:
    """Whether a dotted name is that of a module, or of something that a module defines or imports."""
    parts = name.removeprefix("ctr_pe.").split(".") if name.startswith("ctr_pe.model_zoo") else name.split(".")
    for length in range(len(parts), 0, -1):
        place = CHECKOUT.joinpath(*parts[:length])
        source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if place.is_dir() or source.is_file():
            text = source.read_text(encoding="utf-8") if source.is_file() else ""
            return length == len(parts) or re.search(rf"\b{parts[length]}\b", text) is not None
    return False


@pytest.mark.parametrize("page", PAGES)
def test_what_the_text_names_is_there(page: str) -> None:
    text = (CHECKOUT / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", text)
    assert [link for link in links if not (CHECKOUT / page).parent.joinpath(link).exists()] == []
    paths = re.findall(r"`((?:ctr_pe|model_zoo|tests|benchmark|config|docs|\.ci)/[\w./*-]*)`", text)
    assert [path for path in paths if not list(CHECKOUT.glob(path.rstrip("/")))] == []
    names = re.findall(r"(?<![\w/.])((?:ctr_pe|model_zoo|benchmark|tests|docs)(?:\.[A-Za-z]\w*)+)(?![\w/])", text)
    files = (".md", ".py", ".yaml", ".json", ".jsonl", ".csv", ".html", ".png")
    assert [name for name in names if not name.endswith(files) and not is_there(name)] == []


LONG = ("docs/from_log_to_ranking.md", "docs/next_item.md", "docs/pipeline.md")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page in LONG))
        for page in PAGES
        if page != "README.md" and any(block[:2] == (page, "python") for block in BLOCKS)
    ],
)
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("fuxictr.autotuner.grid_search", lambda *given, **named: started.append((given, named)))
    for number, block in enumerate(block for block in blocks_of(page) if block.language == "yaml"):
        (tmp_path / ("tuner.yaml" if "tuner_space" in block.code else f"{number}.yaml")).write_text(block.code)
    (tmp_path / "config").symlink_to(CHECKOUT / "config")
    script = tmp_path / "page.py"
    scripts = [block.code for block in blocks_of(page) if block.language == "python"]
    script.write_text("\n".join(code for code in scripts if "import onnxruntime" not in code))
    if page == "docs/pipeline.md":
        trained(tmp_path)
    if page == "docs/fuxictr.md":
        generate(tmp_path / "data" / "synthetic", **SMALL)
        (tmp_path / "experiment.yaml").write_text(config_of_readme())
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script))
    for (folder,), named in started:
        assert len(list(Path(folder).glob("model_config*"))) == 1
        assert Path(named["script"]).is_file()
    assert bool(started) == (page == "docs/fuxictr.md")


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=lambda block: block.page)
def test_yaml_has_no_mistakes(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "given.yaml"
    file.write_text(block.code.replace("base_config: config", f"base_config: {CHECKOUT / 'config'}"))
    assert check(file, tmp_path)[1] == []


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "toml"], ids=lambda block: block.page)
def test_toml_is_toml(block: Block) -> None:
    assert tomllib.loads(block.code)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "text"], ids=lambda block: block.page)
def test_output_has_the_form_of_today(block: Block) -> None:
    assert GAUC in block.code
    assert "gAUC − none [95 % interval]  detectable  p" in block.code


RECENCY = """
from torch import Tensor
from ctr_pe import PositionEncoding

class Recency(PositionEncoding):
    def __init__(self, dim: int, max_len: int, num_heads: int = 1, *, recency_start: float = 1.0) -> None:
        super().__init__(dim, max_len, num_heads)
        self.start = recency_start

    def bias(self, logits, vectors, pairs):
        return logits - self.start * pairs.offset
"""
SUITE = "title: Mine\nprotocol: heldout\nseeds: 1\ngrids: [{models: [DIN], encodings: [none], datasets: [synthetic]}]\n"


def write_log(folder: Path) -> None:
    """A log as parquet, the same as CSV with labels, and the items' categories."""
    draw = np.random.default_rng(0)
    log = pl.DataFrame({"user_id": draw.integers(0, 30, 600), "item_id": draw.integers(0, 40, 600)})
    log = log.with_columns(timestamp=pl.int_range(pl.len()) + 1_700_000_000)
    log.write_parquet(folder / "log.parquet")
    log.with_columns(click=pl.Series(draw.integers(0, 2, 600))).write_csv(folder / "shown.csv")
    pl.DataFrame({"item_id": range(40), "cate_id": [i % 5 for i in range(40)]}).write_parquet(folder / "items.parquet")


def small_set(folder: Path, name: str) -> None:
    """A data set of this name in ``data/``: a built-in one, or one like the others. It is generated once."""
    module, given = BUILT_IN.get(name, BUILT_IN["synthetic"])
    generated, path = folder.parent / "generated" / name, folder / "data" / name
    if not generated.exists():
        import_module(module).generate(generated, **given, **SMALL)
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(generated)


def trained(folder: Path) -> None:
    """A small model in ``model/``, and later events with an item that is new."""
    from ctr_pe import CTRRanker

    write_log(folder)
    small = {"embedding_dim": 4, "attention_hidden_units": [4], "dnn_hidden_units": [4], "epochs": 1}
    CTRRanker(**small).fit(folder / "log.parquet", items=folder / "items.parquet").save(folder / "model")
    today = pl.DataFrame(
        {"user_id": [1, 2, 3], "item_id": [4, 40, 5], "timestamp": [1_700_001_000 + i for i in range(3)]}
    )
    today.write_parquet(folder / "today.parquet")
    pl.DataFrame({"item_id": [40], "cate_id": [1]}).write_parquet(folder / "new_items.parquet")
    today.write_parquet(folder / "requests.parquet")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, my_pkg_forgotten: None) -> Path:
    """A place with what the commands read: a log, a config, and a package with an encoding and a model."""
    write_log(tmp_path)
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg" / "__init__.py").touch()
    (tmp_path / "my_pkg" / "recency.py").write_text(RECENCY)
    (tmp_path / "my_pkg" / "models.py").write_text("from ctr_pe.model_zoo import DIN\n\nclass MyDIN(DIN):\n    pass\n")
    (tmp_path / "mine.yaml").write_text(SUITE)
    (tmp_path / "experiment.yaml").write_text(config_of_readme())
    (tmp_path / "config").symlink_to(CHECKOUT / "config")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("page", "line"), lines_of("bash"))
def test_commands(page: str, line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in line.split("&&"):
        program, *arguments = shlex.split(command, comments=True)
        assert program in PROGRAMS, f"{page}: no test for commands of '{program}'"
        PROGRAMS[program](arguments, folder, monkeypatch)


def ctr_pe(arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if ">" in arguments:
        arguments = arguments[: arguments.index(">")]
    args = cli._parser().parse_args(arguments)
    if any("s3://" in one for one in arguments):
        return  # tests/data/logs/test_places.py has a server
    name = " ".join(arguments[: 1 + (arguments[0] == "data")])
    if name == "benchmark":
        if args.task == "next-item":
            (folder / "data").mkdir(exist_ok=True)
            dataset(folder / "log", events(random_histories())).path.rename(folder / "data" / args.dataset)
        else:
            small_set(folder, args.dataset or DEFAULT)
        few = ["--set", "batch_size=32"]
        assert cli.main([*arguments, *few, "--jobs", "1", *["--dry-run"] * (not args.dry_run)]) == 0
        assert not (folder / "results").exists()
    elif name == "predict":
        trained(folder)
        assert cli.main(arguments) == 0
        assert "score" in pl.read_parquet(folder / args.output).columns
    elif name in ("pack", "unpack"):
        trained(folder)
        if name == "unpack":
            assert cli.main(["pack", "--model", "model", "--output", str(args.file)]) == 0
        assert cli.main(arguments) == 0
    elif name == "monitor":
        trained(folder)
        assert cli.main(arguments) in (0, 3)
    elif name == "data build" and getattr(args, "append_to", None) is not None:
        before = [shlex.split(line.values[1], comments=True) for line in lines_of("bash") if "--out" in line.values[1]]
        wanted = ["--interactions", str(args.interactions)]
        (first, *_) = [line for line in before if str(args.append_to) == line[-1] and wanted[1] in line]
        assert cli.main(first[1:]) == 0
        assert cli.main(arguments) == 0
    elif (name == "data build" and args.recipe is None) or name in ("validate", "list", "info", "completion"):
        assert cli.main(arguments) == 0
    elif name == "recommend":
        small_set(folder, args.dataset)
        assert cli.main(arguments) == 0
    elif name == "reproduce":
        monkeypatch.setattr("ctr_pe.study.reproduce.SHARES", {})  # nothing is generated and measured
        assert cli.main(arguments) == 0
    elif name == "data generate":
        assert cli.main([*arguments, "--rows-share", "0.001"]) == 0
    elif name == "draw" and args.store is None:
        small_set(folder, args.dataset or DEFAULT)
        assert cli.main([*arguments, "--seed", "0"]) == 0
        assert args.out.stat().st_size > 1000
    elif name == "data build":
        assert (CHECKOUT / "config" / "recipe" / f"{args.recipe}.yaml").is_file()
    else:
        assert name in ("tune", "report", "draw", "data fetch", "serve", "export"), (
            f"nothing is known about `ctr-pe {name}`"
        )


def python(arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if arguments == ["-m", "venv", ".venv"]:
        return
    script = CHECKOUT / f"{arguments[1].replace('.', '/')}.py" if arguments[0] == "-m" else CHECKOUT / arguments[0]
    assert script.is_file()
    if script.name != "run_expid.py":
        source = script.read_text(encoding="utf-8")
        assert all(re.search(rf'"{option}[" ]', source) for option in arguments if option.startswith("--"))
        return
    from ctr_pe.commands import options, run_expid

    if "--plugins" in arguments:
        source = Path(str(run_expid.__file__)).read_text() + Path(str(options.__file__)).read_text()
        assert all(re.search(rf'"{option}[" ]', source) for option in arguments if option.startswith("--"))
        return
    if "results/tune/best.yaml" in arguments:
        small_set(folder, "synthetic")
        (folder / "results" / "tune").mkdir(parents=True)
        best = "best: {model: DIN, dataset_id: synthetic, position_encoding: cape}\n"
        (folder / "results" / "tune" / "best.yaml").write_text(best)
    seen: list[Any] = []
    monkeypatch.setattr(run_expid, "run", lambda params, keep: seen.append(params) or ({}, {}))
    monkeypatch.setattr(run_expid, "append_result", lambda *_: None)
    assert run_expid.main(arguments[1:]) == 0
    assert seen[0]["model"] in ("DIN", "BST", "DIEN", "DMIN", "TIN", "SASRec")


def torchrun(arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert arguments[:2] == ["--nproc-per-node", "4"]
    script = arguments[2:]
    script[script.index("--gpu") + 1] = "-1"
    python(script, folder, monkeypatch)


def pip(arguments: list[str], *_: Any) -> None:
    assert arguments[0] == "install"
    if "-c" in arguments:
        assert (CHECKOUT / arguments[arguments.index("-c") + 1]).is_file()
    what = arguments[-1]
    assert re.fullmatch(r"(\.|ctr_pe)(\[\w+\])?", what)
    for extra in re.findall(r"\[(\w+)\]", what):
        assert f'"{extra}": [' in (CHECKOUT / "setup.py").read_text(encoding="utf-8")


def make(targets: list[str], *_: Any) -> None:
    known = re.findall(r"^([\w-]+):", (CHECKOUT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(targets) <= set(known)


def a_file(arguments: list[str], *_: Any) -> None:
    assert arguments == [".venv/bin/activate"] or (CHECKOUT / arguments[0]).is_file()


def our_tests(arguments: list[str], *_: Any) -> None:
    assert arguments in (["-q", "-n", "2"], ["tests/contract"])


def curl(arguments: list[str], *_: Any) -> None:
    service = pytest.importorskip("ctr_pe.serving.service")
    kinds = {"rank": service.RankRequest, "recommend": service.RecommendRequest}
    kinds[arguments[0].rpartition("/")[2]].model_validate_json(arguments[arguments.index("-d") + 1])


def of_files(arguments: list[str], *_: Any) -> None:
    """``docker`` and ``kubectl``: the files that ``-f`` names are there."""
    assert (CHECKOUT / arguments[arguments.index("-f") + 1]).is_file()


def export(arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(re.fullmatch(r"[A-Z_]+=.+", one) for one in arguments)


def gpu_script(arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.access(CHECKOUT / "benchmark" / "gpu.sh", os.X_OK)
    source = (CHECKOUT / "benchmark" / "gpu.py").read_text(encoding="utf-8")
    assert all(f'"{option}"' in source for option in arguments if option.startswith("--"))


PROGRAMS: dict[str, Callable[..., None]] = {
    "ctr-pe": ctr_pe, "python": python, "python3": python, "pip": pip, "make": make, "bash": a_file, ".": a_file,
    "pytest": our_tests, "curl": curl, "torchrun": torchrun,
    "docker": of_files, "kubectl": of_files, "export": export, "benchmark/gpu.sh": gpu_script,
}  # fmt: skip
