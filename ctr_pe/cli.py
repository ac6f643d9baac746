"""The command ``ctr-pe``. Each command imports what it needs when it runs, so that help and lists answer at once."""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from ctr_pe import __version__
from ctr_pe.allocator import keep_memory
from ctr_pe.errors import UserError, nearest

INTERRUPTED = 130
DATA_ROOT_HELP = "where data sets live (default: $CTR_PE_DATA, else ./data)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. A user's mistake is one line on stderr and code 2."""
    keep_memory()
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"ctr-pe: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ctr-pe: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, `head` say, has seen enough; nothing may be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(argv: Sequence[str] | None) -> int:
    args, unknown = _parser().parse_known_args(argv)
    if unknown:
        args.parser.refuse(unknown)
    code: int = args.run(args)
    return code


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)
        self._action_max_length = 14  # argparse leaves the indent of commands out of its count


class _Parser(argparse.ArgumentParser):
    """argparse that names the nearest valid choice."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, **settings)
        self.set_defaults(parser=self)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"'{value}' is unknown: {nearest(value, action.choices)}")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        option = next((given for given in unknown if given.startswith("-")), None)
        if option is None:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        self.error(f"unknown option '{option}': {nearest(option.partition('=')[0], self._options())}")

    def _options(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings if option.startswith("--")]


def _parser() -> _Parser:
    parser = _Parser(
        prog="ctr-pe",
        description="Position encodings for click-through-rate models that attend from a target to a user's history.",
        epilog="""examples:
  ctr-pe benchmark                                        DIN with none and cape on built-in data, five seeds
  ctr-pe list                                             models, encodings, data sets
  ctr-pe benchmark --pe none,rope,cape --dataset amazon_sports --out results/sports
  ctr-pe data build --help                                how your own log becomes a data set
""",
    )
    parser.add_argument("--version", action="version", version=f"ctr-pe {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    _benchmark_parser(commands)
    _tune_parser(commands)
    _draw_parser(commands)
    _list_parser(commands)
    _validate_parser(commands)
    data = commands.add_parser("data", help="build or fetch data sets", description="Build or fetch data sets.")
    of_data = data.add_subparsers(metavar="COMMAND", required=True, title="commands")
    _build_parser(of_data)
    _fetch_parser(of_data)
    return parser


def _benchmark_parser(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "benchmark",
        help="train and compare encodings over several seeds",
        description="""Train every model with every encoding over several seeds, and print one table: mean and standard
deviation, and the paired difference to none with its interval. At one seed all encodings start from
the same backbone weights and see the same batches. Finished runs are kept in OUT/results.jsonl; calling
again with the same OUT runs only what is missing.""",
        epilog="""examples:
  ctr-pe benchmark
  ctr-pe benchmark --pe none,naive,rope,cope,cape --dataset amazon_sports --jobs 2 --out results/sports
  ctr-pe benchmark --pe none,cape --repeats 1 --set epochs=1 --set 'dnn_hidden_units=[64, 32]'
  ctr-pe benchmark --suite cape_table2 --gpu 0
