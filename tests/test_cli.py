"""The command line: fast, helpful, and one line for a user's mistake."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ctr_pe import __version__, cli
from ctr_pe.cli import main
from ctr_pe.reporting.figures.runs import Wanted
from ctr_pe.study.benchmark import Request, plan
from ctr_pe.utils.errors import UserError

HEAVY = "torch fuxictr polars pandas ray sklearn pyarrow pydantic huggingface_hub h5py matplotlib".split()

QUICK = """
import json, sys
from ctr_pe.cli import main
try:
    code = main(json.loads(sys.argv[1]))
except SystemExit as end:
    code = end.code
imported = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
print(json.dumps([code, imported]), file=sys.stderr)
"""


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Stands in for the functions behind the commands; holds the values each was called with."""
    calls: list[tuple[Any, ...]] = []

    def stand_in(*values: Any, **named: Any) -> int:
        calls.append((*values, named) if named else values)
        return 0

    functions = ["study.benchmark.run", "data.logs.recipe.load_recipe", "data.published.download.fetch"]
    for function in (*functions, "reporting.figures.picture"):
        monkeypatch.setattr(f"ctr_pe.{function}", stand_in)
    return calls


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(request: Request) -> int:
        raise error

    monkeypatch.setattr("ctr_pe.study.benchmark.run", fail)


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["list"],
        ["info", "--help"],
        ["benchmark", "--help"],
        ["validate", "--help"],
        ["tune", "--help"],
        ["draw", "--help"],
        ["predict", "--help"],
        ["monitor", "--help"],
        ["pack", "--help"],
        ["serve", "--help"],
        ["export", "--help"],
        ["recommend", "--help"],
        ["data", "build", "--help"],
        ["data", "generate", "--help"],
        ["completion", "bash"],
        ["list", "--json"],
        ["--version"],
    ],
)
def test_help_and_list_import_nothing_heavy(argv: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", QUICK, json.dumps(argv), json.dumps(HEAVY)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    code, imported = json.loads(ended.stderr)
    assert code == 0
    assert imported == []
    assert ended.stdout


def test_every_help_has_an_example_and_the_exit_codes() -> None:
    parsers = [cli._parser()]
    for parser in parsers:  # grows
        of = [action for action in parser.filled()._actions if isinstance(action, argparse._SubParsersAction)]
        parsers += [command for action in of for command in action.choices.values()]
        text = parser.format_help()
        assert re.search(r"^examples:\n  ctr-pe ", text, re.MULTILINE), parser.prog
        assert re.search(r"^exit codes:\n  0    done$", text, re.MULTILINE), parser.prog
    assert len(parsers) >= 18


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = f"import ctr_pe, sys; print([name for name in {HEAVY} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_list_names_what_there_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ctr_pe.data.synthetic.built_in import BUILT_IN
    from ctr_pe.model_zoo import MODELS
    from ctr_pe.pe import REGISTRY

    built = tmp_path / "my_log"
    built.mkdir()
    (built / "report.json").write_text(json.dumps({"format": 1, "rows": {"train": 1234, "valid": 5, "test": 6}}))
    assert main(["list", "--data-root", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    words = [line.split()[0] for line in listed.splitlines() if line.startswith("  ")]
    assert {*MODELS, *REGISTRY, "my_log", *BUILT_IN, "amazonelectronics_x1", "kuaivideo_x1"} <= set(words)
    assert {"amazon_sports", "amazon_beauty", "kuairand_pure"} <= set(words)
    assert "train 1,234 · valid 5 · test 6 rows" in listed
    assert "CAPE, context-aware position encoding" in listed
    assert all(len(line.split()) > 1 for line in listed.splitlines() if line.startswith("  "))
    monkeypatch.setenv("CTR_PE_DATA", str(tmp_path))
    assert main(["list"]) == 0
    assert capsys.readouterr().out == listed


@pytest.mark.usefixtures("worker_threads")
def test_quiet_leaves_results_and_warnings_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ctr_pe.data.synthetic.bursts import generate
    from ctr_pe.study import benchmark
    from tests.support.fake_training import train_on_data_set

    generate(tmp_path / "mine", users=120, valid_users=30, test_users=40, items=200, categories=10)
    run = benchmark.run
    monkeypatch.setattr(benchmark, "run", lambda request: run(request, train_on_data_set))
    given = ["benchmark", "--dataset", "mine", "--data-root", str(tmp_path), "--repeats", "1", "--jobs", "1", "--pe"]
    loud = [*given, "none,cape", "--out", str(tmp_path / "loud")]
    assert main(loud) == 0
    shown = capsys.readouterr()
    assert "2 runs, 1 at once" in shown.err
    assert "[2/2]" in shown.err
    for argv in ([*given, "none,cape", "--out", str(tmp_path / "quiet")], loud):  # the second has nothing to do
        assert main([*argv, "--quiet"]) == 0
        quiet = capsys.readouterr()
        assert quiet.err == ""
        assert "0.5" in quiet.out or "0.4" in quiet.out
    assert main([*given, "cape", "--out", str(tmp_path / "alone"), "--quiet", "--json"]) == 0
    alone = capsys.readouterr()
    assert alone.err.startswith("DIN on synthetic: no runs of 'none'")
    assert len(alone.err.splitlines()) == 1
    assert [row["pe"] for row in json.loads(alone.out)[0]["rows"]] == ["cape"]
    assert main(loud) == 0
    assert "are there already" in capsys.readouterr().err  # of the next command


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        (["list"], "encodings"),
        (["info"], "torch threads"),
        (["recommend", "--dataset", "mine"], "facts"),
        (["data", "check", "log.csv"], "problems"),
        (["data", "build", "--interactions", "log.csv", "--protocol", "din", "--out", "built"], "splits"),
    ],
)
def test_json_is_all_that_a_machine_reads(
    argv: list[str], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ctr_pe.data.synthetic.bursts import generate

    monkeypatch.chdir(tmp_path)
    rows = [f"{user},{item},{1_700_000_000 + 60 * item}" for user in range(8) for item in range(user, user + 6)]
    (tmp_path / "log.csv").write_text("\n".join(["user_id,item_id,timestamp", *rows]) + "\n")
    if "mine" in argv:
        generate(tmp_path / "data" / "mine", users=120, valid_users=30, test_users=40, items=200, categories=10)
    assert main([*argv, "--json", "--quiet"]) == 0
    shown = capsys.readouterr()
    assert key in json.loads(shown.out)
    assert shown.err == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"ctr-pe {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["benhmark"], "did you mean 'benchmark'?"),
        (["data", "bild"], "did you mean 'build'?"),
        (["benchmark", "--repeat", "3"], "unknown option '--repeat': did you mean '--repeats'?"),
        (["benchmark", "--protocl=paper"], "did you mean '--protocol'?"),
        (["benchmark", "--protocol", "papr"], "did you mean 'paper'?"),
        (["benchmark", "--repeats", "0"], "must be at least 1"),
        (["benchmark", "--jobs", "two"], "not a whole number"),
        (["benchmark", "--pe", "none,,cape"], "not a comma-separated list"),
        (["data", "build", "--recipe", "amazon_sports"], "--out"),
        (["list", "everything"], "unrecognized arguments: everything"),
        ([], "COMMAND"),
    ],
)
def test_wrong_commands_and_options(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_benchmark_defaults_are_the_main_job(called: list[tuple[Any, ...]]) -> None:
    assert main(["benchmark"]) == 0
    ((request,),) = called
    assert request == Request()
    suite, cells = plan(request)
    assert [(cell.model, cell.dataset, cell.pe) for cell in cells] == [
        ("DIN", "synthetic_context", "none"),
        ("DIN", "synthetic_context", "cape"),
    ]
    assert (suite.seeds, suite.protocol, request.seed) == (5, "heldout", 0)
    assert (request.threads, request.gpu, request.params) == (1, -1, {})


def test_benchmark_options(called: list[tuple[Any, ...]]) -> None:
    main("benchmark --model DIN --pe none,rope+cape,none --set a=1 --amp --set b=2 --jobs 2 --out r --gpu -1".split())
    ((request,),) = called
    assert request.encodings == ["none", "rope+cape"]
    assert request.params == {"a": 1, "amp": True, "b": 2}
    assert (request.jobs, request.out, request.gpu) == (2, Path("r"), -1)


def test_a_recipe_is_several_hyper_parameters_which_set_may_change(
    called: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    main("benchmark --recipe fuxictr --set early_stop_patience=5".split())
    ((request,),) = called
    expected = {"learning_rate_schedule": "constant", "weight_average": None, "early_stop_patience": 5}
    assert request.params.items() >= expected.items()
    assert main("benchmark --recipe fuxi".split()) == 2
    assert (
        capsys.readouterr().err == "ctr-pe: error: --recipe fuxi: no such recipe: did you mean 'fuxictr'? (fuxictr)\n"
    )


def test_build_passes_on_only_what_was_given(called: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    monkeypatch.setattr("ctr_pe.data.logs.log.build", lambda recipe, out, **named: built.append((out, named)))
    monkeypatch.setattr("ctr_pe.data.logs.log.summary", str)
    main("data build --recipe amazon_sports --out d --time none --attributes author,tag --max-len 50".split())
    assert called == [("amazon_sports", {"time": None, "attributes": ("author", "tag"), "max_len": 50})]
    assert built == [(Path("d"), {"overwrite": False, "progress": True, "shard_rows": None, "engine": "polars"})]


def test_build_has_an_option_for_every_simple_key_of_a_recipe() -> None:
    from ctr_pe.data.logs.recipe import Recipe

    helped = subprocess.check_output([sys.executable, "-m", "ctr_pe.cli", "data", "build", "--help"], text=True)
    for key in Recipe.model_fields.keys() - {"drop", "split"}:
        assert f"--{key.replace('_', '-').replace('columns', 'column')} " in helped


def test_fetch_options(called: list[tuple[Any, ...]]) -> None:
    main("data fetch kuaivideo_x1 --from here".split())
    assert called == [("kuaivideo_x1", None, Path("here"), False, {"progress": True})]


def test_draw_options(called: list[tuple[Any, ...]]) -> None:
    main("draw none,rope+cape --run results --seed 2 --set a=1 --out x.png".split())
    wanted = Wanted(["none", "rope+cape"], Path("results"), None, None, 2, {"a": 1}, None)
    assert called.pop() == (Path("x.png"), wanted, [], "page", None, 300)
    main("draw cape --only attention,bias --size column --longest 1 --dpi 120 --out x.png".split())
    assert called.pop()[2:] == (["attention", "bias"], "column", 1, 120)


def test_info_says_what_times_depend_on(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from ctr_pe import ops

    assert main(["info"]) == 0
    found = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    assert found["ctr_pe"].strip() == __version__
    assert found["torch"].strip() == torch.__version__
    assert int(found["torch threads"]) == torch.get_num_threads()
    assert found.keys() >= {
        "python",
        "fuxictr",
        "numpy",
        "polars",
        "cores",
        "C compiler",
        "kernels from",
        "kernels on a GPU",
    }
    assert {name: found[f"  {name}"].strip() for name in ops.kernels()} == ops.kernels()


def test_a_users_mistake_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, UserError("data/x/report.json: missing: run ctr-pe data build"))
    assert main(["benchmark"]) == 2
    assert capsys.readouterr() == ("", "ctr-pe: error: data/x/report.json: missing: run ctr-pe data build\n")


def test_interruption_is_one_line_and_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    assert main(["benchmark"]) == 130
    assert capsys.readouterr() == ("", "ctr-pe: interrupted\n")


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        main(["benchmark"])


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "ctr_pe.cli", "list"], stdout=writing, stderr=subprocess.PIPE, cwd=tmp_path
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["benchmark", "--dataset", "nowhere"], "nowhere"),
        (["benchmark", "--pe", "capee"], "did you mean 'cape'?"),
        (["benchmark", "--model", "DINN"], "did you mean 'DIN'?"),
        (["benchmark", "--set", "attention_hidden_unit=[8]"], "did you mean 'attention_hidden_units'?"),
        (["benchmark", "--set", "epochs"], "key=value"),
        (["benchmark", "--set", "position_encoding=cape"], "use --pe"),
        (["draw", "capee", "--out", "x.png"], "did you mean 'cape'?"),
        (["draw", "cape", "--out", "x.pgn"], "did you mean '.png'?"),
        (["draw", "cape", "--run", "nowhere", "--out", "x.png"], "ctr-pe benchmark --pe cape"),
        (["data", "build", "--recipe", "amazon_sport", "--out", "x"], "did you mean 'amazon_sports'?"),
        (["data", "build", "--out", "x"], "'interactions' is missing"),
        (["data", "fetch", "kuaivideo"], "did you mean 'kuaivideo_x1'?"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    argv: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    line, *more = err.splitlines()
    assert not more
    assert line.startswith("ctr-pe: error: ")
    assert message in line
    assert list(tmp_path.iterdir()) == []


WRITING = [
    *("benchmark", "data build", "data convert synthetic", "data fetch amazon_beauty", "data generate kuaivideo_x1"),
    *("draw", "export --model m --format onnx", "predict --model m --input i", "report results", "tune"),
]


@pytest.mark.parametrize("character", ["\n", "\r", "\t", "\x1b", "\u2028"])
@pytest.mark.parametrize("words", WRITING)
def test_a_path_to_write_to_has_no_line_break(
    words: str, character: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused in one line before any work: nothing is read or written, whatever else is missing."""
    monkeypatch.chdir(tmp_path)
    flag = "--output" if words.startswith(("export", "predict")) else "--out"
    flag = "--data-root" if words.startswith("data fetch") else flag
    with pytest.raises(SystemExit) as end:
        main([*words.split(), f"{flag}=folder/two{character}lines"])
    assert end.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert f"argument {flag}: it must be a path without line breaks and other control characters, got" in line
    assert not list(tmp_path.iterdir())


def test_a_data_set_of_two_lines_is_not_generated(tmp_path: Path) -> None:
    from ctr_pe.data.synthetic.bursts import generate

    with pytest.raises(UserError, match="out must be a path without line breaks"):
        generate(tmp_path / "two\nlines", users=40, valid_users=15, test_users=15)
    assert not list(tmp_path.iterdir())
