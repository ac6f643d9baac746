"""What :mod:`benchmark.peers` and a worker say to each other: a line of JSON for every line.

Interpreters of other environments import it: it needs torch alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Call = Callable[[], Mapping[str, float]]


def serve(prepare: Callable[[dict[str, Any]], tuple[Mapping[str, Any], Mapping[str, Call]]]) -> None:
    """Prepare by the settings that are the first argument, and answer with the versions that ``prepare`` gives; then
    make each call that a line of the input names, and answer with its figures and its seconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    versions, calls = prepare(json.loads(sys.argv[1]))
    print(json.dumps(versions), file=answers, flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        figures = calls[line.strip()]()
        print(json.dumps({"seconds": time.perf_counter() - start, **figures}), file=answers, flush=True)


def start_torch(threads: int) -> None:
    """Set its threads, and make a step, at the first of which it imports much."""
    torch.set_num_threads(threads)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([weight])
    optimizer.zero_grad()
    weight.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
