"""Runs as tasks of a Ray cluster, one each.

Ray begins a task again whose worker or node has died, ``RETRIES`` times; the run goes on from its state if the folder
of results is one that all nodes see. Progress comes through an actor on the caller's node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ctr_pe.study.executors.executor import Message, Resources, attempt
from ctr_pe.utils.engines import RETRIES, Surroundings, connect_ray, in_a_line
from ctr_pe.utils.errors import UserError, counted, option, reason

if TYPE_CHECKING:
    from ctr_pe.study.runner import Job, Train
    from ctr_pe.training import Run

POLL = 0.2  # seconds between two looks at the progress


class RayExecutor:
    """Tasks of the cluster at ``address``; without one that of $RAY_ADDRESS, that which runs on this machine, or a new
    one on this machine. A cluster that is connected already stays so.

    Raises:
        UserError: Ray is not installed, the cluster does not answer, or none of its nodes has room for a run.
    """

    def __init__(self, train: Train, resources: Resources, address: str | None = None) -> None:
        self.ray, self.ours = connect_ray(address, option("executor", address or "ray"))
        self.resources = resources
        try:
            self._check_room()
        except UserError:
            self._leave()
            raise
        needs: dict[str, Any] = {"num_cpus": resources.threads, "num_gpus": int(resources.gpu >= 0)}
        self.task = self.ray.remote(max_retries=RETRIES, **needs)(_train).remote
        self.given = self.ray.put((train, Surroundings()))
        here = self.ray.get_runtime_context().get_node_id()
        on_this_node = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=True)
        again = {"max_restarts": -1, "max_task_retries": -1}
        self.mailbox = self.ray.remote(num_cpus=0, scheduling_strategy=on_this_node, **again)(_Mailbox).remote()
        self.running: dict[Any, Job] = {}
        self.numbers: dict[int, Job] = {}

    @property
    def workers(self) -> int:
        """As many as the nodes have room for that are there now."""
        return self.resources.jobs or max(1, sum(map(self._room, self._nodes())))

    def submit(self, job: Job) -> None:
        number = len(self.numbers)
        self.numbers[number] = job
        self.running[self.task(self.given, job.run, self.mailbox, number)] = job

    def messages(self) -> Iterator[Message]:
        found: list[Message] = []
        while not found:
            ended, _ = self.ray.wait(list(self.running), timeout=POLL)
            under_way = {id(job) for job in self.running.values()}
            for number, state in self.ray.get(self.mailbox.take.remote()).items():
                if id(job := self.numbers[number]) in under_way:
                    found.append(Message(job, "progress", state))
            found += [Message(self.running.pop(task), *self._end(task)) for task in ended]
        yield from found

    def close(self) -> None:
        for task in self.running:
            self.ray.cancel(task, force=True)
        self.running.clear()
        self._leave()

    def _end(self, task: Any) -> tuple[str, Any]:
        errors = self.ray.exceptions
        try:
            ended: tuple[str, Any] = self.ray.get(task)
        except errors.RayTaskError as error:  # before or after the training
            return "failed", (in_a_line(error.cause), str(error))
        except errors.RayError as error:
            return "died", (f"its worker ended {counted(1 + RETRIES, 'time')} ({reason(error)})", "")
        return ended

    def _leave(self) -> None:
        if self.ours and self.ray.is_initialized():
            self.ray.shutdown()

    def _nodes(self) -> list[Mapping[str, float]]:
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def _room(self, node: Mapping[str, float]) -> int:
        """For how many runs at once."""
        gpus = node.get("GPU", 0) if self.resources.gpu >= 0 else float("inf")
        return int(min(node.get("CPU", 0) // self.resources.threads, gpus))

    def _check_room(self) -> None:
        if not any(map(self._room, self._nodes())):
            needs = f"{counted(self.resources.threads, 'CPU')}{' and a GPU' * (self.resources.gpu >= 0)}"
            raise UserError(f"no node of the Ray cluster has {needs} for a run")


class _Mailbox:
    """The newest state of each run, until it is taken."""

    def __init__(self) -> None:
        self.states: dict[int, Mapping[str, Any]] = {}

    def put(self, number: int, state: Mapping[str, Any]) -> None:
        self.states[number] = state

    def take(self) -> dict[int, Mapping[str, Any]]:
        states, self.states = self.states, {}
        return states


def _train(given: tuple[Train, Surroundings], run: Run, mailbox: Any, number: int) -> tuple[str, Any]:
    """A task, which sees one GPU at most."""
    train, surroundings = given
    surroundings.enter()
    run = replace(run, gpu=min(run.gpu, 0))
    return attempt(train, run, lambda state: mailbox.put.remote(number, state))
