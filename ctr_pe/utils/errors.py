"""Errors that a user can fix: one line that names the file, the key or column, and the nearest valid choice."""

from __future__ import annotations

import difflib
import reprlib
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

OWN = "ctr-pe-"
"""What the names of this package's temporary files and folders begin with."""


_COMMAND_LINE = ContextVar("command line", default=False)
_QUIET = ContextVar("quiet", default=False)


class UserError(ValueError):
    """A mistake in a command, a config or a data file. The command line prints its one line and exits with code 2."""


class Diverged(UserError):
    """Divergence, or a non-finite number, in training: where, and what went wrong."""


def shown(value: object) -> str:
    """A value as an error line quotes it: short, however large it is, and on one line."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = brief.maxlong = 40
    brief.maxlist = brief.maxtuple = brief.maxdict = 4
    brief.maxlevel = 2
    text = brief.repr(value)
    return text if len(text) <= 60 else f"{text[:58]} …"


def quoted(name: object) -> str:
    """A name in an error line, between quotes: short, however long it is."""
    text = str(name)
    return f"'{text}'" if len(text) <= 60 else f"'{text[:58]} …'"


def one_line(text: str) -> str:
    """On one line, whatever a library's message or a user's name holds."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def nearest(name: object, choices: Iterable[object]) -> str:
    """The end of an error line: the closest of ``choices`` to ``name``, and all of them when that is short; of many
    that are not close, the three that are least far."""
    names = sorted(str(choice) for choice in choices)
    written = {choice.lower(): choice for choice in names}

    def closest(count: int, cutoff: float) -> list[str]:
        return [written[one] for one in difflib.get_close_matches(str(name)[:100].lower(), written, count, cutoff)]

    hint = "".join(f"did you mean '{one}'? " for one in closest(1, 0.5))
    listed = ", ".join(names)
    if len(listed) <= 80:
        return f"{hint}({listed})"
    return hint.rstrip() or f"({len(names)} choices, such as {', '.join(map(quoted, closest(3, 0.0)))})"


def no_such_file(file: Path) -> UserError:
    """The error for a missing file, with the nearest name in its directory."""
    name = str(file)
    if len(name) > 250:
        return UserError(f"{name[:60]} …: no such file: a name of {len(name):,} characters")
    beside = [path.name for path in file.parent.iterdir()] if file.parent.is_dir() else []
    beside = [one for one in beside if not one.startswith(OWN)]
    return UserError(f"{file}: no such file" + (f"; {nearest(file.name, beside)}" if beside else ""))


def explain(problem: Mapping[str, Any], *models: Any) -> str:
    """One of pydantic's errors in one line; ``models``: those whose fields an unknown key is compared with."""
    parts = [str(part) for part in problem["loc"]]
    key = ".".join(parts)
    if problem["type"] == "extra_forbidden":
        known = next((model.model_fields for model in models[::-1] if len(parts) > 1), models[0].model_fields)
        return f"key '{key}' is unknown: {nearest(parts[-1], known)}"
    if problem["type"] == "missing":
        return f"'{key}' is missing"
    message = problem["msg"].removeprefix("Value error, ")
    given = "" if isinstance(problem["input"], (dict, list)) else f" (given: {shown(problem['input'])})"
    return f"'{key}': {message[0].lower()}{message[1:]}{given}" if key else message


def short(message: str) -> str:
    """One of pydantic's messages, to follow a colon."""
    return f"{message[0].lower()}{message[1:]}".removeprefix("input should be ")


def reason(error: BaseException) -> str:
    """The first line of an error's text, as the system or a library says it."""
    text = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
    return text if len(text) <= 100 else f"{text[:99]}…"


def say(line: str) -> None:
    """Print a line on stderr: a warning, or what a user has to know."""
    print(line, file=sys.stderr, flush=True)


def progress(line: str) -> None:
    """Print a line of progress on stderr, unless the command was given ``--quiet``."""
    if not quiet():
        say(line)


def quiet() -> bool:
    """Whether progress is not shown: bars and lines that say how far a command is."""
    return _QUIET.get()


def be_quiet(value: bool) -> None:
    """Show no progress from now on, or again."""
    _QUIET.set(value)


def option(name: str, *value: object) -> str:
    """An option in the caller's language: ``--time-unit ms`` after a command, ``time_unit='ms'`` in Python.

    ``name``: of the Python argument; ``value``: the one to set, if the message names one.
    """
    if _COMMAND_LINE.get():
        written = ["none" if one is None else shlex.quote(str(one)) for one in value if one is not True]
        return " ".join(["--" + name.replace("_", "-"), *written])
    return name + "=" + "".join(map(repr, value))


def hyper_parameter(name: str, value: object) -> str:
    """A hyper-parameter in the caller's language: ``--set monitor=AUC`` for a command, ``monitor='AUC'`` in Python."""
    return option("set", f"{name}={value}") if _COMMAND_LINE.get() else option(name, value)


def counted(number: int, what: str) -> str:
    """1 seed, 2 seeds."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def exit_code(program: str, command: Callable[[], int]) -> int:
    """Run a command: its exit code, 2 after a UserError, whose line goes to stderr and names options as flags, and 130
    after Ctrl-C."""
    before = _COMMAND_LINE.set(True)
    try:
        return command()
    except UserError as error:
        say(one_line(f"{program}: error: {error}"))
        return 2
    except KeyboardInterrupt:
        say(f"{program}: interrupted")
        return 130
    finally:
        _COMMAND_LINE.reset(before)
