"""Measures how fast this package is against what others do, or against what the machine can do.

    python -m benchmark.speed.run --fuxictr-zoo PATH --json speed.json
    python -m benchmark.speed.run --quick --only step,loader

Each figure is a ratio of two things timed alternately in one run, the median over at least 7 repeats after warm-up,
with the distance of its quartiles. Each case runs in a process of its own. Ctrl-C keeps what is finished.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(
        Path(__file__).resolve().parents[2]
    )  # the checkout, whose packages benchmark and ctr_pe are measured

from benchmark.speed.cases import CASES, ON_GPU, TUNED, Case, Settings, measure
from ctr_pe.utils.errors import nearest
from ctr_pe.utils.files import replacing

ALLOCATOR = "MALLOC_"  # prefix of glibc's variables


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 if a case could not be measured, 130 after Ctrl-C. A goal that is not met is no error."""
    args = _parser().parse_args(argv)
    if args.into:
        return _child(args)
    for name in args.only or ():
        if not any(case.name.startswith(name) for case in CASES):
            close = nearest(name, [case.name for case in CASES])
            print(f"--only: no case begins with '{name}': {close} (--list shows all)", file=sys.stderr)
            return 2
    cases = select(args.only, args.models, args.quick)
    if not cases:
        print("no case is left of --only and --models (--list shows all)", file=sys.stderr)
        return 2
    results: list[dict[str, Any]] = []
    interrupted = False
    try:
        for _, group in groupby(cases, lambda case: case.together or case.name):
            some = list(group)
            label = some[0].name if len(some) == 1 else f"{some[0].name} and {len(some) - 1} more"
            print(f"[{len(results) + 1}/{len(cases)}] {label}", file=sys.stderr, flush=True)
            results += _in_a_process(some, args)
            for result in results[-len(some) :]:
                print(f"    {result['name']} {_summary(result)}", file=sys.stderr, flush=True)
            _write(args.json, results)
    except KeyboardInterrupt:
        interrupted = True
        print(f"stopped: {len(results)} of {len(cases)} cases are finished", file=sys.stderr)
    print(table(results))
    if interrupted:
        return 130
    return 1 if any("error" in result for result in results) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", type=_names, metavar="NAME,…", help="cases whose names begin with one of these")
    add("--models", type=_names, metavar="NAME,…", help="of the cases that have a model, those with one of these")
    add("--quick", action="store_true", help="small sizes, 3 repeats: does it run? Its figures are no results")
    add("--gpu", type=int, default=-1, metavar="N", help="the device of training steps; -1 for the CPU (default)")
    add(
        "--fuxictr-zoo",
        type=Path,
        metavar="PATH",
        help="a checkout of FuxiCTR, or its model_zoo: its models are the baseline then, else padded ones kept here",
    )
    add("--json", type=Path, metavar="FILE", help="write the results, after each case")
    add("--list", action=_List, nargs=0, help="names and goals of all cases")
    add("--into", type=Path, help=argparse.SUPPRESS)  # of a child: where its result goes
    return parser


class _List(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *ignored: Any) -> None:
        for case in CASES:
            print(f"{case.name:<32} {case.sense} {'its arithmetic' if case.goal is None else f'{case.goal:g}'}")
        parser.exit()


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def select(only: Sequence[str] | None, models: Sequence[str] | None, quick: bool) -> list[Case]:
    """The cases that were asked for, in the order of the registry."""
    return [
        case
        for case in CASES
        if (only is None or case.name.startswith(tuple(only)))
        and (models is None or case.options.get("model", models[0]) in models)
        and not (quick and case.slow)
    ]


