"""The command ``ctr-pe``: its parser, and what every command does with errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ctr_pe import __version__
from ctr_pe.commands import (
    benchmark,
    completion,
    data_build,
    data_check,
    data_convert,
    data_fetch,
    data_generate,
    draw,
    export,
    info,
    monitor,
    pack,
    predict,
    recommend,
    report,
    reproduce,
    serve,
    tune,
    unpack,
    validate,
)
from ctr_pe.commands import list as list_
from ctr_pe.commands.options import Parser, add_command, exit_codes
from ctr_pe.utils.allocator import keep_memory
from ctr_pe.utils.errors import be_quiet, exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. A user's mistake is one line on stderr and code 2."""
    keep_memory()
    try:
        return exit_code("ctr-pe", lambda: _run(argv))
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe: nothing may be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    completion.answer(parser)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.parser.refuse(unknown)
    be_quiet(args.quiet)
    try:
        code: int = args.run(args)
    finally:
        be_quiet(False)
    sys.stdout.flush()
    return code


def _parser() -> Parser:
    parser = Parser(
        prog="ctr-pe",
        description="Position encodings for click-through-rate models that attend from a target to a user's history.",
        epilog=f"""examples:
  ctr-pe benchmark                                        DIN with none and cape on built-in data, five seeds
  ctr-pe list                                             models, encodings, data sets
  ctr-pe benchmark --pe none,rope,cape --dataset amazon_sports --out results/sports
  ctr-pe data build --help                                how your own log becomes a data set

{exit_codes({1: "something failed; the help of a command says what"})}""",
    )
    parser.add_argument("--version", action="version", version=f"ctr-pe {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    for command in (benchmark, recommend, report, reproduce, tune, draw, export, list_, validate):
        add_command(commands, command)
    examples = "examples:\n  ctr-pe data check log.csv\n  ctr-pe data build --help"
    codes = exit_codes(data_check.EXIT_CODES)
    data = commands.add_parser(
        "data",
        help="build or fetch data sets",
        description="Build or fetch data sets.",
        epilog=f"{examples}\n\n{codes}",
    )
    of_data = data.add_subparsers(metavar="COMMAND", required=True, title="commands")
    for command in (data_build, data_check, data_fetch, data_generate, data_convert):
        add_command(of_data, command)
    for command in (predict, serve, monitor, pack, unpack, info, completion):
        add_command(commands, command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
