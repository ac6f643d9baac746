"""Five seeds of one configuration: as one `ctr-pe benchmark` against five, one after another."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from benchmark.speed.cases import Settings
from benchmark.speed.timing import Figure, alternate, say
from ctr_pe.data.synthetic.bursts import generate


def five(settings: Settings) -> Figure:
    """Seconds of one command with five seeds over five commands with one seed each, all with their start-up.

    Both have the command's own number of threads per run.
    """
    users, seeds = settings.size(2000, 100), settings.size(5, 2)
    generate(settings.folder / "synthetic", users=users, valid_users=users // 4, test_users=users // 4)
    say(f"DIN on {users:,} synthetic users, {seeds} seeds")

    def together(_: int) -> None:
        _benchmark(settings, 0, seeds)

    def apart(_: int) -> None:
        for seed in range(seeds):
            _benchmark(settings, seed, 1)

    timed = alternate(together, apart, settings.repeats, warm_up=0)  # each is a process of its own
    return timed.overhead(f"{seeds} processes, one after another", users=users, seeds=seeds)


def _benchmark(settings: Settings, seed: int, repeats: int) -> None:
    out = settings.folder / "results"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "ctr_pe.cli", "benchmark", "--model", "DIN", "--pe", "none", "--set", "epochs=2"]
    command += ["--dataset", str(settings.folder / "synthetic"), "--out", str(out)]
    command += ["--seed", str(seed), "--repeats", str(repeats), "--gpu", str(settings.gpu)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if len(Path(out, "results.jsonl").read_text(encoding="utf-8").splitlines()) != repeats:
        raise ValueError(f"{out}: not {repeats} results")