def _in_a_process(cases: Sequence[Case], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Results, measured by a child, so that neither memory nor the allocator's state is passed on."""
    names = ",".join(case.name for case in cases)
    with tempfile.TemporaryDirectory(prefix="ctr-pe-speed-") as folder:
        into, noise = Path(folder, "result.json"), Path(folder, "stderr")
        command = [sys.executable, __file__, "--only", names, "--into", str(into), "--gpu", str(args.gpu)]
        command += ["--quick"] if args.quick else []
        command += ["--fuxictr-zoo", str(args.fuxictr_zoo.resolve())] if args.fuxictr_zoo else []
        with noise.open("w") as stderr:  # warnings and progress bars of others
            child = subprocess.Popen(
                command, env=environment(cases[0], folder), stdout=sys.stderr, stderr=stderr, start_new_session=True
            )
            try:
                child.wait()
            finally:
                _end(child)
        if into.exists():
            found: list[dict[str, Any]] = json.loads(into.read_text(encoding="utf-8"))
            return found
        lines = noise.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        error = lines[-1] if lines else f"exit code {child.returncode}"
        return [{"name": case.name, "error": error, "ok": False} for case in cases]


def environment(case: Case, folder: str) -> dict[str, str]:
    """Of a child: the allocator as the case wants it, whatever this process has; files in ``folder``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ALLOCATOR)}
    return kept | (TUNED if case.allocator == "tuned" else {}) | {"TMPDIR": folder}


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child and its own children."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=10)
            if how == signal.SIGTERM and child.returncode >= 0:
                return


def _child(args: argparse.Namespace) -> int:
    cases = [case for case in CASES if case.name in args.only]
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(args.quick, Path(folder), args.gpu, args.fuxictr_zoo)
        results = [
            as_result(case, figure, settings) for case, figure in zip(cases, measure(cases, settings), strict=True)
        ]
        args.into.write_text(json.dumps(results), encoding="utf-8")
    return 0


def as_result(case: Case, figure: Any, settings: Settings) -> dict[str, Any]:
    """What the JSON file has of a case.

    ``ratio``: the median; where the goal is no ratio, the figure itself, in ``unit``. ``spread``: the distance of the
    quartiles. ``ok``: ratio is ``sense`` (≥ or ≤) goal. ``ours``, ``baseline``: medians of the two, in ``of``.
    """
    goal = ON_GPU.get(case.name, case.goal) if settings.gpu >= 0 else case.goal
    goal = figure.goal if goal is None else goal
    low, high = figure.quartiles
    return {
        "name": case.name,
        "ratio": figure.median,
        "spread": high - low,
        "goal": goal,
        "ok": case.met(figure.median, goal),
        "sense": case.sense,
        "unit": figure.unit,
        "quartiles": [low, high],
        "repeats": len(figure.values),
        "ours": figure.ours,
        "baseline": figure.baseline,
        "of": figure.of,
        "against": figure.against,
        "quick": settings.quick,
        "details": dict(figure.details),
        "machine": machine(case.allocator, settings.gpu),
    }


def machine(allocator: str, gpu: int) -> dict[str, Any]:
    """What the figures depend on."""
    import torch

    from ctr_pe.ops import native
    from ctr_pe.study.runner import revision
    from ctr_pe.utils import devices

    return {
        "cpu": devices.name_of(torch.device("cpu")),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpu": torch.cuda.get_device_name(gpu) if gpu >= 0 else None,
        "allocator": allocator,
        "compiled": native.LIBRARY is not None,
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "fuxictr", "numpy", "polars", "ray")},
        "revision": revision(),
    }


def _write(file: Path | None, results: Sequence[Mapping[str, Any]]) -> None:
    if file is not None:
        with replacing(file) as partial:
            partial.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


HEAD = ("name", "ours", "baseline", "ratio", "spread", "goal", "ok", "against")


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The results as text, and what they were measured on."""
    rows = [HEAD, *map(_row, results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *_notes(results)])


def _row(result: Mapping[str, Any]) -> tuple[str, ...]:
    if "error" in result:
        return (result["name"], "", "", "failed", "", "", "no", result["error"])
    unit = result["unit"]
    figure, goal = _number(result["ratio"], unit), f"{result['sense']} {_number(result['goal'], unit)}"
    sides = [_number(result[side], result["of"]) for side in ("ours", "baseline")]
    ok = "yes" if result["ok"] else "no"
    return (result["name"], *sides, figure, _number(result["spread"], ""), goal, ok, result["against"])


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return number + (unit if unit in ("", "×") else f" {unit}")


def _summary(result: Mapping[str, Any]) -> str:
    return " ".join(cell for cell in _row(result)[3:7] if cell)


def _notes(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for result in results:
        if "machine" in result:
            on = result["machine"]
            device = f", {on['gpu']}" if on["gpu"] else ""
            yield f"{on['cpu']}, {on['cores']} cores, {on['threads']} threads{device}; torch {on['torch']}"
            break
    if any(result.get("quick") for result in results):
        yield "--quick: small sizes and few repeats, no results"


if __name__ == "__main__":
    sys.exit(main())
