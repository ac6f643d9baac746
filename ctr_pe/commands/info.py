"""``ctr-pe info``: versions, threads, compiler and kernels, for a report of a defect or of a time."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
from importlib.util import find_spec

from ctr_pe.commands.options import Commands


def add_parser(commands: Commands) -> None:
    text = "Versions, threads, C compiler and kernels in use."
    parser = commands.add_parser("info", help="versions, threads, compiler, kernels", description=text)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for name, value in facts().items():
        print(f"{name + ':':<14} {value}")
    return 0


def facts() -> dict[str, str]:
    """What results and times depend on, by name."""
    import torch

    from ctr_pe.study.runner import versions

    compiler = next((found for name in (os.environ.get("CC"), "cc", "gcc", "clang") if (found := _found(name))), "none")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        **versions(),
        "torch threads": str(torch.get_num_threads()),
        "cores": str(os.cpu_count()),
        "gpus": ", ".join(gpus) or "none",
        "C compiler": compiler,
        "kernels": _kernels(),
    }


def _found(program: str | None) -> str | None:
    return shutil.which(program) if program else None


def _kernels() -> str:
    """Which operators run compiled code, and which run in torch."""
    if find_spec("ctr_pe.ops") is None:
        compiled = importlib.import_module("ctr_pe.compiled")
        return "torch" if compiled.library() is None else "compiled"
    used: dict[str, str] = importlib.import_module("ctr_pe.ops").kernels()
    return ", ".join(f"{name}: {kernel}" for name, kernel in used.items())
