"""What Triton's kernels gain on a GPU: whole training steps with them against the same steps without.

Forward, loss, backward, clipping and optimiser, timed alternately; medians over the repeats, with the distance of the
quartiles. A block of the kernels has --tile queries and keys.

example:
  python -m benchmark.kernels --gpu 0 --model SASRec,DIN --pe cape,cope --tile 16,32
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from benchmark.speed import data, models
from benchmark.speed.timing import alternate
from ctr_pe.ops import accelerator
from ctr_pe.utils.errors import UserError, exit_code

COLUMNS = ("model", "encoding", "tile", "Triton, s", "torch, s", "torch/Triton", "spread")


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return exit_code("kernels.py", lambda: _run(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gpu", type=int, default=-1, metavar="N", help="the device; -1 for Triton's interpreter on the CPU (default)")
    add("--model", type=_names, default=["SASRec", "BST", "DIN"], metavar="NAME,…")
    add("--pe", type=_names, default=["cape", "cope"], metavar="NAME,…", help="encodings with contextual positions")
    add("--tile", type=_names, default=["16"], metavar="N,…", help="powers of 2, at least 16")
    add("--full", action="store_true", help="histories of 100 items, instead of 9 on average")
    add("--batch-size", type=int, default=1024, metavar="N")
    add("--repeats", type=int, default=31, metavar="N")
    return parser


def _names(text: str) -> list[str]:
    return text.split(",")


def _run(args: argparse.Namespace) -> int:
    device = torch.device("cpu" if args.gpu < 0 else f"cuda:{args.gpu}")
    if not accelerator.runs_on(device) or args.gpu >= torch.cuda.device_count():
        raise UserError(f"--gpu {args.gpu}: no device of Triton's here (its interpreter: --gpu -1, TRITON_INTERPRET=1)")
    print(*(f"{column:<12}" for column in COLUMNS))
    for name in args.model:
        for pe in args.pe:
            step = _steps(args, name, pe)
            for tile in args.tile:
                with mock.patch.multiple(accelerator, QUERIES=int(tile), KEYS=int(tile)):
                    wait = models.wait(args.gpu)
                    figure = alternate(step, _in_torch(step), args.repeats, warm_up=4, wait=wait).speedup("torch")
                low, high = figure.quartiles
                numbers = (figure.ours, figure.baseline, figure.median, high - low)
                line = name, pe, tile, *(f"{number:.3g}" for number in numbers)
                print(*(f"{cell:<12}" for cell in line), flush=True)
    return 0


def _steps(args: argparse.Namespace, name: str, pe: str) -> Callable[[int], object]:
    """A training step on the batch of a number, or several on a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        rows = data.draw(4 * args.batch_size, args.full)
        dataset = data.write(Path(folder, "amazon"), rows, ages=models.needs_age(pe))
        model = models.ours(name, dataset, args.gpu, pe=pe)
        pairs = data.batches(dataset, model.feature_map, args.batch_size, 4)
        return models.steps(model, [ours for ours, _ in pairs])


def _in_torch(step: Callable[[int], object]) -> Callable[[int], object]:
    def without(number: int) -> object:
        with mock.patch.object(accelerator, "USABLE", False):
            return step(number)

    return without


if __name__ == "__main__":
    sys.exit(main())
