"""A model as one graph of torch's own operators: histories and targets in, scores out, whatever their sizes.

An exported file is this graph. Small requests on a GPU, whose time goes into launching kernels rather than into
computing, are padded to few sizes, and all kernels of a size are launched as one: a CUDA graph of it, captured at the
first request of that size.

B requests, L history slots, K targets of each request, S entries of a list.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ctr_pe.fuxictr.embeddings import look_up
from ctr_pe.models.batch_plan import Histories
from ctr_pe.models.candidates import encode_histories, score_at_once
from ctr_pe.models.groups import SizedGroup
from ctr_pe.ops import native
from ctr_pe.pe.base import PositionEncoding
from ctr_pe.sequence.batch import JaggedBatch
from ctr_pe.sequence.dense import Dense, align
from ctr_pe.sequence.transfer import pinned
from ctr_pe.utils.cuda_graphs import capture, run_aside

OF_REQUEST = ("user", "context")
"""Sources of fields that have one value for all targets of a request."""
AXES = {"history": ("B", "L"), "age": ("B", "L"), "length": ("B",), "target": ("B", "K"), "request": ("B",)}
"""Kinds of inputs and their axes."""
LARGEST = 2**17
"""(target, slot) pairs of a small request, at most: of a larger one padding costs more than launches."""
WARMING = 2
"""Runs before the capture: they choose and compile kernels."""

Sizes = tuple[int, int, int]
Run = Callable[[dict[str, Tensor]], Tensor]


class RequestGraph(nn.Module):
    """Scores (B, K), those of ``score_candidates``, of K targets of each history.

    ``forward`` takes the model's inputs by name, see :func:`inputs_of`, all int64 but numbers, which are float32. A
    history begins in the first slot, the oldest item first, and has ``length`` items; what the slots after them hold is
    not read. There is at least one slot. ``of_request``: see :func:`inputs_of`.
    """

    outputs = ("scores",)

    def __init__(self, model: Any, of_request: Collection[str] = OF_REQUEST) -> None:
        super().__init__()
        self.model, self.inputs = model.eval(), inputs_of(model, of_request)

    def forward(self, given: Mapping[str, Tensor]) -> Tensor:
        """given: each of ``inputs`` -> (B, K)."""
        for axis, size in enumerate("BLK"):
            _equal(given[name].shape[min(axis, 1)] for name, kind in self.inputs.items() if size in AXES[kind])
        model = self.model
        histories = [dense_histories(group, given, model.max_len) for group in model.groups]
        encoded = encode_histories(model, histories)
        others: dict[str, dict[str, Tensor]] = {"target": {}, "request": {}}
        for name in model.other_fields:
            others[self.inputs[name]][name] = given[name]
        shared, _ = look_up(model.embedding_layer, others["request"])
        return score_at_once(model, encoded, others["target"], shared)

    @torch.inference_mode()
    def compare(self, given: Mapping[str, Tensor], found: Tensor) -> tuple[float, str]:
        """How far scores are from those of ``score_candidates``, and of what sizes."""
        wanted = self.model.score_candidates(self.model.encode(histories_in(self.model, given)), given)
        sizes = f"{wanted.shape[0]} requests with {wanted.shape[1]} targets"
        return float((found - wanted).abs().max()), sizes


def dense_histories(group: SizedGroup, given: Mapping[str, Tensor], longest: int | None) -> Histories:
    """The newest ``longest`` items of a group's histories, each slot an item; of inputs as :class:`RequestGraph` has
    them. Without an input of ages there are none."""
    names = [*group.history, *([group.age] if group.age is not None and group.age in given else [])]
    # One empty slot more: torch's tracer takes every size for 2 or more, and a history may have one slot.
    columns = [nn.functional.pad(given[name], [0, 0] * (given[name].dim() - 2) + [0, 1]) for name in names]
    lengths = given[length_of(group)].unsqueeze(1)
    mask = torch.arange(columns[0].shape[1], device=lengths.device) < lengths
    mask, *moved = align(mask, *columns, longest=longest)
    positions = Dense.from_mask(mask, moved[-1] if group.age in given else None)
    ids = {
        name: x.masked_fill(~mask.view(*mask.shape, *[1] * (x.dim() - 2)), 0).flatten(0, 1)
        for name, x in zip(group.history, moved, strict=False)
    }
    return Histories(positions, ids, {})


def inputs_of(model: Any, of_request: Collection[str] = OF_REQUEST) -> dict[str, str]:
    """Input -> its kind, in order: histories (B, L), ages in seconds (B, L) where an encoding reads them, their lengths
    (B,), targets and other fields (B, K), and (B,) those of the sources ``of_request``. Fields that are lists have an
    axis more."""
    needs_age = any(module.about.needs_age for module in model.modules() if isinstance(module, PositionEncoding))
    found: dict[str, str] = {}
    for group in model.groups:
        found |= dict.fromkeys(group.history, "history")
        if group.age is not None and needs_age:
            found[group.age] = "age"
        found[length_of(group)] = "length"
    targets = {field for group in model.groups for field in group.target}
    for field in model.other_fields:
        shared = field not in targets and model.feature_map.features[field].get("source") in of_request
        found[field] = "request" if shared else "target"
    return found


def length_of(group: SizedGroup) -> str:
    """The input that says how many items the group's histories have."""
    return f"{group.history[0]}_length"


