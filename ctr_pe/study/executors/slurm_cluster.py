"""Runs as jobs of Slurm, one each, by submitit.

A job that is preempted or runs out of time asks Slurm to begin it again, one that has died is submitted anew,
``RETRIES`` times; the run goes on from its state. What submitit writes, logs too, is in the folder ``slurm`` of the
results, which all machines have to see. A job tells nothing of its progress until it ends.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctr_pe.study.executors.executor import Message, Resources, attempt
from ctr_pe.utils.engines import RETRIES, Surroundings
from ctr_pe.utils.errors import UserError, counted, option, reason

if TYPE_CHECKING:
    from ctr_pe.study.runner import Job, Train
    from ctr_pe.training import Run

POLL = 1.0  # seconds between two looks for results
AT_ONCE = 64  # jobs that wait or run, unless --jobs says otherwise
MINUTES = 24 * 60


class SlurmExecutor:
    """Jobs of Slurm.

    Args:
        folder: for scripts, results and logs.
        parameters: of ``submitit.AutoExecutor.update_parameters``, such as ``slurm_partition`` and ``timeout_min``.
        cluster: ``local`` for processes of this machine, which is how it is tested.

    Raises:
        UserError: submitit is not installed, this machine has no Slurm, or a parameter is unknown.
    """

    def __init__(
        self,
        train: Train,
        resources: Resources,
        folder: Path,
        parameters: Mapping[str, Any] | None = None,
        cluster: str = "slurm",
    ) -> None:
        try:
            import submitit
        except ImportError:
            raise UserError(f"{option('executor', 'slurm')} needs submitit: pip install 'ctr_pe[slurm]'") from None
        if cluster == "slurm" and shutil.which("srun") is None:
            raise UserError(f"{option('executor', 'slurm')}: this machine has no Slurm (no program srun)")
        self.train, self.submitit = train, submitit
        self.workers = resources.jobs or AT_ONCE
        self.jobs: dict[Any, tuple[Job, int]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self.executor = submitit.AutoExecutor(folder=folder, cluster=cluster, slurm_max_num_timeout=RETRIES)
        given: dict[str, Any] = {"timeout_min": MINUTES, "cpus_per_task": resources.threads, "name": "ctr-pe"}
        if resources.gpu >= 0:
            given["gpus_per_node"] = 1
        try:
            self.executor.update_parameters(**{**given, **(parameters or {})})
        except (NameError, ValueError, AssertionError) as error:
            raise UserError(f"{option('executor', 'slurm')}: {reason(error)}") from None

    def submit(self, job: Job) -> None:
        self._submit(job, 0)

    def _submit(self, job: Job, again: int) -> None:
        self.jobs[self.executor.submit(_Task(self.train, job.run, Surroundings()))] = job, again

    def messages(self) -> Iterator[Message]:
        while not (ended := [one for one in self.jobs if one.done()]):
            time.sleep(POLL)
        for one in ended:
            job, again = self.jobs.pop(one)
            try:
                yield Message(job, *one.result())
            except self.submitit.core.utils.FailedJobError as error:  # outside of the training
                yield Message(job, "failed", ("the job failed before it trained", str(error)))
            except self.submitit.core.utils.UncompletedJobError as error:
                if again < RETRIES:
                    self._submit(job, again + 1)
                else:
                    why = f"its job ended {counted(1 + RETRIES, 'time')} without a result"
                    yield Message(job, "died", (why, str(error)))

    def close(self) -> None:
        for one in self.jobs:
            one.cancel(check=False)
        self.jobs.clear()


@dataclass(frozen=True)
class _Task:
    """What a job does; submitit pickles it."""

    train: Train
    run: Run
    surroundings: Surroundings

    def __call__(self) -> tuple[str, Any]:
        self.surroundings.enter()
        return attempt(self.train, self.run, lambda state: None)

    def checkpoint(self) -> Any:
        """What to begin again after a preemption."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)
