"""Our next-item SASRec beside those of RecTools and RecBole: seconds, memory, Recall@10 and NDCG@10.

    python -m benchmark.peers --data DIR --rectools PYTHON --recbole PYTHON --json peers.json
    python -m benchmark.peers --json peers.json    # the table alone

DIR has interactions.parquet and items.parquet of amazon_beauty; PYTHON is the interpreter of an environment that has
the peer, and needs nothing of this package. Each peer stands beside a SASRec of ours with its hyper-parameters, on the
same log, split, width and threads, the loss a softmax over all items. In a round both train in turn, an epoch here and
an epoch there, the order changing, and are evaluated after each, on all test users against all items. A round is of one
seed; those after the first ``--peer-seeds`` are of ours alone, and say how much a seed moves the metrics. An evaluation
takes seconds, which other programs lengthen: models of one epoch are evaluated ``--evaluations`` times more, in turn.

The environments, of Python 3.11:

    pip install torch==2.13.0 'numpy<2' 'pandas<2.4' 'rectools[torch]==0.19.0'
    pip install torch==2.13.0 'numpy<2' 'pandas<2.4' 'scipy<1.14' colorama==0.4.4 colorlog==4.7.2 plotly psutil \\
        pyyaml scikit-learn setuptools tabulate tensorboard texttable thop tqdm
    pip install --no-deps recbole==1.2.1    # it asks for an old Ray, which is not used here

Calling again goes on with what FILE has not; Ctrl-C keeps the epochs that are finished.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from scipy import stats

from benchmark.speed import memory
from ctr_pe.data.logs.log import build
from ctr_pe.data.logs.recipe import load_recipe
from ctr_pe.study.rendering import Table, as_markdown, number
from ctr_pe.utils.devices import name_of
from ctr_pe.utils.errors import UserError, counted, exit_code, no_such_file, reason, say
from ctr_pe.utils.files import replacing, scratch_folder

CHECKOUT = Path(__file__).resolve().parents[1]
RESULTS = CHECKOUT / "benchmark" / "results" / "peers.json"
RECIPE = "amazon_beauty_next"
COMMON = {"threads": 2, "width": 64, "blocks": 2, "heads": 2, "length": 50, "learning_rate": 1e-3}
BATCH = 128
"""Training rows of a batch: histories, each of whose items but the first is an answer."""
SIDES, METRICS = ("ours", "theirs"), ("Recall@10", "NDCG@10")


class Peer(NamedTuple):
    """``settings``: hyper-parameters of its SASRec and ours, as far as it can be told; ``ours``: keys that make ours
    alike. ``single_answers``: a training row of it has one answer."""

    title: str
    settings: Mapping[str, Any]
    ours: Mapping[str, Any]
    single_answers: bool = False


PEERS = {
    "rectools": Peer(
        "RecTools",
        {"ffn_dim": 64, "dropout": 0.2},
        {"layer_norm": "pre", "input_norm": False, "ffn_activation": "ReLU"},
    ),
    "recbole": Peer("RecBole", {"ffn_dim": 256, "dropout": 0.5}, {"linear_init": 0.02}, single_answers=True),
}


class Goal(NamedTuple):
    """``least``: theirs over ours; ``unit``: and what one of it is."""

    title: str
    unit: tuple[str, float]
    least: float


GOALS = {
    "epoch": Goal("training, an epoch", ("s", 1.0), 8.0),
    "evaluate": Goal("evaluation", ("s", 1.0), 10.0),
    "memory": Goal("peak memory", ("MB", 1e6), 1.0),
}
"""Metrics have another: a difference within what seeds move them by."""
MET = {True: "yes", False: "no", None: None}
Epoch = dict[str, dict[str, float]]
"""Of ``ours`` and ``theirs``: seconds of ``epoch`` and ``evaluate``, bytes of ``memory`` so far, and metrics."""


class Side(NamedTuple):
    """``command`` of a worker (:mod:`benchmark.peer_workers.answers`), which gets ``settings`` as last argument."""

    command: Sequence[str]
    settings: Mapping[str, Any]


class Worker:
    """The process of a side, which trains one model.

    Raises UserError, from every call, if it has ended.
    """

    def __init__(self, side: Side, **more: Any) -> None:
        given = {**side.settings, **more}
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS"), str(given["threads"]))
        environment = {**os.environ, **threads, "PYTHONPATH": str(CHECKOUT)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        try:
            self.process = subprocess.Popen(
                [*side.command, json.dumps(given)], env=environment, cwd=more["folder"], **pipes
            )
        except OSError as error:
            raise UserError(f"{side.command[0]}: {reason(error)}") from None
        self.name = " ".join(side.command)

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise UserError(f"{self.name}: has ended with code {self.process.wait()}, see above")
        found: dict[str, Any] = json.loads(line)
        return found

    def call(self, name: str) -> dict[str, float]:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the answer says it
            print(name, file=self.process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def epochs_of(workers: Mapping[str, Worker], count: int) -> Iterator[Epoch]:
    """Train and evaluate in turn, the order changing from epoch to epoch."""
    for number_ in range(count):
        order = [*workers] if number_ % 2 == 0 else [*workers][::-1]
        found = {side: {"epoch": workers[side].call("epoch")["seconds"]} for side in order}
        for side in order:
            metrics = workers[side].call("evaluate")
            found[side] |= {"evaluate": metrics.pop("seconds"), **metrics}
            found[side]["memory"] = memory.status("VmHWM", workers[side].process.pid)
        yield {side: found[side] for side in workers}


def measure(
    found: dict[str, Any], sides: Mapping[str, Side], folder: Path, seeds: Sequence[Sequence[str]], epochs: int,
    save: Callable[[], None],
) -> None:  # fmt: skip
    """Measure what ``found`` has not of one pair, and ``save`` after each epoch.

    ``seeds``: of each, the sides that train. A round that is begun again takes the place of an earlier one once it has
    more epochs. Raises UserError as :class:`Worker`, or if ``found`` is of other settings.
    """
    settings = {name: dict(side.settings) for name, side in sides.items()}
    if found.setdefault("settings", settings) != settings:
        raise UserError("the file has results of other settings: name another one")
    versions, rounds = found.setdefault("versions", {}), found.setdefault("rounds", {})
    for seed, names in enumerate(seeds):
        earlier: list[Epoch] = rounds.get(str(seed), [])
        have = min(sum(name in epoch for epoch in earlier) for name in names)
        if have >= epochs:
            continue
        with ExitStack() as stack:
            workers = {}
            for name in names:
                workers[name] = Worker(sides[name], seed=seed, folder=str(folder))
                stack.callback(workers[name].close)
                versions[name] = workers[name].answer()
            done: list[Epoch] = []
            for epoch in epochs_of(workers, epochs):
                done.append(epoch)
                say(f"seed {seed}, epoch {len(done)} of {epochs}: {_words(epoch)}")
                if len(done) > have:
                    rounds[str(seed)] = done
                    save()


def evaluate(
    found: dict[str, Any], sides: Mapping[str, Side], folder: Path, count: int, save: Callable[[], None]
) -> None:
    """Evaluate the models of one pair in turn, ``count`` times if ``found`` has fewer, and ``save`` in the end.

    Each has trained for an epoch. Raises UserError as :class:`Worker`.
    """
    if len(found.get("evaluations", ())) >= count:
        return
    with ExitStack() as stack:
        workers = {name: Worker(side, seed=0, folder=str(folder)) for name, side in sides.items()}
        for worker in workers.values():
            stack.callback(worker.close)
            worker.answer()
            worker.call("epoch")
        evaluations = []
        for number_ in range(count):
            order = [*workers] if number_ % 2 == 0 else [*workers][::-1]
            seconds = {side: workers[side].call("evaluate")["seconds"] for side in order}
            evaluations.append({side: seconds[side] for side in SIDES})
            say(f"evaluation {number_ + 1} of {count}: ours {seconds['ours']:.3g} s, theirs {seconds['theirs']:.3g} s")
    found["evaluations"] = evaluations
    save()


def _words(epoch: Epoch) -> str:
    parts = "{} {:.3g} s, evaluation {:.3g} s, NDCG@10 {:.4f}"
    return "; ".join(parts.format(name, of["epoch"], of["evaluate"], of["NDCG@10"]) for name, of in epoch.items())


def compared(found: Mapping[str, Any], peer: Peer) -> tuple[int, list[dict[str, Any]]]:
    """Of one pair: epochs after which metrics are compared, and a line for each figure.

    Those of time and memory are medians over the epochs that both sides have trained in turn, or over the evaluations
    in turn if there are more, their ratios medians of the epochs' or evaluations' own; of a metric the difference of
    means over seeds, theirs from ours, with a 95 % interval by Student's t for newly trained runs; NaN, and the goal
    neither met nor missed, where no side has two.
    """
    rounds: list[list[Epoch]] = [*found["rounds"].values()]
    both = [epoch for one in rounds for epoch in one if len(epoch) == 2]
    lines = []
    for name, goal in GOALS.items():
        pairs = [{side: epoch[side][name] for side in SIDES} for epoch in both]
        if name == "evaluate":
            pairs = max(pairs, found.get("evaluations", []), key=len)
        ours, theirs = ([pair[side] for pair in pairs] for side in SIDES)
        ratio = statistics.median(other / own for own, other in zip(ours, theirs, strict=True))
        line = {"figure": name, "ours": statistics.median(ours), "theirs": statistics.median(theirs)}
        lines.append({**line, "ratio": ratio, "goal": goal.least, "ok": ratio >= goal.least})
    last = min(map(len, rounds))
    for name in METRICS:
        ours, theirs = ([one[last - 1][side][name] for one in rounds if side in one[last - 1]] for side in SIDES)
        difference, half = statistics.fmean(ours) - statistics.fmean(theirs), _half(ours, theirs)
        line = {"figure": name, "ours": statistics.fmean(ours), "theirs": statistics.fmean(theirs)}
        ends = {"difference": difference, "low": difference - half, "high": difference + half}
        lines.append({**line, **ends, "ok": None if math.isnan(half) else abs(difference) <= half})
    return last, [{"peer": peer.title, **line} for line in lines]


def _half(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Half of the interval of a difference of means, the variance common to both."""
    free = len(ours) + len(theirs) - 2
    if free < 1:
        return math.nan
    squares = sum((value - statistics.fmean(of)) ** 2 for of in (ours, theirs) for value in of)
    return float(stats.t.ppf(0.975, free)) * math.sqrt(squares / free * (1 / len(ours) + 1 / len(theirs)))


