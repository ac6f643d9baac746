"""``ctr-pe export``: a trained model as one file for other runtimes.

Write a trained model to one file that takes raw ids, because the vocabulary is in it: ONNX, a torch.export program, or
a package compiled ahead of time, which Triton Inference Server and C++ load. Any number of requests, history items and
candidates; of a next-item model the file finds the first K items itself. It is written only if its scores on random
requests are those of the model.

examples:
  ctr-pe export --model model --format onnx --output model.onnx       (pip install 'ctr_pe[export]')
  ctr-pe export --model next --format onnx --output next.onnx --k 100 --filter-seen
  ctr-pe export --model model --format aoti --output model.pt2        (needs a C++ compiler)
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ctr_pe.commands.options import Parser, count, model_option

FORMATS = ("onnx", "torch", "aoti")


def add_options(parser: Parser) -> None:
    add = parser.option
    model_option(parser)
    add("--format", "onnx; torch, a torch.export program; aoti, a compiled package", choices=FORMATS, required=True)
    add("--output FILE", "the file; an earlier one of this name is replaced", type=Path, required=True)
    add("--k N", "of a next-item model: items that it finds (default: 10)", type=count)
    text = "of a next-item model: leave out the items of the history (default: as the model's filter_seen says)"
    add("--filter-seen", text, action=argparse.BooleanOptionalAction)


def run(args: argparse.Namespace) -> int:
    from ctr_pe.serving.export import export

    export(args.model, args.format, args.output, args.k, args.filter_seen)
    print(f"{args.output}: {args.format}, scores as the model's on random requests")
    return 0
