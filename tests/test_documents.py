"""Every block of code in README, CONTRIBUTING and docs/ is run, or checked as far as it can be; none is passed over.

- ``python``: the blocks of a page are run as one script, in a folder of its own. Those of README.md run in
  ``test_readme.py``, one by one. FuxiCTR's ``grid_search`` (docs/fuxictr.md) is not started: it would train 24 models.
- ``yaml``: checked as ``ctr-pe validate`` does.
- ``bash``, line by line. Run: ``ctr-pe data build`` on a small log, ``ctr-pe validate``, ``ctr-pe draw`` of new models,
  ``ctr-pe benchmark`` on small data as a dry run, which builds each model and trains a few steps, and ``run_expid.py``
  up to its training. Only read by their parser: ``ctr-pe tune``, ``report``, ``draw --run``, ``data fetch`` (network)
  and recipes of the real logs. Compared with the files they name: ``pip`` (extras, constraints), ``make`` (targets),
  ``python`` and ``bash`` with a script of the repository. ``.ci/run`` runs the README's installation and tests as they
  stand.
- ``text`` is output.
"""

from __future__ import annotations

import re
import runpy
import shlex
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pytest

from ctr_pe import cli
from ctr_pe.data.synthetic import generate
from ctr_pe.study.rendering import GAUC
from ctr_pe.validate import check

CHECKOUT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "data/README.md", "benchmark/results/README.md"]
PAGES += sorted(str(page.relative_to(CHECKOUT)) for page in (CHECKOUT / "docs").glob("*.md"))
LANGUAGES = {"python", "yaml", "bash", "text"}
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


def lines_of(language: str) -> list[Any]:
    return [
        pytest.param(block.page, line.strip(), id=f"{block.page}: {line.strip()[:50]}")
        for block in BLOCKS
        if block.language == language
        for line in block.code.splitlines()
        if line.strip()
    ]


def test_every_block_says_what_it_is() -> None:
    assert {"README.md", "docs/from_log_to_ranking.md", "docs/own_encoding.md", "docs/results.md"} <= set(PAGES)
    strange = [(block.page, block.language, block.code[:60]) for block in BLOCKS if block.language not in LANGUAGES]
    assert not strange


@pytest.mark.parametrize("page", [p for p in PAGES if p != "README.md" and any(b[:2] == (p, "python") for b in BLOCKS)])
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("fuxictr.autotuner.grid_search", lambda *given, **named: started.append((given, named)))
    for number, block in enumerate(block for block in blocks_of(page) if block.language == "yaml"):
        (tmp_path / ("tuner.yaml" if "tuner_space" in block.code else f"{number}.yaml")).write_text(block.code)
    (tmp_path / "config").symlink_to(CHECKOUT / "config")
    script = tmp_path / "page.py"
    script.write_text("\n".join(block.code for block in blocks_of(page) if block.language == "python"))
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


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "text"], ids=lambda block: block.page)
def test_output_has_the_form_of_today(block: Block) -> None:
    assert GAUC in block.code
    assert "gAUC − none [95 % interval]  won  p" in block.code


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place with what the commands read: a log, as parquet and as CSV with labels, and a config."""
    draw = np.random.default_rng(0)
    log = pl.DataFrame({"user_id": draw.integers(0, 30, 600), "item_id": draw.integers(0, 40, 600)})
    log = log.with_columns(timestamp=pl.int_range(pl.len()) + 1_700_000_000)
    log.write_parquet(tmp_path / "log.parquet")
    log.with_columns(click=pl.Series(draw.integers(0, 2, 600))).write_csv(tmp_path / "shown.csv")
    pl.DataFrame({"item_id": range(40), "cate_id": [i % 5 for i in range(40)]}).write_parquet(
        tmp_path / "items.parquet"
    )
    (config,) = (block.code for block in blocks_of("README.md") if block.language == "yaml")
    (tmp_path / "experiment.yaml").write_text(config)
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
    args = cli._parser().parse_args(arguments)
    name = " ".join(arguments[: 1 + (arguments[0] == "data")])
    if name == "benchmark":
        data = folder / "data" / (args.dataset or "synthetic")
        if not data.exists():
            generate(data, **SMALL)
        few = ["--set", "batch_size=32"]
        assert cli.main([*arguments, *few, "--jobs", "1", *["--dry-run"] * (not args.dry_run)]) == 0
        assert not (folder / "results").exists()
    elif (name == "data build" and args.recipe is None) or name in ("validate", "list", "info"):
        assert cli.main(arguments) == 0
    elif name == "draw" and args.store is None:
        generate(folder / "data" / "synthetic", **SMALL)
        assert cli.main([*arguments, "--seed", "0"]) == 0
        assert args.out.stat().st_size > 1000
    elif name == "data build":
        assert (CHECKOUT / "config" / "recipe" / f"{args.recipe}.yaml").is_file()
    else:
        assert name in ("tune", "report", "draw", "data fetch"), f"nothing is known about `ctr-pe {name}`"


def python(arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if arguments == ["-m", "venv", ".venv"]:
        return
    script = CHECKOUT / arguments[0]
    assert script.is_file()
    if script.name != "run_expid.py":
        source = script.read_text(encoding="utf-8")
        assert all(f'"{option}"' in source for option in arguments if option.startswith("--"))
        return
    from ctr_pe.commands import run_expid

    seen: list[Any] = []
    monkeypatch.setattr(run_expid, "run", lambda params, keep: seen.append(params) or ({}, {}))
    monkeypatch.setattr(run_expid, "append_result", lambda *_: None)
    assert run_expid.main(arguments[1:]) == 0
    assert seen[0]["position_encoding"] == "cape"


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


PROGRAMS: dict[str, Callable[..., None]] = {
    "ctr-pe": ctr_pe, "python": python, "python3": python, "pip": pip, "make": make, "bash": a_file, ".": a_file,
    "pytest": our_tests,
}  # fmt: skip