def tables(content: Mapping[str, Any]) -> list[Table]:
    """One, with a row for each figure of each peer."""
    lines, notes = list[dict[str, Any]](), list[str]()
    for name, found in content["pairs"].items():
        epochs, of_peer = compared(found, PEERS[name])
        lines += of_peer
        seeds = {side: sum(side in one[0] for one in found["rounds"].values()) for side in SIDES}
        versions = ", ".join(f"{package} {of}" for package, of in found["versions"]["theirs"].items())
        trained = f"{seeds['theirs']} of {PEERS[name].title} ({versions}) and {seeds['ours']} of ours"
        notes.append(f"Metrics after {counted(epochs, 'epoch')}; seeds: {trained}.")
    machine = content["machine"]
    notes.append(f"{machine['cpu']}, {machine['threads']} threads of {machine['cores']} cores.")
    return [Table("Beside RecTools and RecBole", lines, [*map(_cells, lines)], notes)]


def _cells(line: Mapping[str, Any]) -> dict[str, str | None]:
    name = line["figure"]
    if name in GOALS:
        unit, of = GOALS[name].unit
        sides = {side: f"{float(f'{line[side] / of:.3g}'):,g} {unit}" for side in SIDES}
        more = {"theirs / ours": f"{line['ratio']:.1f}", "goal": f"≥ {line['goal']:g}"}
    else:
        sides = {side: number(line[side]) for side in SIDES}
        ends = "" if math.isnan(line["low"]) else f" [{line['low']:+.4f}, {line['high']:+.4f}]"
        more = {"ours − theirs": f"{line['difference']:+.4f}{ends}", "goal": "0 in the interval"}
    columns = ("peer", "figure", *SIDES, "theirs / ours", "ours − theirs", "goal", "met")
    title = GOALS[name].title if name in GOALS else name
    found = {"peer": line["peer"], "figure": title, **sides, **more, "met": MET[line["ok"]]}
    return {column: found.get(column) for column in columns}


