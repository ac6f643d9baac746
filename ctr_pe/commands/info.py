"""``ctr-pe info``: versions, threads, compiler, kernels.

Versions, threads, C compiler and kernels in use.

examples:
  ctr-pe info
"""

from __future__ import annotations

import argparse
import os
import shutil

from ctr_pe.commands.options import Parser, json_option


def add_options(parser: Parser) -> None:
    json_option(parser)


def run(args: argparse.Namespace) -> int:
    import torch

    from ctr_pe import ops
    from ctr_pe.ops import accelerator, native
    from ctr_pe.study.runner import versions
    from ctr_pe.utils.files import json_text

    compilers = filter(None, map(shutil.which, [os.environ.get("CC") or "cc", "cc", "gcc", "clang"]))
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    facts = {
        **versions(),
        "torch threads": str(torch.get_num_threads()),
        "cores": str(os.cpu_count()),
        "gpus": ", ".join(gpus) or "none",
        "C compiler": next(compilers, "none"),
        "kernels from": native.compiler() or "none compiled",
        **{f"  {name}": kernel for name, kernel in ops.kernels().items()},
        "kernels on a GPU": accelerator.description(),
    }
    if args.json:
        print(json_text({name.strip(): value for name, value in facts.items()}), end="")
        return 0
    for name, value in facts.items():
        print(f"{name + ':':<23} {value}")
    return 0
