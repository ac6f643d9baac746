"""The command of FuxiCTR's ``run_expid.py``, with ``--set``: one experiment of a FuxiCTR config."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ctr_pe.allocator import keep_memory
from ctr_pe.config import parse_overrides
from ctr_pe.errors import exit_code
from ctr_pe.experiment import append_result, load_params, run


def main(argv: Sequence[str] | None = None) -> int:
    """Train, evaluate, write the model's folder beside its checkpoint, and append a line to ``<config>.csv``; exit code
    2 for a user's mistake, in one line."""
    parser = argparse.ArgumentParser(description="Train and evaluate one experiment of a FuxiCTR config.")
    parser.add_argument("--config", default=None, help="directory with model_config and dataset_config (default: "
                        "./config if there is one, else what is installed)")  # fmt: skip
    parser.add_argument("--expid", required=True, help="the experiment, a section of the model config")
    parser.add_argument("--gpu", type=int, help="GPU to train on, -1 for the CPU (default: the config's, or -1)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="a parameter that replaces the config's; may be given several times")  # fmt: skip
    args = parser.parse_args(argv)
    keep_memory()

    def command() -> int:
        params = load_params(args.config, args.expid, parse_overrides(args.set))
        from ctr_pe.pipeline.folder import keep_model

        valid, test = run(params if args.gpu is None else {**params, "gpu": args.gpu}, keep_model)
        line = " ".join(sys.argv if argv is None else ["run_expid.py", *argv])
        append_result(Path(args.config or "config"), line, params, valid, test)
        return 0

    return exit_code("run_expid", command)
