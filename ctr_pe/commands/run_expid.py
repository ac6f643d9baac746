"""The command of FuxiCTR's ``run_expid.py``, with ``--set``: one experiment of a FuxiCTR config."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ctr_pe.commands.options import Parser, class_name, deterministic_option, plugins_option, track_option
from ctr_pe.config.yaml import parse_overrides
from ctr_pe.fuxictr.experiment import append_result, load_params, run
from ctr_pe.utils.allocator import keep_memory
from ctr_pe.utils.errors import exit_code, say


def main(argv: Sequence[str] | None = None) -> int:
    """Train, evaluate, write the model's folder beside its checkpoint, and append a line to ``<config>.csv``; exit code
    2 for a user's mistake, in one line."""
    parser = Parser(description="Train and evaluate one experiment of a FuxiCTR config.", allow_abbrev=True)
    text = "directory with model_config and dataset_config (default: ./config if there is one, else what is installed)"
    parser.option("--config DIR", text)
    parser.option("--expid ID", "the experiment, a section of the model config", required=True)
    parser.option("--gpu N", "GPU to train on, -1 for the CPU (default: the config's, or -1)", type=int)
    parser.option("--set KEY=VALUE", "a parameter that replaces the config's", several=True)
    deterministic_option(parser)
    track_option(parser)
    plugins_option(parser)
    args = parser.parse_args(argv)
    keep_memory()

    def command() -> int:
        from ctr_pe.models.sections import unread
        from ctr_pe.serving.model_folder import keep_model
        from ctr_pe.utils import distributed

        with distributed.process_group():
            overrides = parse_overrides(args.set)
            for key in overrides.keys() & {"model", "position_encoding"}:
                for name in overrides[key] if isinstance(overrides[key], list) else [overrides[key]]:
                    class_name(str(name))
            params = load_params(args.config, args.expid, overrides)
            pe = params.get("position_encoding", "none")
            line = unread(params["model"], [pe] if isinstance(pe, str) else pe, params, overrides)
            if line and distributed.is_first():
                say(f"{args.expid}: {line}")
            if args.track is not None:
                params["track"] = args.track
            valid, test = run(params if args.gpu is None else {**params, "gpu": args.gpu}, keep_model)
            if distributed.is_first():
                line = " ".join(sys.argv if argv is None else ["run_expid.py", *argv])
                append_result(Path(args.config or "config"), line, params, valid, test)
        return 0

    return exit_code("run_expid", command)
