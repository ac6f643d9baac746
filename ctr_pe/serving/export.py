"""A trained model as one file for other runtimes: raw ids go in, because the vocabulary is in the file.

Formats: ``onnx``; ``torch``, a ``torch.export`` program; ``aoti``, a package compiled ahead of time for this kind of
processor, which Triton Inference Server and C++ load. Inputs, their order, and what a file says of itself are in
``docs/pipeline.md``.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ctr_pe.fuxictr.feature_specs import table_of
from ctr_pe.serving.next_item_graph import NextItemGraph
from ctr_pe.serving.request_graph import RequestGraph, inputs_of, requests, trace
from ctr_pe.utils.errors import UserError, nearest
from ctr_pe.utils.files import scratch_beside

if TYPE_CHECKING:
    from ctr_pe.serving.encoder import Encoder
    from ctr_pe.serving.scorer import Scorer

FORMAT = 2
KEY = "ctr_pe"
"""Of ONNX's metadata; in the others the content is an extra file ``ctr_pe.json``."""
TOLERANCE = 1e-4
"""How far a score of the file may be from the model's."""
EXTRA = f"{KEY}.json"
K = 10
"""Items that the file of a next-item model finds, where nothing else is said."""
Graph = RequestGraph | NextItemGraph
Run = Callable[[Mapping[str, Tensor]], Any]
Write = Callable[[torch.export.ExportedProgram, Graph, Path, str], None]
Load = Callable[[Path], Run]


def export(
    folder: str | Path, kind: str, output: str | Path, k: int | None = None, filter_seen: bool | None = None
) -> None:
    """Write the model of a model folder to a file. ``k``, ``filter_seen``: see :func:`export_scorer`.

    Raises:
        UserError: no readable model folder, or what :func:`export_scorer` raises.
    """
    from ctr_pe.serving.model_folder import read_model

    export_scorer(read_model(folder, task=None), kind, output, k, filter_seen)


def export_scorer(
    scorer: Scorer, kind: str, output: str | Path, k: int | None = None, filter_seen: bool | None = None
) -> None:
    """Write the model of a scorer to a file.

    Args:
        k: of a next-item model, how many items the file finds; None for 10, at most all.
        filter_seen: of a next-item model, leave out the items of the history; None for its own ``filter_seen``.

    Raises:
        UserError: ``k`` or ``filter_seen`` of a click model, or what :func:`export_graph` raises.
    """
    model = scorer.model
    if scorer.task == "click":
        for name, value in {"k": k, "filter_seen": filter_seen}.items():
            if value is not None:
                raise UserError(
                    f"{name}: of next-item models; the file of a click model scores the targets that it gets"
                )
        return export_model(model, description(scorer), kind, output)
    graph = NextItemGraph(model, K if k is None else k, model.filter_seen if filter_seen is None else filter_seen)
    about = description(scorer)
    items = {"ids": about["inputs"][model.group.history[0]]["ids"], "none": 0}
    about |= {"outputs": {"items": items, "scores": {}}, "k": graph.k, "filter_seen": graph.filter_seen}
    return export_graph(graph, about, kind, output)


def export_model(model: Any, about: Mapping[str, Any], kind: str, output: str | Path) -> None:
    """Write a click model to a file: :func:`export_graph` of its scores."""
    export_graph(RequestGraph(model), about, kind, output)


def export_graph(graph: Graph, about: Mapping[str, Any], kind: str, output: str | Path) -> None:
    """Write a model to a file, and put it there only if its scores on random requests are those of the model.

    Args:
        about: what the file says of itself, as JSON: :func:`description` of a scorer.
        kind: ``onnx``, ``torch`` or ``aoti``.
        output: an earlier file of this name is replaced.

    Raises:
        UserError: an unknown format, a package that is not installed, a folder that does not exist, or scores that
            differ by more than 1e-4.
    """
    if kind not in FORMATS:
        raise UserError(f"format '{kind}' is unknown: {nearest(kind, FORMATS)}")
    write, load, packages = FORMATS[kind]
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise UserError(f"format {kind} needs {', '.join(missing)}: pip install 'ctr_pe[export]'")
    inputs = {name: {"of": of} for name, of in graph.inputs.items()}
    text = json.dumps({"format": FORMAT, "inputs": inputs, **about}, ensure_ascii=False)
    with _new_file(Path(output)) as file, _quiet(), torch.no_grad():
        write(trace(graph), graph, file, text)
        check(graph, load(file), str(output))


def check(graph: Graph, run: Run, name: str) -> None:
    """Raises UserError if ``run`` gives a request another answer than the model does."""
    for given in requests(graph.model):
        away, sizes = graph.compare(given, run(given))
        if not away <= TOLERANCE:
            raise UserError(f"{name}: not written: scores of {sizes} differ from the model's by up to {away:.2g}")


