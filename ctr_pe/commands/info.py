"""``ctr-pe info``: versions, threads, compiler and kernels, for a report of a defect or of a time."""

from __future__ import annotations

import argparse
import os
import shutil

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
    """Versions and hardware that results and times depend on."""
    import torch

    from ctr_pe import ops
    from ctr_pe.study.runner import versions

    compilers = filter(None, map(shutil.which, [os.environ.get("CC") or "cc", "cc", "gcc", "clang"]))
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        **versions(),
        "torch threads": str(torch.get_num_threads()),
        "cores": str(os.cpu_count()),
        "gpus": ", ".join(gpus) or "none",
        "C compiler": next(compilers, "none"),
        "kernels": ", ".join(f"{name}: {kernel}" for name, kernel in ops.kernels().items()),
    }
