"""``ctr-pe completion``: completion of commands, options and names in bash, zsh or fish.

Print a script that makes a shell complete commands, options and their values: encodings, models, suites, data sets
below $CTR_PE_DATA or ./data, files (pip install 'ctr_pe[complete]'). The script asks this command at each tab. Once per
shell:

  bash   ctr-pe completion bash > ~/.local/share/bash-completion/completions/ctr-pe
  zsh    ctr-pe completion zsh > "${fpath[1]}/_ctr-pe"
  fish   ctr-pe completion fish > ~/.config/fish/completions/ctr-pe.fish

examples:
  ctr-pe completion bash > ~/.local/share/bash-completion/completions/ctr-pe
  source <(ctr-pe completion bash)
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from ctr_pe.commands.options import Parser, class_names, comma_list
from ctr_pe.utils.errors import UserError

SHELLS = ("bash", "zsh", "fish")


def add_options(parser: Parser) -> None:
    parser.option("shell SHELL", f"{', '.join(SHELLS)}", choices=list(SHELLS))


def run(args: argparse.Namespace) -> int:
    try:
        from argcomplete.shell_integration import shellcode
    except ImportError:
        raise UserError("completion needs argcomplete: pip install 'ctr_pe[complete]'") from None
    print(shellcode(["ctr-pe"], True, args.shell))
    return 0


def answer(parser: Parser) -> None:
    """Answer a shell that asks what may follow, and end this process; nothing where none asks."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        add_completers(parser)
        argcomplete.autocomplete(parser, always_complete_options=False)


def add_completers(parser: Parser, path: tuple[str, ...] = ()) -> None:
    """Say of each option of a parser, and of the commands below it, what its values are; those without are paths."""
    for action in parser.filled()._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                add_completers(command, (*path, name))
        elif not action.choices and not _is_path(action):
            action.completer = _completer(action, path)  # type: ignore[attr-defined]  # which argcomplete reads


def _is_path(action: argparse.Action) -> bool:
    return action.type is Path or action.metavar in ("DIR", "FILE")


def _completer(action: argparse.Action, path: tuple[str, ...]) -> Callable[..., list[str]]:
    several = action.type in (comma_list, class_names)

    def values(prefix: str, **_: object) -> list[str]:
        before = prefix[: prefix.rfind(",") + 1] if several else ""
        return [before + name for name in _names_of(action, path)]

    return values


def _names_of(action: argparse.Action, path: tuple[str, ...]) -> list[str]:
    """What the package knows that an option may name."""
    from ctr_pe.config.yaml import packaged_yaml
    from ctr_pe.data.published.sets import SETS
    from ctr_pe.data.root import list_datasets
    from ctr_pe.data.synthetic.built_in import BUILT_IN
    from ctr_pe.model_zoo import MODELS
    from ctr_pe.model_zoo.next_item import NEXT_ITEM_MODELS
    from ctr_pe.pe import REGISTRY

    suites = packaged_yaml("benchmark")
    name = action.option_strings[0] if action.option_strings else " ".join([*path, action.dest])
    known: dict[str, Iterable[str]] = {
        "--pe": REGISTRY,
        "draw pe": REGISTRY,
        "--model": {**MODELS, **NEXT_ITEM_MODELS},
        "--row": MODELS,
        "--dataset": dict.fromkeys([*BUILT_IN, *(name for name, _ in list_datasets())]),
        "data convert dataset": BUILT_IN,
        "--suite": suites,
        "reproduce name": [suite.replace("_", "-") for suite in suites],
        "data fetch name": SETS,
        "--recipe": packaged_yaml("recipe" if path[:1] == ("data",) else "training"),
    }
    return list(known.get(name, ()))
