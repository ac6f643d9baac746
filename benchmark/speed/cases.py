"""The cases and their goals."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctr_pe.pe import available_pes

if TYPE_CHECKING:
    from benchmark.speed.timing import Figure


@dataclass(frozen=True)
class Settings:
    """Of one run. ``quick``: small sizes and few repeats. ``zoo``: a checkout of FuxiCTR. ``folder``: for files."""

    quick: bool
    folder: Path
    gpu: int = -1
    zoo: Path | None = None

    @property
    def repeats(self) -> int:
        return 3 if self.quick else 7

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full


@dataclass(frozen=True)
class Case:
    """``measure``: module and function of this folder, called with Settings and the options.

    ``goal`` holds if the figure is ``sense`` (≥ or ≤) it; None where it depends on what is measured. ``allocator``:
    ``default``, or ``tuned`` for glibc's with memory kept in the process. ``slow``: not part of ``--quick``.
    ``together``: cases of one such name are measured in one process, in turn; their function takes the options of all.
    """

    name: str
    measure: str
    sense: str
    goal: float | None
    options: Mapping[str, Any] = field(default_factory=dict)
    allocator: str = "default"
    slow: bool = False
    together: str = ""

    @property
    def function(self) -> Callable[..., Any]:
        module, function = self.measure.split(":")
        found: Callable[..., Any] = getattr(importlib.import_module(f"benchmark.speed.{module}"), function)
        return found

    def met(self, figure: float, goal: float) -> bool:
        return figure >= goal if self.sense == "≥" else figure <= goal


def measure(cases: Sequence[Case], settings: Settings) -> list[Figure]:
    """The figures of one case, or of cases that are measured together."""
    function = cases[0].function
    if cases[0].together:
        figures: list[Figure] = function(settings, [case.options for case in cases])
        return figures
    return [function(settings, **case.options) for case in cases]


TUNED = {
    # Blocks of any size come from the heap, which keeps 32 GB before it gives anything back.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "34359738368",
    "MALLOC_TOP_PAD_": "268435456",
}

ENCODED = ("DIN", "BST", "SASRec")
# A product per field or of items, an MLP per pair: 1.2 times the ratio of multiply-adds.
BY_ARITHMETIC = ("dif", "dape", "fire", "cape_cosine", "likeness")
# xlnet, euler, and rope and time_rope with 1.15: in torch alone.
OVERHEAD = {"kernel": 1.5, "pdm": 1.5, "xlnet": 1.25, "euler": 1.5} | dict.fromkeys(BY_ARITHMETIC)


def overhead(pe: str, full: bool) -> float | None:
    """How many times as long a step may take with an encoding."""
    if pe == "cape":
        return 1.08 if full else 1.05
    return OVERHEAD.get(pe, 1.15)


LAUNCHES = {"DIN": 314, "DIEN": 500, "BST": 235, "DMIN": 600, "TIN": 240, "SASRec": 390}
"""Kernels that a training step without an encoding may take: those of FuxiCTR's model or the padded one, but for DIEN
and DMIN, which have thousands there."""
ATTENTIONS = {"DIN": 1, "DIEN": 1, "BST": 1, "DMIN": 6, "TIN": 1, "SASRec": 2}
"""Attention layers of the published configurations, each of which may take 15 more for an encoding, 10 for CAPE."""


def launches(model: str, pe: str) -> int:
    return LAUNCHES[model] + ATTENTIONS[model] * {"none": 0, "cape": 10}.get(pe, 15)


def request(model: str, candidates: int) -> dict[str, Any]:
    return {"model": model, "pe": "cape", "candidates": candidates}


CASES = [
    Case("step.DIN.default-allocator", "training_steps:step", "≥", 15, {"model": "DIN"}),
    Case("step.DIN.tuned-allocator", "training_steps:step", "≥", 8, {"model": "DIN"}, allocator="tuned"),
    Case("step.DIN.full", "training_steps:step", "≥", 2, {"model": "DIN", "full": True}),
    Case("step.DIEN", "training_steps:step", "≥", 6, {"model": "DIEN"}),
    Case("step.BST", "training_steps:step", "≥", 6, {"model": "BST"}),
    Case("step.DMIN", "training_steps:step", "≥", 6, {"model": "DMIN"}),
    Case("step.TIN", "training_steps:step", "≥", 6, {"model": "TIN"}),
    Case("step.SASRec", "training_steps:step", "≥", 6, {"model": "SASRec"}),
    *(
        Case(
            f"encoding.{pe}.{model}.{'full' if full else 'amazon'}",
            "training_steps:encodings",
            "≤",
            overhead(pe, full),
            {"model": model, "pe": pe, "full": full},
            together=f"{model}.{'full' if full else 'amazon'}",
        )
        for model in ENCODED
        for full in (False, True)
        for pe in available_pes()
        if pe != "none"
    ),
    *(
        Case(
            f"next.{pe}",
            "next_item:encodings",
            "≤",
            None if pe in BY_ARITHMETIC else 1.1,
            {"pe": pe},
            together="next",
        )
        for pe in available_pes()
        if pe != "none"
    ),
    *(
        Case(
            f"tables.{optimizer}.{name}",
            "training_steps:lazy_tables",
            "≥",
            4,
            {"table_optimizer": optimizer, "items": items},
        )
        for optimizer in ("lazy_adam", "rowwise_adagrad")
        for name, items in (("64k", 64_000), ("1m", 1_000_000), ("4m", 4_000_000))
    ),
    *(
        Case(f"columns.{model}", "training_steps:columns", "≤", 1.3, {"model": model, "further": 5})
        for model in ENCODED
    ),
    Case("loader.rows", "loader:rows", "≥", 30),
    Case("loader.bytes.disk", "loader:disk", "≥", 10),
    Case("loader.bytes.resident", "loader:resident", "≥", 10),
    Case("loader.beyond-memory", "loader:beyond_memory", "≤", 2.0, slow=True),
    Case("evaluation.seconds", "evaluation:seconds", "≤", 0.5),
    Case("evaluation.fuxictr", "evaluation:fuxictr", "≥", 1000),
    Case("build.rows", "building:rows", "≥", 500_000),
    Case("build.memory", "building:memory_", "≤", 1.2),
    Case("build.csv", "building:csv", "≥", 20),
    Case("build.csv.columns", "building:csv", "≥", 15, {"further": True}),
    Case("limit.DIN.default-allocator", "limit:arithmetic", "≤", 2, {"model": "DIN"}),
    Case("limit.DIN.tuned-allocator", "limit:arithmetic", "≤", 2, {"model": "DIN"}, allocator="tuned"),
    Case("growth.seconds", "growth:seconds", "≤", 1.2),
    Case("growth.memory", "growth:memory_", "≤", 1.2),
    Case("growth.tensor", "growth:tensor", "≤", 2),
    Case("seeds.five", "seeds:five", "≤", 1.0),
    Case("request.DIN.cape.fuxictr", "requests:against_fuxictr", "≥", 10, request("DIN", 1000)),
    *(
        Case(
            f"request.{model}.cape.repeated",
            "requests:against_repeated_rows",
            "≥",
            4 if model == "DIN" else 1,
            request(model, 1000),
        )
        for model in ("DIN", "DIEN", "BST", "DMIN", "TIN", "SASRec")
    ),
    *(
        Case(f"request.{model}.cape.p99.{count}", "requests:slowest", "≤", 100, request(model, count))
        for model in ("DIN", "SASRec")
        for count in (100, 1000)
    ),
    *(
        Case(f"request.DIN.cape.onnx.{count}", "requests:onnx", "≤", 100, request("DIN", count))
        for count in (100, 1000)
    ),
    *(
        Case(f"request.{model}.cape.memory", "requests:memory_", "≤", 300, request(model, 1000))
        for model in ("DIN", "DIEN", "BST", "DMIN", "TIN", "SASRec")
    ),
    *(
        Case(f"launches.{model}.{pe}", "launching:launches", "≤", launches(model, pe), {"model": model, "pe": pe})
        for model in LAUNCHES
        for pe in (available_pes() if model in ENCODED else ("none", "cape"))
    ),
    *(Case(f"waits.{model}", "launching:waits", "≤", 0, {"model": model}) for model in LAUNCHES),
    Case("service.throughput", "service:throughput", "≤", 2, {"candidates": 100}),
    *(Case(f"service.p99.{count}", "service:slowest", "≤", 100, {"candidates": count}) for count in (100, 1000)),
]
ON_GPU = {
    "seeds.five": 0.7,
    **{f"step.DIN.{how}": 3 for how in ("default-allocator", "tuned-allocator", "full")},
    "step.BST": 5,
    "step.DMIN": 5,
    "step.SASRec": 5,
    "step.DIEN": 10,
    **{f"encoding.cape.{model}.{shape}": 1.1 for model in ENCODED for shape in ("amazon", "full")},
}
"""Goals that differ there."""
