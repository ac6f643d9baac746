"""Options and parser that the commands have in common."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, Self

from ctr_pe.data.synthetic.built_in import DEFAULT
from ctr_pe.utils import plugins
from ctr_pe.utils.errors import UserError, nearest
from ctr_pe.utils.names import check_new_path

EXIT_CODES = {0: "done", 2: "a mistake in what was given, in one line", 130: "stopped by Ctrl-C"}
"""What the exit codes of every command mean; a command's module has its own in ``EXIT_CODES``."""
WRITTEN = ("--data-root", "--out", "--output")
"""Options whose paths commands write to: they are checked before any work."""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)
        self._action_max_length = 14  # argparse does not count the indent of commands


class Parser(argparse.ArgumentParser):
    """argparse that names the nearest valid choice. ``add_options`` is called when the parser is first used: of all
    commands that there are, a process runs one."""

    def __init__(self, add_options: Callable[[Parser], None] | None = None, **settings: Any) -> None:
        super().__init__(formatter_class=_Formatter, **{"allow_abbrev": False, **settings})
        self.set_defaults(parser=self)
        self._add_options = add_options

    def filled(self) -> Self:
        """This parser, with all its options."""
        add, self._add_options = self._add_options, None
        if add is not None:
            add(self)
        return self

    def parse_known_args(self, *given: Any, **named: Any) -> Any:
        self.filled()
        return super().parse_known_args(*given, **named)

    def option(
        self, spec: str, text: str, *, group: Any = None, several: bool = False, sets: str = "", **settings: Any
    ) -> None:
        """Add ``--flag VALUE`` or ``name VALUE``, or ``--flag`` alone, which stores True unless an
        ``action`` is given; ``text`` is its help.

        ``group``: of arguments, in which it stands. ``several``: it may be given again. ``sets``: what the flag adds to
        ``--set``.
        """
        name, _, metavar = spec.partition(" ")
        if several:
            settings |= {"action": "append", "default": []}
            text += "; may be given several times"
        if sets:
            settings |= {"action": "append_const", "dest": "set", "const": sets, "default": []}
        elif metavar:
            settings["metavar"] = metavar
        elif "choices" not in settings:
            settings.setdefault("action", "store_true")
        if name in WRITTEN:
            settings["type"] = _new_path
        (group or self).add_argument(name, help=text, **settings)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"'{value}' is unknown: {nearest(value, action.choices)}")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End with an error about unknown arguments."""
        given = next((word for word in unknown if word.startswith("-")), None)
        if given is None:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        options = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        self.error(f"unknown option '{given}': {nearest(given.partition('=')[0], options)}")


def add_command(commands: argparse._SubParsersAction[Parser], module: ModuleType) -> None:
    """A command's parser. Its name, help, description and examples are the docstring of its module."""
    title, _, text = (module.__doc__ or "").partition("\n\n")
    name, _, summary = title.removesuffix(".").partition("``: ")
    description, sign, examples = text.partition("\n\nexamples:\n")
    epilog = f"{(sign + examples).strip()}\n\n{exit_codes(getattr(module, 'EXIT_CODES', {}))}"
    texts: dict[str, Any] = {"help": summary, "description": description.rstrip(), "epilog": epilog}

    def add_options(parser: Parser) -> None:
        module.add_options(parser)
        plugins_option(parser)
        parser.option("--quiet", "no progress on stderr; results, warnings and errors stay", default=False)
        parser.set_defaults(run=module.run)

    commands.add_parser(name.split()[-1], add_options=add_options, **texts)


def exit_codes(own: Mapping[int, str]) -> str:
    """What a help says about exit codes: a line each, ``own`` beside those of all commands."""
    codes = sorted({**EXIT_CODES, **own}.items())
    return "\n".join(["exit codes:", *(f"  {code:<3}  {meaning}" for code, meaning in codes)])


def plugins_option(parser: Parser) -> None:
    """``--plugins``, which every command has. What it names is allowed as soon as it is read."""
    text = "packages whose classes files may name, as my_pkg.recency:Recency"
    parser.option("--plugins PACKAGE,…", text, type=_packages, default=[])


def _packages(text: str) -> list[str]:
    names = comma_list(text)
    try:
        plugins.allow(*names)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return names