def description(scorer: Scorer) -> dict[str, Any]:
    """What a file says of itself: the model, and how raw ids become its inputs.

    ``inputs``: name -> ``of`` (``history``, ``age``, ``length`` of the histories, ``target`` or ``request``),
    ``column`` of the raw ids, ``ids``: the vocabulary in which they are looked up, ``unknown``: the id of others. A
    number has a column, ``fill_na``: what missing, NaN and infinite ones become, and if training normalised it a
    ``normalizer``: what to subtract and divide by. Of declared
    columns also ``category_encoder`` (``quantile_bucket``: the keys of the vocabulary are upper edges; ``hash_bucket``:
    1 + CRC-32 of the text modulo ``unknown`` - 1), ``splitter`` and ``values``, and ``known``; of a history of one
    behaviour ``behaviour``.
    ``vocabularies``: name -> raw id as text -> id. Of a next-item model also ``outputs``: of ``items`` the vocabulary
    ``ids`` and the id of ``none``; ``k`` and ``filter_seen``. Ages are seconds from the event to the request.
    ``max_len``: the scorer keeps so many items of a history, the newest.
    """
    encoder, config = scorer.encoder, scorer.config
    inputs: dict[str, dict[str, Any]] = {}
    vocabularies: dict[str, Mapping[str, int]] = {}
    target_of = {
        name: target for group in encoder.groups for target, name in zip(group.target, group.history, strict=True)
    }
    for name, kind in inputs_of(scorer.model).items():
        inputs[name] = {"of": kind}
        field = target_of.get(name, name)
        if kind in ("age", "length"):
            continue
        table = table_of(field, encoder.features, encoder.vocabularies)
        ids = encoder.vocabularies.get(table)
        inputs[name]["column"] = encoder.columns.raw.get(field, field)
        if field in encoder.item_ids:
            table, ids, inputs[name]["column"] = field, _of_items(encoder, field), encoder.columns.item
        if field in encoder.numeric:
            inputs[name]["fill_na"] = encoder.columns.fill_na.get(field, 0.0)
        if field in encoder.columns.normalizers:
            inputs[name]["normalizer"] = list(encoder.columns.normalizers[field])
        if ids is not None:  # none of numbers and vectors
            inputs[name] |= {"ids": table, "unknown": encoder.unseen(field)}
            kept = ("category_encoder", "splitter", "values", "known")
            inputs[name] |= {key: encoder.features[field][key] for key in kept if key in encoder.features[field]}
            vocabularies[table] = ids
        if "behaviour" in encoder.features[name]:
            inputs[name]["behaviour"] = encoder.features[name]["behaviour"]
    known = ("model", "position_encoding", "metrics", "vocabulary", "versions", "created")
    return {
        **{key: config[key] for key in known if key in config},
        "max_len": max((group.max_len for group in encoder.groups), default=0),
        "inputs": inputs,
        "vocabularies": vocabularies,
    }


def _of_items(encoder: Encoder, field: str) -> dict[str, int]:
    """Raw item id as text -> the item's id of ``field``, by the catalogue."""
    assert encoder.catalogue is not None
    ids = encoder.item_ids[field][encoder.catalogue.at]
    return dict(zip(map(str, encoder.catalogue.sorted), ids.tolist(), strict=True))


def _write_onnx(program: torch.export.ExportedProgram, graph: Graph, file: Path, about: str) -> None:
    made = torch.onnx.export(
        program,
        dynamo=True,
        input_names=list(graph.inputs),
        output_names=list(graph.outputs),
        verbose=False,
        optimize=True,
    )
    assert made is not None
    for part in (made.model.graph, *made.model.functions.values()):
        for node in part:
            node.metadata_props.clear()  # where in the source it comes from
    made.model.metadata_props[KEY] = about
    made.save(str(file))


def _load_onnx(file: Path) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])

    def run(given: Mapping[str, Tensor]) -> Any:
        found = [torch.from_numpy(x) for x in session.run(None, {name: x.numpy() for name, x in given.items()})]
        return found[0] if len(found) == 1 else tuple(found)

    return run


def _write_torch(program: torch.export.ExportedProgram, graph: Graph, file: Path, about: str) -> None:
    program = program.run_decompositions({})  # the program as traced has no form on disk for autocast
    torch.export.save(program, str(file), extra_files={EXTRA: about})


def _write_aoti(program: torch.export.ExportedProgram, graph: Graph, file: Path, about: str) -> None:
    package = file.with_name("package.pt2")  # the only ending that it takes
    settings = {"aot_inductor.metadata": {KEY: about}}
    torch._inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs=settings)
    package.rename(file)


FORMATS: dict[str, tuple[Write, Load, tuple[str, ...]]] = {
    "onnx": (_write_onnx, _load_onnx, ("onnx", "onnxscript", "onnxruntime")),
    "torch": (_write_torch, lambda file: torch.export.load(str(file)).module(), ()),
    "aoti": (_write_aoti, lambda file: torch._inductor.aoti_load_package(str(file)), ()),
}
"""Format -> how it is written and loaded, and the packages that it needs."""


@contextmanager
def _new_file(output: Path) -> Iterator[Path]:
    """A file of this name in a temporary folder, which moves to its place in the end, with those beside it, or nothing
    does."""
    if not output.parent.is_dir() or output.is_dir():
        raise UserError(f"{output}: " + ("is a folder" if output.is_dir() else f"there is no folder {output.parent}"))
    with scratch_beside(output) as scratch:
        yield scratch / output.name
        for made in sorted(scratch.iterdir(), key=lambda file: file.name == output.name):
            made.replace(output.parent / made.name)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings and notes of torch's exporters, which no user can do anything about."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
