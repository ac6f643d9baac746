"""Executors: the runs of a benchmark elsewhere give what those of local processes give, also when a machine dies."""

from __future__ import annotations

import io
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctr_pe import training
from ctr_pe.cli import main
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.study import executors
from ctr_pe.study.benchmark import Request, run
from ctr_pe.study.executors.executor import Message, Resources, attempt
from ctr_pe.study.runner import Job, run_all
from ctr_pe.study.store import Store
from ctr_pe.training import Outcome, Run
from ctr_pe.utils.errors import UserError
from tests.support import fake_training
from tests.support.fake_training import jobs_of
from tests.support.processes import wait_for
from tests.support.stored_rows import rows

PARAMS: dict[str, Any] = {
    "embedding_dim": 4,
    "attention_hidden_units": [4],
    "dnn_hidden_units": [8],
    "batch_size": 32,
    "net_dropout": 0.2,
    "epochs": 4,
    "learning_rate": 0.01,
}


def slow_train(run: Run, progress: Callable[[Mapping[str, Any]], None]) -> Outcome:
    """Training whose epochs take a while and are noted beside the results, with the process that trains."""
    assert isinstance(run.resume, Path)
    log = run.resume.parents[2] / f"{run.resume.parents[1].name}.log"

    def noting(state: Mapping[str, Any]) -> None:
        if state.get("batch") == 0:
            with open(log, "a") as file:
                file.write(f"{run.pe} {run.seed} {state['epoch']} {os.getpid()}\n")
            time.sleep(0.5)
        progress(state)

    return training.train(run, noting)


def request(root: Path, out: Path, **changes: Any) -> Request:
    given: dict[str, Any] = {"encodings": ["none", "rope"], "dataset": "tiny", "repeats": 1, "params": PARAMS}
    return Request(data_root=root, out=out, **given | changes)


def files_of(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (out / "scores").iterdir() if file.suffix == ".npy"}


def check_same(out: Path, local: Path) -> None:
    assert rows(out) == rows(local)
    assert files_of(out) == files_of(local)
    assert len(rows(local)) == 2


