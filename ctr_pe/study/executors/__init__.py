"""Where the runs of a benchmark are trained: processes of this machine, a Ray cluster, Slurm.

An :class:`~ctr_pe.study.executors.executor.Executor` begins runs and says what comes of them. The store is the
caller's: nothing else writes it. Results do not depend on the executor, because a run says all that they depend on. One
that is begun again goes on from its last epoch, where its state (``Run.resume``) is in a folder that all machines see.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctr_pe.utils.errors import UserError, nearest, option

if TYPE_CHECKING:
    from ctr_pe.study.executors.executor import Executor, Resources
    from ctr_pe.study.runner import Train

EXECUTORS = ("local", "ray", "slurm")


def check(name: str) -> None:
    """Raises UserError for an executor that is unknown or not installed: ``local``, ``ray``, ``ray://HOST:PORT``,
    ``slurm``, ``slurm:KEY=VALUE,…``."""
    kind, sign, rest = name.partition(":")
    if kind not in EXECUTORS or (kind == "local" and sign) or (kind == "ray" and sign and not rest.startswith("//")):
        choices = ("local", "ray", "ray://HOST:PORT", "slurm", "slurm:KEY=VALUE,…")
        raise UserError(f"{option('executor', name)}: {nearest(name, choices)}")
    if kind == "slurm":
        parameters(name)


def open_executor(name: str, train: Train, resources: Resources, folder: Path) -> Executor:
    """An executor.

    Args:
        name: as of :func:`check`.
        train: ``ctr_pe.training.train`` or a stand-in that can be imported where the runs are trained.
        folder: for what an executor writes.

    Raises:
        UserError: it cannot be reached, or has no room for a run.
    """
    check(name)
    if name.startswith("ray"):
        from ctr_pe.study.executors.ray_cluster import RayExecutor

        return RayExecutor(train, resources, name if "//" in name else None)
    if name.startswith("slurm"):
        from ctr_pe.study.executors.slurm_cluster import SlurmExecutor

        return SlurmExecutor(train, resources, folder / "slurm", parameters(name))
    from ctr_pe.study.executors.local import LocalExecutor

    return LocalExecutor(train, resources.at_once())


def parameters(name: str) -> dict[str, Any]:
    """Those of submitit in ``slurm:KEY=VALUE,…``; whole numbers as such. Raises UserError."""
    found: dict[str, Any] = {}
    for part in filter(None, name.partition(":")[2].split(",")):
        key, sign, value = part.partition("=")
        if not (key and sign and value):
            raise UserError(f"{option('executor', name)}: '{part}' is not KEY=VALUE, such as slurm_partition=short")
        found[key] = int(value) if value.isdigit() else value
    return found