""",
    )
    add = parser.add_argument
    add(
        "--suite",
        metavar="NAME|FILE",
        help="a suite of `ctr-pe list`, or a YAML file with one; --model and --pe narrow it, --dataset, --repeats, "
        "--protocol and --set change it",
    )
    add("--model", type=_comma_list, metavar="NAME,…", help="models (default: DIN)")
    add(
        "--pe",
        type=_comma_list,
        metavar="NAME,…",
        help="encodings; a+b chains two (default: none,cape)",
    )
    add(
        "--dataset",
        metavar="NAME",
        help="a data set below the data root, or the path of one (default: synthetic, generated at first use)",
    )
    add("--repeats", type=_count, metavar="N", help="seeds per encoding (default: 5)")
    add("--seed", type=_number, default=0, metavar="N", help="the first seed (default: 0)")
    add(
        "--protocol",
        choices=["heldout", "paper"],
        help="heldout selects the epoch on the validation split; paper trains on train and validation and selects on "
        "test, as the published results do: its tables are marked † (default: heldout)",
    )
    add("--out", type=Path, metavar="DIR", help="results and tables (default: results/DATASET-PROTOCOL)")
    add("--jobs", type=_count, metavar="N", help="runs side by side; results do not change (default: one per core)")
    add("--keep-weights", action="store_true", help="keep each run's best weights in OUT/weights, for `ctr-pe draw`")
    _training_options(parser)
    parser.set_defaults(run=_benchmark)


def _training_options(parser: _Parser) -> None:
    add = parser.add_argument
    add(
        "--threads",
        type=_count,
        default=1,
        metavar="N",
        help="threads of one run; another number may change the last digits (default: 1)",
    )
    add("--gpu", type=int, default=-1, metavar="N", help="GPU to train on, -1 for the CPU (default: -1)")
    add(
        "--amp",
        action="append_const",
        dest="set",
        const="amp=true",
        default=[],
        help="mixed precision: attention in bfloat16",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a hyper-parameter under FuxiCTR's name, such as learning_rate=1e-3; may be given several times",
    )
    add("--data-root", type=Path, metavar="DIR", help=DATA_ROOT_HELP)


def _tune_parser(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "tune",
        help="search hyper-parameters with Optuna",
        description="""Search hyper-parameters with Optuna (pip install 'ctr_pe[tune]'): trials that fall behind the
median are stopped, the best is chosen on the validation rows, and its test metrics are printed. By default
position_dim, heads and dropout rates are searched, as far as encoding and model have them. The study is kept in
OUT/study.db; calling again with the same OUT goes on, also side by side in several processes.""",
        epilog="""examples:
  ctr-pe tune --pe cape --dataset amazon_sports --trials 30 --out results/tune
  ctr-pe tune --space 'learning_rate={low: 1e-4, high: 1e-2, log: true}' --space 'position_dim=[8, 16]'
""",
    )
    add = parser.add_argument
    add("--model", default="DIN", metavar="NAME", help="a model (default: DIN)")
    add("--pe", default="cape", metavar="NAME", help="an encoding (default: cape)")
    add("--dataset", default="synthetic", metavar="NAME", help="as for benchmark (default: synthetic)")
    add("--trials", type=_count, default=30, metavar="N", help="in all, with those of earlier calls (default: 30)")
    add("--out", type=Path, metavar="DIR", help="study and report (default: results/tune-MODEL-PE-DATASET)")
    add(
        "--space",
        action="append",
        default=[],
        metavar="KEY=VALUES",
        help="a list of values, or {low: …, high: …, log: true}; null leaves the key out; may be given several times",
    )
    add("--seed", type=_number, default=0, metavar="N", help="of training and search (default: 0)")
    _training_options(parser)
    parser.set_defaults(run=_tune)


def _draw_parser(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "draw",
        help="a picture of what encodings do to attention",
        description="""Draw what encodings do to attention (pip install 'ctr_pe[draw]'): attention by position side by
side, and of each encoding what there is to see: its bias by distance or age, its rotation, its position vectors, the
positions it gives to the items of real users, its matrices, its phases. With --run before and after the training of a
benchmark, else as initialised.""",
        epilog="""examples:
  ctr-pe draw alibi,kerple_log --out bias.png
  ctr-pe benchmark --pe none,rope,cape --repeats 1 --keep-weights --out results/drawn
  ctr-pe draw none,rope,cape --run results/drawn --out attention.png
""",
    )
    add = parser.add_argument
    add("pe", type=_comma_list, metavar="PE[,PE…]", help="encodings; a+b chains two")
    add("--out", type=Path, required=True, metavar="FILE", help="the picture; its suffix says its kind: png, svg, pdf")
    add("--run", dest="store", type=Path, metavar="DIR", help="OUT of a benchmark with --keep-weights")
    add("--model", metavar="NAME", help="a model (default: that of the runs, else DIN)")
    add("--dataset", metavar="NAME", help="as for benchmark (default: that of the runs, else synthetic)")
    add("--seed", type=_number, metavar="N", help="of the weights (default: the first of the runs, else 0)")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a hyper-parameter, with --run one that tells runs apart; may be given several times",
    )
    add("--data-root", type=Path, metavar="DIR", help=DATA_ROOT_HELP)
    parser.set_defaults(run=_draw)


def _list_parser(commands: argparse._SubParsersAction[_Parser]) -> None:
    text = "List models, encodings and data sets."
    parser = commands.add_parser("list", help="models, encodings, data sets", description=text)
    parser.add_argument("--data-root", type=Path, metavar="DIR", help=DATA_ROOT_HELP)
    parser.set_defaults(run=_list)


def _validate_parser(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "validate",
        help="check a config against what will read it",
        description="""Check a YAML file against the signatures that will read it, and run nothing: a model config of