def write_log(data: Path, recipe: str, folder: Path, users: int | None) -> tuple[int, int]:
    """Write our data set and the peers' events into ``folder``, of the first ``users`` of a log; gives the training
    rows of ours and their answers. Each user's last event is for test, the one before it for validation.

    Raises UserError for a missing file, or what our data set cannot be built of.
    """
    for name in ("interactions", "items"):
        if not (file := data / f"{name}.parquet").is_file():
            raise no_such_file(file)
    log = folder / "log.parquet"
    read = load_recipe(recipe, {"interactions": str(log), "items": str(data / "items.parquet")})
    events = pl.read_parquet(data / "interactions.parquet").sort(read.user, read.order)
    if users is not None:
        events = events.filter(pl.col(read.user).rank("dense") <= users)
    events.write_parquet(log)
    rows = build(read, folder / "dataset").rows["train"]
    place, length = pl.int_range(pl.len()).over(read.user), pl.len().over(read.user)
    made = events.select(read.user, read.item, place=place, back=length - 1 - place)
    user, item, place_, back = (made.to_series(column).to_numpy() for column in range(4))
    parts = {"train": back >= 2, "before_test": back >= 1, "test": back == 0}
    np.savez(folder / "events.npz", allow_pickle=False, user=user, item=item, place=place_, **parts)
    return rows, int(parts["train"].sum() - (place_ == 0).sum())