def inputs_from(model: Any, histories: JaggedBatch, others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inputs of a :class:`RequestGraph`: histories padded, all to one number of slots, and ``others`` as they are."""
    lengths = {length_of(group): histories.lengths[group.history[0]] for group in model.groups}
    found = {**histories, **lengths, **others}
    listed = [name for group in model.groups for name in (*group.history, group.age or "") if name in found]
    most = max((found[name].shape[1] for name in listed), default=0)
    for name in listed:
        slots = [0] * 2 * (found[name].dim() - 2) + [0, most - found[name].shape[1]]
        found[name] = nn.functional.pad(found[name], slots)
    return found


def histories_in(model: Any, given: Mapping[str, Tensor]) -> JaggedBatch:
    """The histories of a :class:`RequestGraph`'s inputs; ages that it does not read are 0."""
    found = JaggedBatch({}, {}, {})
    for group in model.groups:
        lengths, slots = given[length_of(group)], given[group.history[0]].shape[1]
        mask = torch.arange(slots) < lengths.unsqueeze(1)
        for name in (*group.history, *([group.age] if group.age else [])):
            found.histories[name] = given[name][mask] if name in given else torch.zeros(int(lengths.sum())).long()
            found.lengths[name] = lengths
    return found


def trace(graph: Any) -> torch.export.ExportedProgram:
    """A graph of ``model`` and ``inputs``, such as :class:`RequestGraph`, as a program for any B, L and K from 1 on."""
    model = graph.model
    sizes = {
        name: dict.fromkeys(range(len(AXES[kind])), torch.export.Dim.DYNAMIC) for name, kind in graph.inputs.items()
    }
    # Sizes that no parameter has, and none twice, so that no two of them are taken for the same.
    example = random_request(model, 3, 5 + max((group.max_len for group in model.groups), default=0), 4)
    with torch.no_grad(), native.portable():
        program = torch.export.export(graph, (example,), dynamic_shapes=(sizes,), strict=False)
    for module in program.graph_module.modules():
        for node in getattr(module, "graph", torch.fx.Graph()).nodes:
            node.meta.pop("stack_trace", None)  # paths of this machine
    return program


def random_request(model: Any, rows: int, slots: int, targets: int, seed: int = 0) -> dict[str, Tensor]:
    """Inputs of a :class:`RequestGraph`: one history is full, one empty, and every fourth item lacks an id.

    Several histories have different lengths, but those of one age; no two inputs are one tensor, which a trace would
    take for one input.
    """
    draw, inputs, features = torch.Generator().manual_seed(seed), inputs_of(model), model.feature_map.features
    count = torch.randint(1, max(2, slots), (rows,), generator=draw)
    count[:1], count[1:2] = slots, 0
    sizes = {"B": rows, "L": slots, "K": targets}
    found = {}
    age = {length_of(group): group.age or length_of(group) for group in model.groups}
    counts: dict[str, Tensor] = {}
    for name, kind in inputs.items():
        spec, shape = features.get(name, {}), [sizes[axis] for axis in AXES[kind]]
        if kind == "length":
            drawn = counts.setdefault(age[name], count.roll(len(counts))).clone()
        elif kind == "age":
            drawn = torch.randint(10**7, shape, generator=draw).sort(1, descending=True)[0]
        elif spec["type"] == "numeric":
            found[name] = torch.rand(shape, generator=draw)
            continue
        elif spec["type"] == "embedding":
            found[name] = torch.rand([*shape, spec.get("pretrain_dim") or spec["embedding_dim"]], generator=draw)
            continue
        else:
            more = [spec["max_len"]] if kind != "history" and spec["type"] == "sequence" else []
            more = [spec["values"]] if "values" in spec else more
            drawn = torch.randint(1, max(2, spec["vocab_size"]), [*shape, *more], generator=draw)
        if kind == "history":
            there = torch.rand(shape, generator=draw) < 0.75
            drawn = drawn * there.view(*shape, *[1] * (drawn.dim() - 2))
        found[name] = drawn
    return found


def requests(model: Any) -> Iterator[dict[str, Tensor]]:
    """Random ones of several sizes: of one item, and with histories longer than those the model was built for."""
    longest = max((group.max_len for group in model.groups), default=1)
    for seed, size in enumerate([(1, 1, 1), (1, longest + 3, 6), (4, longest, 1), (5, 7, 9)]):
        yield random_request(model, *size, seed=seed)


def _equal(sizes: Iterable[int]) -> None:
    """Sizes that an exported program then knows to be one."""
    first, *others = (*sizes, None)
    for other in others[:-1]:
        torch._check(other == first)  # type: ignore[no-untyped-call]


class CUDAGraphs:
    """Scores of small requests by a model on a GPU, from any thread: a CUDA graph for each size.

    A graph has the addresses of the model's tensors: it sees weights that change in place, and a model that moves to
    another device needs ``CUDAGraphs`` of its own.
    """

    def __init__(self, model: Any) -> None:
        self.graph, self.device = RequestGraph(model, of_request=()), model.device
        self._most = max((group.max_len for group in model.groups), default=1)
        self._graphs: dict[Sizes, Run] = {}
        self._pool: Any = None  # memory of all graphs: one runs at a time
        self._lock = threading.Lock()

    def sizes(self, given: Mapping[str, Tensor]) -> Sizes:
        """B, L and K that the request is padded to: powers of two, and L at most the longest history of the model."""
        slots = max((given[name].shape[1] for name, kind in self.graph.inputs.items() if "L" in AXES[kind]), default=1)
        rows, targets = self._targets(given)
        most = self._most if slots <= self._most else 2 * slots
        return _rounded(rows), min(_rounded(slots), most), _rounded(targets)

    def takes(self, given: Mapping[str, Tensor]) -> bool:
        """Whether the request is small."""
        rows, slots, targets = self.sizes(given)
        return rows * slots * targets <= LARGEST

    @torch.inference_mode()
    def __call__(self, given: Mapping[str, Tensor]) -> Tensor:
        """Click probabilities (B, K), on the CPU.

        ``given``: on the CPU, histories and ages (B, any) and targets and other fields (B, K), as
        :class:`RequestGraph` names them; what it does not name is not read.
        """
        sizes = self.sizes(given)
        padded = {name: _padded(given[name], kind, sizes) for name, kind in self.graph.inputs.items()}
        rows, targets = self._targets(given)
        with self._lock:
            if sizes not in self._graphs:
                self._graphs[sizes] = self._capture(padded)
            return self._graphs[sizes](padded)[:rows, :targets].float().cpu()

    def _targets(self, given: Mapping[str, Tensor]) -> tuple[int, int]:
        """B and K."""
        rows, targets = next(given[name].shape[:2] for name, kind in self.graph.inputs.items() if kind == "target")
        return rows, targets

    def _capture(self, padded: Mapping[str, Tensor]) -> Run:
        """A graph of these sizes: a function of padded requests."""
        inputs = {name: x.to(self.device) for name, x in padded.items()}
        run_aside(lambda: self.graph(inputs), self.device, WARMING)
        graph, scores = capture(lambda: self.graph(inputs), self.device, self._pool)
        self._pool = graph.pool()

        def replay(given: Mapping[str, Tensor]) -> Tensor:
            for name, x in given.items():
                inputs[name].copy_(pinned(x, self.device), non_blocking=True)
            graph.replay()
            return scores

        return replay


def _rounded(size: int) -> int:
    """The power of two from ``size`` on."""
    return 1 << max(0, size - 1).bit_length()


def _padded(x: Tensor, kind: str, sizes: Sizes) -> Tensor:
    """With zeros after each axis: empty histories, slots and targets of padding."""
    of_axis = dict(zip("BLK", sizes, strict=True))
    more = [of_axis[axis] - x.shape[place] for place, axis in enumerate(AXES[kind])]
    more += [0] * (x.dim() - len(more))
    return nn.functional.pad(x, [n for pair in zip([0] * len(more), reversed(more), strict=True) for n in pair])