FuxiCTR's form, a dataset config, a recipe, a benchmark suite, or a config of FuxiCTR's tuner. Unknown keys, values of
the wrong type and combinations that no model can be built with are one line each, and the exit code is 2.""",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the YAML file")
    parser.add_argument("--data-root", type=Path, metavar="DIR", help=DATA_ROOT_HELP)
    parser.set_defaults(run=_validate)


def _build_parser(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "build",
        help="make a data set from a log",
        argument_default=argparse.SUPPRESS,  # what is not given stays as the recipe has it
        description="""Make a data set from a log of interactions (parquet or CSV), with a report of what was counted.

protocol din: the log holds chosen items only. Every item of a user from the second on is a target, with one
sampled item that the user never chose; the last target is test, the one before it validation.
protocol impressions: the log holds shown items with a 0/1 label. A row's history is the user's earlier
positives; rows are split by time, or by a column that the recipe names.""",
        epilog="""examples:
  ctr-pe data build --recipe amazon_sports --interactions interactions.parquet --items items.parquet \\
      --out data/amazon_sports
  ctr-pe data build --protocol impressions --interactions log.csv --user uid --item video --time ts --label click \\
      --attributes author,tag --out data/videos
`ctr-pe list` names the recipes. A column that is there but must not be used: --time none.
""",
    )
    files = parser.add_argument_group("files").add_argument
    files("--interactions", type=Path, metavar="FILE", help="one row per event: user, item, time or order, label")
    files("--items", type=Path, metavar="FILE", help="one row per item: item and its attributes")
    files("--out", type=Path, required=True, metavar="DIR", help="the data set; its name is the directory's")
    files("--overwrite", action="store_true", default=False, help="replace a data set that is already there")
    rules = parser.add_argument_group("rules").add_argument
    rules(
        "--recipe",
        default=None,
        metavar="NAME|FILE",
        help="a recipe of `ctr-pe list`, or a YAML file with these options",
    )
    rules("--protocol", choices=["din", "impressions"], help="how rows, labels and splits are made")
    rules("--max-len", type=_count, metavar="N", help="most recent items kept of a history (default: 100)")
    rules("--seed", type=_number, metavar="N", help="of the sampled items of protocol din (default: 0)")
    rules("--negatives", action="store_true", help="impressions: also a history of the user's earlier negatives")
    rules("--valid-fraction", type=float, metavar="F", help="impressions: rows before the test rows (default: 0.1)")
    rules("--test-fraction", type=float, metavar="F", help="impressions: the newest rows (default: 0.1)")
    columns = parser.add_argument_group("columns").add_argument
    columns("--user", metavar="COLUMN", help="default: user_id")
    columns("--item", metavar="COLUMN", help="default: item_id")
    columns("--time", type=_column, metavar="COLUMN", help="when it happened; default: timestamp, if there")
    columns("--time-unit", choices=["s", "ms"], help="of a whole-number time column (default: s)")
    columns(
        "--order", type=_column, metavar="COLUMN", help="what comes first when times tie; default: position, if there"
    )
    columns("--label", type=_column, metavar="COLUMN", help="0 or 1; default: label, if there")
    columns(
        "--attributes",
        type=_columns,
        metavar="COLUMN,…",
        help="of the items, beside their id; default: cate_id, if there",
    )
    parser.set_defaults(run=_build)


def _fetch_parser(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "fetch",
        help="download a published data set, check and convert it",
        description="""Download a published data set, check its md5 sums and convert it. An interrupted download goes on