def sides_of(peer: Peer, module: str, python: Path, rows: int, answers: int) -> dict[str, Side]:
    """Both sides of a pair; a batch of a peer with single answers has as many answers as one of ours."""
    batch = math.ceil(answers / math.ceil(rows / BATCH)) if peer.single_answers else BATCH
    given = {**COMMON, **peer.settings, "rows": BATCH}
    return {
        "ours": Side([sys.executable, "-m", "benchmark.peer_workers.ours"], {**given, "ours": peer.ours}),
        "theirs": Side([str(python), "-m", f"benchmark.peer_workers.with_{module}"], {**given, "rows": batch}),
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return exit_code("peers.py", lambda: _run(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="the log; without it nothing is measured")
    add("--rectools", type=Path, metavar="PYTHON", help="the interpreter with RecTools; else it is left out")
    add("--recbole", type=Path, metavar="PYTHON", help="the interpreter with RecBole; else it is left out")
    add("--json", type=Path, default=RESULTS, metavar="FILE", help="the results (default: those of this repository)")
    add("--epochs", type=int, default=2, help="of each training (default: 2)")
    add("--seeds", type=int, default=5, help="of ours (default: 5)")
    add("--peer-seeds", type=int, default=1, help="of a peer (default: 1)")
    add("--evaluations", type=int, default=9, help="in turn, after an epoch of training (default: 9)")
    add("--users", type=int, help="only so many users: does it run? Its figures are no results")
    return parser


def _run(args: argparse.Namespace) -> int:
    """Exit code 1 if a goal is not met."""
    if args.data is not None:
        with scratch_folder() as folder:
            content = _measured(args, folder)
    elif args.json.is_file():
        content = json.loads(args.json.read_text(encoding="utf-8"))
    else:
        raise no_such_file(args.json)
    (table,) = found = tables(content)
    print(as_markdown(found), end="")
    return int(any(line["ok"] is False for line in table.lines))


def _measured(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = {"pairs": {}}
    if args.json.is_file():
        content = json.loads(args.json.read_text(encoding="utf-8"))
    cpu = name_of(torch.device("cpu"))
    content["machine"] = {"cpu": cpu, "cores": os.cpu_count(), "threads": COMMON["threads"], "users": args.users}
    rows, answers = write_log(args.data.resolve(), RECIPE, folder, args.users)

    def save() -> None:
        with replacing(args.json) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    seeds = [SIDES[: 1 + (seed < args.peer_seeds)] for seed in range(max(args.seeds, args.peer_seeds))]
    for name, peer in PEERS.items():
        if (python := getattr(args, name)) is not None:
            sides = sides_of(peer, name, python.absolute(), rows, answers)
            found = content["pairs"].setdefault(name, {})
            measure(found, sides, folder, seeds, args.epochs, save)
            evaluate(found, sides, folder, args.evaluations, save)
    return content


if __name__ == "__main__":
    sys.exit(main())
