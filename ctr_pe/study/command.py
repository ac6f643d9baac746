"""The command that makes runs again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ctr_pe.config.yaml import model_params
from ctr_pe.study.store import Result


def benchmark_command(results: Collection[Result], *more: str, data_root: Path | None = None) -> str:
    """``ctr-pe benchmark`` for results that differ only in encoding and seed, with ``more`` options at the end."""
    first = next(iter(results))
    seeds = [result.seed for result in results]
    words = ["ctr-pe", "benchmark", "--model", first.model]
    words += ["--pe", ",".join(dict.fromkeys(result.pe for result in results))]
    words += ["--dataset", first.dataset, "--protocol", first.protocol]
    words += ["--seed", str(min(seeds))] * (min(seeds) > 0) + ["--repeats", str(max(seeds) - min(seeds) + 1)]
    words += ["--threads", str(first.threads)] * (first.threads != 1) + ["--gpu", str(first.gpu)] * (first.gpu >= 0)
    usual = model_params(first.model, first.dataset)
    for key, value in first.params.items():
        if key not in usual or as_text(usual[key]) != as_text(value):
            words += ["--set", f"{key}={as_text(value)}"]
    words += [] if data_root is None else ["--data-root", str(data_root)]
    return shlex.join([*words, *more])


def as_text(value: Any) -> str:
    """A value as ``--set KEY=VALUE`` takes it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