where it stopped. Files that are already here are read from the directory given with --from.""",
        epilog="""examples:
  ctr-pe data fetch amazonelectronics_x1
  ctr-pe data fetch kuaivideo_x1 --from ~/downloads/KuaiVideo_x1
""",
    )
    parser.add_argument("name", metavar="NAME", help="a published data set of `ctr-pe list`")
    parser.add_argument("--from", dest="source", type=Path, metavar="DIR", help="take the files from here")
    parser.add_argument("--overwrite", action="store_true", help="replace a data set that is already there")
    parser.add_argument("--data-root", type=Path, metavar="DIR", help=DATA_ROOT_HELP)
    parser.set_defaults(run=_fetch)


def _comma_list(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"'{text}' is not a comma-separated list of names")
    return list(dict.fromkeys(names))


def _column(text: str) -> str:
    return "" if text == "none" else text  # empty: no such column


def _columns(text: str) -> tuple[str, ...] | str:
    return "" if text == "none" else tuple(_comma_list(text))


def _number(text: str) -> int:
    if not re.fullmatch("[0-9]+", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 0")
    return int(text)


def _count(text: str) -> int:
    if _number(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def _benchmark(args: argparse.Namespace) -> int:
    from ctr_pe.benchmark import main

    if args.suite is None:
        defaults = {"model": ["DIN"], "pe": ["none", "cape"], "dataset": "synthetic", "repeats": 5}
        for option, value in {**defaults, "protocol": "heldout"}.items():
            if getattr(args, option) is None:
                setattr(args, option, value)
    return main(args)


def _build(args: argparse.Namespace) -> int:
    from ctr_pe.data.build import main

    return main(args)


def _fetch(args: argparse.Namespace) -> int:
    from ctr_pe.data.fetch import main

    return main(args)


def _tune(args: argparse.Namespace) -> int:
    from ctr_pe.commands.tune import main

    return main(args)


def _draw(args: argparse.Namespace) -> int:
    from ctr_pe.draw import main

    return main(args)


def _validate(args: argparse.Namespace) -> int:
    from ctr_pe.validate import main

    return main(args)


def _list(args: argparse.Namespace) -> int:
    from ctr_pe.config import packaged_yaml
    from ctr_pe.data.built_in import BUILT_IN
    from ctr_pe.data.dataset import data_root, list_datasets
    from ctr_pe.data.fetch import PUBLISHED
    from ctr_pe.model_zoo import MODELS
    from ctr_pe.pe import REGISTRY

    root = data_root(args.data_root)
    built = [(name, _rows(rows)) for name, rows in list_datasets(root)]
    built += [(name, "built in; generated at first use") for name in BUILT_IN if name not in dict(built)]
    _section("models", [(name, _docstring(place)) for name, place in MODELS.items()])
    _section("encodings", [(name, _docstring(place)) for name, place in REGISTRY.items()])
    _section(f"data sets in {root}", built)
    _section("published data sets (ctr-pe data fetch NAME)", PUBLISHED.items())
    suites = packaged_yaml("benchmark").items()
    _section("suites (ctr-pe benchmark --suite NAME)", [(name, _first_comment(text)) for name, text in suites])
    recipes = packaged_yaml("recipe").items()
    _section("recipes (ctr-pe data build --recipe NAME)", [(name, _first_comment(text)) for name, text in recipes])
    return 0


def _section(title: str, entries: Iterable[tuple[str, str]]) -> None:
    print(f"{title}:")
    for name, text in entries:
        print(f"  {name:<23} {text}".rstrip())
    print()


def _rows(rows: dict[str, int]) -> str:
    return " · ".join(f"{split} {count:,}" for split, count in rows.items()) + " rows"


def _docstring(place: str) -> str:
    """First line of a module's docstring, without importing the module: that takes seconds of torch and FuxiCTR."""
    spec = find_spec(place.partition(":")[0])
    if spec is None or spec.origin is None:
        return ""
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def _first_comment(text: str) -> str:
    """A recipe's leading comment up to its first full stop, colon or semicolon."""
    lines = text.splitlines()
    first = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return re.split(r"[.:;](?:\s|$)", " ".join(line.removeprefix("#").strip() for line in lines[:first]))[0]


if __name__ == "__main__":
    sys.exit(main())