def dataset_option(parser: Parser, **settings: Any) -> None:
    text = f"a data set below the data root, or the path of one (default: {DEFAULT}, generated at first use)"
    parser.option("--dataset NAME", text, **settings)


def data_root_option(parser: Parser) -> None:
    parser.option("--data-root DIR", "where data sets live (default: $CTR_PE_DATA, else ./data)", type=Path)


def model_option(parser: Parser) -> None:
    parser.option("--model DIR", "a model folder", type=Path, required=True)


def scoring_gpu_option(parser: Parser) -> None:
    parser.option("--gpu N", "GPU to score on, -1 for the CPU (default: -1)", type=int, default=-1)


def format_options(parser: Parser, default: str | None = "text") -> None:
    """``--format`` of tables, and ``--json``."""
    text = "print tables for a paper or a page: the best figures in bold, stars for p; all else goes to stderr"
    choices = ["text", "latex", "markdown", "csv", "html", "json"]
    parser.option("--format", text + f" (default: {default})" * bool(default), choices=choices, default=default)
    parser.add_argument("--json", action="store_const", dest="format", const="json", help="the same as --format json")


def executor_options(parser: Parser, at_once: str) -> None:
    """``--executor``, and ``--jobs``, of which ``at_once`` is the help."""
    text = "local, ray or ray://HOST:PORT (pip install 'ctr_pe[ray]'), slurm or slurm:KEY=VALUE,… (ctr_pe[slurm])"
    parser.option("--executor NAME", f"where runs are trained: {text} (default: local)", default="local")
    parser.option("--jobs N", at_once, type=count)


def published_option(parser: Parser) -> None:
    text = "published figures in columns of their own, metric by metric, and ours minus them"
    parser.option("--published", text)


def json_option(parser: Parser) -> None:
    """``--json`` of commands that print a summary."""
    parser.option("--json", "print the result as JSON", default=False)


def training_options(parser: Parser) -> None:
    """Options of the commands that train."""
    add = parser.option
    text = "threads of one run; another number may change the last digits (default: 1)"
    add("--threads N", text, type=count, default=1)
    track_option(parser)
    add("--gpu N", "GPU to train on, -1 for the CPU (default: -1)", type=int, default=-1)
    add("--amp", "mixed precision: attention in bfloat16", sets="amp=true")
    deterministic_option(parser)
    text = "in place of the packaged configuration: fuxictr has a constant learning rate and stops early"
    add("--recipe NAME", f"how to train, {text}; --set changes it")
    add("--set KEY=VALUE", "a hyper-parameter under FuxiCTR's name, such as learning_rate=1e-3", several=True)
    data_root_option(parser)


def overrides(args: argparse.Namespace) -> dict[str, Any]:
    """Hyper-parameters that ``--recipe`` and ``--set`` give."""
    from ctr_pe.config.yaml import parse_overrides, training_recipe

    return {**(training_recipe(args.recipe) if args.recipe else {}), **parse_overrides(args.set)}


def deterministic_option(parser: Parser) -> None:
    """``--deterministic``, of what trains; it comes before ``--set`` in ``set``."""
    text = "the same bits again from a GPU, or an error that names the operation which cannot give them"
    parser.option("--deterministic", text, sets="deterministic=true")


def track_option(parser: Parser) -> None:
    """``--track``, of what trains."""
    text = "tell tensorboard[:DIR], mlflow[:URI] or wandb[:PROJECT] about losses, metrics and speed"
    parser.option("--track NAME[:WHERE]", text)


def _new_path(text: str) -> Path:
    try:
        return check_new_path("it", Path(text))
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def comma_list(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"'{text}' is not a comma-separated list of names")
    return list(dict.fromkeys(names))


def class_name(text: str) -> str:
    """A model or an encoding, or a chain of these. A dotted name on the command line may be imported."""
    plugins.allow(*filter(plugins.is_dotted, text.split("+")))
    return text


def class_names(text: str) -> list[str]:
    """Several, comma-separated."""
    return [class_name(name) for name in comma_list(text)]


def number(text: str) -> int:
    if not re.fullmatch("[0-9]+", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 0")
    return int(text)


def count(text: str) -> int:
    if number(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)