def begun(log: Path) -> dict[tuple[str, str], list[tuple[int, str]]]:
    """Run -> its epochs that began, and by which process."""
    found: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        pe, seed, epoch, process = line.split()
        found.setdefault((pe, seed), []).append((int(epoch), process))
    return found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("foo", "--executor foo: (local, ray, ray://HOST:PORT, slurm, slurm:KEY=VALUE,…)"),
        ("rays", "--executor rays: did you mean 'ray'? "),
        ("ray:6379", "--executor ray:6379: did you mean 'ray'? "),
        ("local:2", "--executor local:2: did you mean 'local'? "),
        ("slurm:short", "--executor slurm:short: 'short' is not KEY=VALUE, such as slurm_partition=short"),
    ],
)
def test_an_unknown_executor_names_the_choices(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["benchmark", "--executor", name, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"ctr-pe: error: {message}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "module", "package"), [("ray", "ray", "Ray"), ("slurm", "submitit", "submitit")])
def test_what_is_not_installed_is_named(
    name: str, module: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"executor='{name}' needs {package}: pip install 'ctr_pe\[{name}\]'"):
        executors.open_executor(name, fake_training.train, Resources(), tmp_path)


def test_parameters_of_slurm_are_numbers_and_texts() -> None:
    assert executors.parameters("slurm") == {}
    found = executors.parameters("slurm:timeout_min=90,slurm_partition=short")
    assert found == {"timeout_min": 90, "slurm_partition": "short"}


class Recording:
    """An executor by its three methods: it trains when it is asked for messages."""

    def __init__(self, workers: int) -> None:
        self.workers, self.submitted, self.closed = workers, list[Job](), 0
        self.most = 0

    def submit(self, job: Job) -> None:
        self.submitted.append(job)
        self.most = max(self.most, len(self.submitted))

    def messages(self) -> Iterator[Message]:
        job = self.submitted.pop(0)
        states: list[Mapping[str, Any]] = []
        kind, content = attempt(fake_training.train, job.run, states.append)  # type: ignore[arg-type]
        yield from (Message(job, "progress", state) for state in states)
        yield Message(job, kind, content)

    def close(self) -> None:
        self.closed += 1


def test_three_methods_are_an_executor(tmp_path: Path) -> None:
    executor, store, stream = Recording(3), Store(tmp_path), io.StringIO()
    jobs = jobs_of(["none", "rope", "cape"], seeds=2, fail={"rope": "error", "cape": "diverge"})
    assert run_all(jobs, store, executor, stream) == 4
    assert executor.most == 3
    assert executor.closed == 0
    assert {key.pe for key in store.read()} == {"none"}
    assert {key.pe for key in store.failures()} == {"cape"}
    assert "failed: RuntimeError: first line second line (traceback in " in stream.getvalue()


def test_an_executor_is_closed_when_the_store_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "append", lambda *_: 1 / 0)
    executor = Recording(1)
    with pytest.raises(ZeroDivisionError):
        run_all(jobs_of(), Store(tmp_path), executor, io.StringIO())
    assert executor.closed == 1


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The data root, and what local processes make of the request."""
    pytest.importorskip("ray")
    root = tmp_path_factory.mktemp("data")
    generate(root / "tiny", users=60, valid_users=20, test_users=20)
    out = tmp_path_factory.mktemp("results") / "local"
    assert run(request(root, out, jobs=2), slow_train) == 0
    return root, out


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray cluster: a head without CPUs, and two nodes of one."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_health_check_period_ms", "500")
    monkeypatch.setenv("RAY_health_check_initial_delay_ms", "500")
    monkeypatch.setenv("RAY_health_check_failure_threshold", "30")  # nodes of a busy machine answer late
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            made.add_node(num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", made.address)
        yield made
    finally:
        made.shutdown()


@pytest.fixture
def losing(
    cluster: Any, local: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[Any, list[int]], bool]], Path]:
    """Runs on the cluster, which give the local results; where the log of their epochs is.

    ``lose(executor, processes)`` is asked, until it is true, to lose something, given those in a second epoch."""
    from ctr_pe.study.executors.ray_cluster import RayExecutor

    def run_and(lose: Callable[[Any, list[int]], bool]) -> Path:
        root, want = local
        out, log, lost = tmp_path / "ray", tmp_path / "ray.log", []
        messages = RayExecutor.messages

        def watched(self: RayExecutor) -> Iterator[Message]:
            far = [process for (*_, (epoch, process)) in begun(log).values() if epoch >= 2]
            if not lost and lose(self, far):
                lost.append(True)
            return messages(self)

        monkeypatch.setattr(RayExecutor, "messages", watched)
        assert run(request(root, out, executor="ray"), slow_train) == 0
        assert lost
        check_same(out, want)
        return log

    return run_and


def raylet_of(process: int) -> int | None:
    """The process of its node; None if it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return None


@pytest.mark.slow
def test_a_ray_cluster_that_loses_a_node_gives_the_local_results(cluster: Any, losing: Callable[..., Path]) -> None:
    """One run per node; the node whose run has begun its second epoch goes, and the run goes on elsewhere. Not the node
    that this process has joined, which may be any of those with one address."""

    def lose(executor: Any, processes: list[int]) -> bool:
        here = executor.ray.get_runtime_context().get_node_id()
        others = [node for node in cluster.worker_nodes if node.node_id != here]
        nodes = {node.all_processes["raylet"][0].process.pid: node for node in others}
        raylet = next((one for one in map(raylet_of, processes) if one in nodes), None)
        if raylet is None:
            return False
        assert executor.workers == 2
        cluster.remove_node(nodes[raylet], allow_graceful=False)
        wait_for(lambda: executor.workers == 1)
        return True

    log = losing(lose)
    repeated = {one for one, epochs in begun(log).items() if len({process for _, process in epochs}) > 1}
    assert len(repeated) == 1  # that of the node which went
    for epochs in begun(log).values():
        numbers = [epoch for epoch, _ in epochs]
        assert numbers == sorted(numbers)  # never behind an epoch that had ended
        assert sum(Counter(numbers).values()) <= PARAMS["epochs"] + 1


@pytest.mark.slow
def test_a_ray_cluster_that_loses_the_mailbox_gives_the_local_results(losing: Callable[..., Path]) -> None:
    """As if its node went: it begins anew, without the states that it had."""

    def lose(executor: Any, processes: list[int]) -> bool:
        if processes:
            executor.ray.kill(executor.mailbox, no_restart=False)
        return bool(processes)

    losing(lose)


@pytest.mark.slow
def test_a_ray_cluster_without_room_is_one_line(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no node of the Ray cluster has 2 CPUs for a run"):
        executors.open_executor("ray", fake_training.train, Resources(threads=2), tmp_path)
    jobs = jobs_of(["none", "rope", "cape"], seeds=1, fail={"rope": "error", "cape": "die"})
    with closing(executors.open_executor("ray", fake_training.train, Resources(), tmp_path)) as executor:
        stream = io.StringIO()
        assert run_all(jobs, Store(tmp_path), executor, stream) == 2
    assert "DIN cape seed 1 failed: its worker ended 4 times" in stream.getvalue()
    assert "DIN rope seed 1 failed: RuntimeError: first line second line (traceback in " in stream.getvalue()


@pytest.mark.slow
def test_jobs_by_submitit_give_the_local_results(local: tuple[Path, Path], tmp_path: Path) -> None:
    """Its local cluster; the first job is killed once."""
    pytest.importorskip("submitit")
    from ctr_pe.study.executors.slurm_cluster import SlurmExecutor

    root, want = local
    out, log, killed = tmp_path / "slurm", tmp_path / "slurm.log", []

    class Killing(SlurmExecutor):
        def messages(self) -> Iterator[Message]:
            wait_for(lambda: bool(begun(log)))
            if not killed:
                (_, process), *_ = next(iter(begun(log).values()))
                killed.append(process)
                os.kill(int(process), 9)
            return super().messages()

    made = Killing(slow_train, Resources(jobs=2), tmp_path / "jobs", cluster="local")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executors, "open_executor", lambda *_: made)
        assert run(request(root, out, executor="slurm"), slow_train) == 0
    check_same(out, want)
    assert len({process for epochs in begun(log).values() for _, process in epochs}) == 3


def test_a_machine_without_slurm_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(UserError, match="this machine has no Slurm"):
        executors.open_executor("slurm", fake_training.train, Resources(), tmp_path)
    assert replace(Resources(), jobs=3).at_once() == 3
