"""A model as one graph of torch's own operators: histories and targets in, scores out, whatever their sizes.

B requests, L history slots, K targets of each request, S entries of a list.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
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

OF_REQUEST = ("user", "context")
"""Sources of fields that have one value for all targets of a request."""
AXES = {"history": ("B", "L"), "age": ("B", "L"), "length": ("B",), "target": ("B", "K"), "request": ("B",)}
"""Kinds of inputs and their axes."""


class RequestGraph(nn.Module):
    """Scores (B, K), those of ``score_candidates``, of K targets of each history.

    ``forward`` takes the model's inputs by name, see :func:`inputs_of`, all int64 but numbers, which are float32. A
    history begins in the first slot, the oldest item first, and has ``length`` items; what the slots after them hold is
    not read. There is at least one slot. ``of_request``: see :func:`inputs_of`.
    """

    def __init__(self, model: Any, of_request: Collection[str] = OF_REQUEST) -> None:
        super().__init__()
        self.model, self.inputs = model.eval(), inputs_of(model, of_request)

    def forward(self, given: Mapping[str, Tensor]) -> Tensor:
        """given: each of ``inputs`` -> (B, K)."""
        for axis, size in enumerate("BLK"):
            _equal(given[name].shape[min(axis, 1)] for name, kind in self.inputs.items() if size in AXES[kind])
        model, histories = self.model, []
        for group in model.groups:
            names = [*group.history, *([group.age] if group.age in self.inputs else [])]
            # One empty slot more: torch's tracer takes every size for 2 or more, and a history may have one slot.
            columns = [nn.functional.pad(given[name], (0, 1)) for name in names]
            lengths = given[length_of(group)].unsqueeze(1)
            mask = torch.arange(columns[0].shape[1], device=lengths.device) < lengths
            mask, *moved = align(mask, *columns, longest=model.max_len)
            positions = Dense.from_mask(mask, moved[-1] if group.age in self.inputs else None)
            ids = {name: x.masked_fill(~mask, 0).flatten(0, 1) for name, x in zip(group.history, moved, strict=False)}
            histories.append(Histories(positions, ids, {}))
        encoded = encode_histories(model, histories)
        others: dict[str, dict[str, Tensor]] = {"target": {}, "request": {}}
        for name in model.other_fields:
            others[self.inputs[name]][name] = given[name]
        shared, _ = look_up(model.embedding_layer, others["request"])
        return score_at_once(model, encoded, others["target"], shared)


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
    """Inputs of a :class:`RequestGraph`: histories padded, and ``others`` as they are."""
    lengths = {length_of(group): histories.lengths[group.history[0]] for group in model.groups}
    return {**histories, **lengths, **others}


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


def trace(model: Any) -> torch.export.ExportedProgram:
    """The model's :class:`RequestGraph` as a program for any B, L and K from 1 on."""
    graph = RequestGraph(model)
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
    """Inputs of a :class:`RequestGraph`: one history is full, one empty, and every fourth item lacks an id."""
    draw, inputs, features = torch.Generator().manual_seed(seed), inputs_of(model), model.feature_map.features
    count = torch.randint(1, max(2, slots), (rows,), generator=draw)
    count[:1], count[1:2] = slots, 0
    sizes = {"B": rows, "L": slots, "K": targets}
    found = {}
    for name, kind in inputs.items():
        spec, shape = features.get(name, {}), [sizes[axis] for axis in AXES[kind]]
        if kind == "length":
            drawn = count
        elif kind == "age":
            drawn = torch.randint(10**7, shape, generator=draw).sort(1, descending=True)[0]
        elif spec["type"] == "numeric":
            found[name] = torch.rand(shape, generator=draw)
            continue
        elif spec["type"] == "embedding":
            found[name] = torch.rand([*shape, spec["embedding_dim"]], generator=draw)
            continue
        else:
            more = [spec["max_len"]] if kind != "history" and spec["type"] == "sequence" else []
            drawn = torch.randint(1, max(2, spec["vocab_size"]), [*shape, *more], generator=draw)
        if kind == "history":
            drawn = drawn * (torch.rand(shape, generator=draw) < 0.75)
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
