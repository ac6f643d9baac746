"""``ctr-pe completion``: what a shell offers after a few letters."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ctr_pe import cli
from ctr_pe.cli import main
from ctr_pe.commands.completion import SHELLS, add_completers
from ctr_pe.pe import available_pes

argcomplete = pytest.importorskip("argcomplete")
ASK = """
source "$1"
COMP_LINE=$2 COMP_POINT=${#2} COMP_TYPE=9 _python_argcomplete ctr-pe
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "data" / "mine").mkdir(parents=True)
    (tmp_path / "data" / "mine" / "report.json").write_text('{"rows": {}}')
    (tmp_path / "mine.yaml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CTR_PE_DATA", raising=False)
    return tmp_path


def offered(line: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    line = f"ctr-pe {line}"
    for name, value in {"": "1", "_IFS": "\n", "_SUPPRESS_SPACE": "1"}.items():
        monkeypatch.setenv(f"_ARGCOMPLETE{name}", value)
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    # It writes to a file of number 9, and closes it: here that is one of pytest's.
    monkeypatch.setattr(argcomplete.CompletionFinder, "_init_debug_stream", lambda self: None)
    monkeypatch.setattr("argcomplete.io.debug_stream", io.StringIO())
    parser, found = cli._parser(), io.StringIO()
    add_completers(parser)
    with pytest.raises(SystemExit):
        argcomplete.autocomplete(parser, always_complete_options=False, exit_method=sys.exit, output_stream=found)
    return found.getvalue().split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("be", ["benchmark"]),
        ("data b", ["build"]),
        ("benchmark --rep", ["--repeats", "--repair"]),
        ("benchmark --format l", ["latex"]),
        ("benchmark --format=l", ["--format=latex"]),
        ("benchmark --pe none,ro", ["none,rope"]),
        ("benchmark --pe none,rope,cape_c", ["none,rope,cape_cosine", "none,rope,cape_constant"]),
        ("benchmark --model DI", ["DIN", "DIEN", "DIFSR"]),
        ("tune --model DIN,D", []),  # takes one
        ("benchmark --suite cape_t", ["cape_table2"]),
        ("reproduce cape-t", ["cape-table2"]),
        ("data fetch k", ["kuaivideo_x1"]),
        ("data build --recipe ml-1m_", ["ml-1m_next"]),
        ("draw none,sinu", ["none,sinusoidal"]),
        ("completion z", ["zsh"]),
        ("benchmark --dataset m", ["mine"]),
        ("benchmark --out mi", ["mine.yaml"]),
        ("serve --model mi", ["mine.yaml"]),  # a path, and no name of a model
        ("validate mi", ["mine.yaml"]),
        ("benchmark --repeats ", []),
        ("benchmark --json --pub", ["--published"]),
    ],
)
def test_what_is_offered(line: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert offered(line, monkeypatch) == expected


def test_every_encoding_and_every_option_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert offered("benchmark --pe ", monkeypatch) == list(available_pes())
    args = cli._parser().parse_args(["benchmark"])
    options = {name for action in args.parser._actions for name in action.option_strings if name.startswith("--")}
    assert set(offered("benchmark --", monkeypatch)) == options


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_asks_the_command(folder: Path, checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    (folder / "script").write_text(capsys.readouterr().out)
    command = folder / "bin" / "ctr-pe"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ctr_pe.cli "$@"\n')
    command.chmod(0o755)
    given = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(checkout)}
    ask = ["bash", "--norc", "-c", ASK, "ask", str(folder / "script"), "ctr-pe benchmark --pe none,ro"]
    assert subprocess.check_output(ask, text=True, env=given).split() == ["none,rope"]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "ctr-pe" in text
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True)


def test_without_argcomplete_it_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete.shell_integration", None)
    assert main(["completion", "bash"]) == 2
    assert capsys.readouterr().err == "ctr-pe: error: completion needs argcomplete: pip install 'ctr_pe[complete]'\n"
