"""Exported models: the padded form gives the scores of the ragged one, and files those of the model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ctr_pe import CTRRanker, model_zoo
from ctr_pe.cli import main
from ctr_pe.commands import export as command
from ctr_pe.ops import native
from ctr_pe.pe.base import PositionEncoding
from ctr_pe.sequence.dense import Dense, align
from ctr_pe.sequence.positions import Positions
from ctr_pe.serving.export import FORMATS, check, description, export_model
from ctr_pe.serving.request_graph import RequestGraph, histories_in, inputs_of, random_request, requests
from ctr_pe.units import SelfAttention, TargetAttention
from ctr_pe.units.transformer import Transformer
from ctr_pe.utils.errors import UserError
from tests.support.encoding_cases import CASES, factory, known
from tests.support.models import ENCODINGS, PARAMS, SMALL, VARIANTS, build, feature_map, randomised, some_pairs

B, K, D, L, MAX_LEN = 5, 4, 8, 9, 6
COUNTS = torch.tensor([6, 0, 1, 3, 9])  # empty, one item, and longer than the tables of 6


def same_scores(model: Any) -> None:
    graph = RequestGraph(randomised(model))

    def run(given: Any) -> Tensor:
        with native.portable():
            return graph(given)

    check(graph, run, "the padded form")


@some_pairs(SMALL, ENCODINGS, 1, of=3)
def test_padded_form_of_every_backbone_and_encoding(name: str, encoding: str, tmp_path: Path) -> None:
    same_scores(build(name, tmp_path, position_encoding=encoding))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("encoding", ["cape", "naive"])
def test_padded_form_of_every_variant(variant: str, encoding: str, tmp_path: Path) -> None:
    name, options = VARIANTS[variant]
    same_scores(build(name, tmp_path, position_encoding=encoding, **options))


def both(history: Tensor) -> list[tuple[Positions, Tensor]]:
    """Padded positions and ragged ones, each with its packed items: left-padded, and zero there."""
    mask = torch.arange(L) >= L - COUNTS.unsqueeze(1)
    age = torch.arange(L, 0, -1).mul(86_399).add(7).expand(B, L)
    history = history * mask.unsqueeze(-1)
    return [(at, at.pack(history)) for at in (Dense.from_mask(mask, age), Positions.from_mask(mask, age))]


@pytest.mark.parametrize("case", CASES)
def test_padded_form_of_units(case: str) -> None:
    """Target attention with one target and with K, self-attention in both directions, a stack of causal blocks."""
    torch.manual_seed(0)
    history, target = torch.randn(B, L, D), torch.randn(B, K, D)
    pe = factory(case)(D, MAX_LEN, 1)
    attention = randomised(TargetAttention(pe.out_dim, "din", pe))
    for targets in (target[:, 0], target):
        results = []
        for at, items in both(history):
            pairs = at.target_pairs(known(items), known(targets))
            results.append(attention(*pe.embed(targets, items, at), at, pairs))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for causal in (True, False):
        pe = factory(case)(D, MAX_LEN, 2)
        unit = randomised(SelfAttention(pe.out_dim, 2, pe, causal))
        found, wanted = (
            at.unpack(unit(pe.embed(None, items, at)[1], at, at.item_pairs(causal, known(items))))
            for at, items in both(history)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)

    def fresh() -> PositionEncoding:
        return factory(case)(D, MAX_LEN + 1, 2)

    lowest = fresh()
    stack = randomised(Transformer([lowest, lowest.next_layer(fresh)], causal=True))
    found, wanted = (
        stack.of_target(*lowest.embed(target[:, 0], items, at), at, (known(items), known(target[:, 0])))[0]
        for at, items in both(history)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_align_moves_items_to_the_last_slots() -> None:
    ids = torch.tensor([[0, 5, 0, 7, 8], [1, 2, 0, 0, 0], [0, 0, 0, 0, 0], [1, 2, 3, 4, 5]])
    mask, moved, same = align(ids != 0, ids, ids * 10, longest=4)
    wanted = torch.tensor([[0, 0, 5, 7, 8], [0, 0, 0, 1, 2], [0, 0, 0, 0, 0], [0, 2, 3, 4, 5]])
    assert torch.equal(mask, wanted != 0)
    assert torch.equal(moved * mask, wanted)
    assert torch.equal(same * mask, wanted * 10)


@pytest.mark.parametrize("shared", [True, False])
def test_fields_of_the_request_and_two_histories(shared: bool, tmp_path: Path) -> None:
    """A field with one value for all targets of a request, one with a value for each, and numbers; histories of one
    age, which have one length, or of which one has no age and a length of its own."""
    spec = {"type": "categorical", "padding_idx": 0, "vocab_size": 5}
    price = {"type": "numeric", "source": "item"}
    features = feature_map(tmp_path, hour=spec | {"source": "context"}, offer=spec, price=price)
    groups = {"target_field": [["item_id"], ["cate_id"]], "sequence_field": [["item_history"], ["cate_history"]]}
    model = model_zoo.DIN(
        features, gpu=-1, model_root=str(tmp_path), position_encoding=["time_bias", "time_bias" if shared else "cape"],
        **(PARAMS | SMALL["DIN"] | groups | {"age_field": ["age_history", "age_history" if shared else None]})
    )  # fmt: skip
    assert inputs_of(model) == {
        "item_history": "history", "age_history": "age", "item_history_length": "length", "cate_history": "history",
        "cate_history_length": "length", "item_id": "target", "cate_id": "target", "hour": "request",
        "offer": "target", "price": "target",
    }  # fmt: skip
    same_scores(model)


def test_requests_are_hard(tmp_path: Path) -> None:
    """Empty histories, one item, histories longer than the model was built for, items without an id at either end."""
    model = build("DIN", tmp_path, position_encoding="time_bias")
    given = list(requests(model))
    lengths = torch.cat([one["item_history_length"] for one in given])
    assert {0, 1} <= set(lengths.tolist())
    assert lengths.max() > model.groups[0].max_len
    rows = [
        ids[:length].tolist()
        for one in given
        for ids, length in zip(one["item_history"], one["item_history_length"].tolist(), strict=True)
    ]
    assert all(any(row and row[end] == 0 for row in rows) for end in (0, -1))
    one = random_request(model, 3, 5, 4)
    assert {name: tuple(x.shape) for name, x in one.items()}["item_id"] == (3, 4)


def test_a_file_with_other_scores_is_refused_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, file = randomised(build("DIN", tmp_path, position_encoding="cape")), tmp_path / "model.x"
    file.write_text("an earlier file")

    def write(program: object, inputs: object, file: Path, about: str) -> None:
        file.write_text(about)

    def load(file: Path) -> Callable[[Any], Tensor]:
        return lambda given: model.score_candidates(model.encode(histories_in(model, given)), given) + 2e-4

    monkeypatch.setitem(FORMATS, "x", (write, load, ()))
    monkeypatch.setattr("ctr_pe.serving.export.trace", lambda graph: None)
    with pytest.raises(UserError, match=r"model\.x: not written: scores of 1 requests with 1 targets differ"):
        export_model(model, {}, "x", file)
    assert file.read_text() == "an earlier file"
    assert [path.name for path in tmp_path.glob("model.x*")] == ["model.x"]


@pytest.mark.parametrize(
    ("kind", "output", "line"),
    [("onyx", "f", "format 'onyx' is unknown: did you mean 'onnx'"), ("onnx", "no/f", "there is no folder")],
)
def test_mistakes(kind: str, output: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=line):
        export_model(build("DIN", tmp_path), {}, kind, tmp_path / output)


def test_the_command_knows_the_formats() -> None:
    assert tuple(FORMATS) == command.FORMATS


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(UserError, match=r"needs onnxscript: pip install 'ctr_pe\[export\]'"):
        export_model(build("DIN", tmp_path), {}, "onnx", tmp_path / "f")


def served(checkout: Path) -> str:
    """The example of docs/pipeline.md that serves a file without torch."""
    text = (checkout / "docs/pipeline.md").read_text(encoding="utf-8")
    return text.split("## Serve it without torch")[1].split("```python\n")[1].split("```")[0]


def run_without_torch(code: str, folder: Path) -> list[float]:
    """What the example prints, in a process that cannot import torch or this package."""
    for name in ("torch", "ctr_pe"):
        (folder / f"{name}.py").write_text("raise ImportError('not here')")
    ended = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return [float(number) for number in ended.stdout.replace("[", "").replace("]", "").split()]


def test_the_command_exports_a_click_model_without_options_of_others(
    ranker: CTRRanker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[tuple[str, Path]] = []
    monkeypatch.setattr(
        "ctr_pe.serving.export.export_model", lambda model, about, kind, output: written.append((kind, output))
    )
    ranker.save(tmp_path / "model")
    command = ["export", "--model", str(tmp_path / "model"), "--format", "onnx", "--output", str(tmp_path / "f")]
    assert main(command) == 0
    assert written == [("onnx", tmp_path / "f")]
    for option in (["--k", "3"], ["--filter-seen"], ["--no-filter-seen"]):
        assert main([*command, *option]) == 2
        assert "of next-item models; the file of a click model scores the targets" in capsys.readouterr().err


@pytest.mark.slow
def test_raw_ids_through_onnx_without_torch(
    ranker: CTRRanker, checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command, and the example of the docs: twenty lines that give the scorer's scores."""
    ranker.save(tmp_path / "model")
    output = tmp_path / "served" / "model.onnx"
    output.parent.mkdir()
    assert main(["export", "--model", str(tmp_path / "model"), "--format", "onnx", "--output", str(output)]) == 0
    assert "scores as the model's" in capsys.readouterr().out
    assert [path.name for path in output.parent.iterdir()] == ["model.onnx"]
    assert b"pipeline/graph.py" not in output.read_bytes()  # no paths of this machine
    code = served(checkout)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    found = run_without_torch(code, output.parent)
    scorer = ranker.scorer_
    wanted = scorer.score_one(["item 3", "item 17", "item 5"], ["item 1", "item 2", "an unknown item"])
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_what_a_file_says_of_itself(ranker: CTRRanker) -> None:
    about = json.loads(json.dumps(description(ranker.scorer_)))
    encoder = ranker.scorer_.encoder
    assert about["model"] == "DIN"
    assert about["inputs"]["item_history"]["of"] == "history"
    assert about["max_len"] == encoder.groups[0].max_len
    assert about["inputs"].pop("item_history_length") == {"of": "length"}
    for name in about["inputs"].values():
        assert name["column"] == "item_id"
        assert set(about["vocabularies"][name["ids"]]) == {f"item {i}" for i in range(45)}
    ids = about["vocabularies"]["cate_id"]
    assert all(ids[f"item {i}"] == ids[f"item {i + 6}"] for i in range(39))  # the item's own category


def exported(name: str, encoding: str, kind: str, folder: Path, **options: Any) -> Path:
    file = folder / f"{name}-{encoding}"
    export_model(randomised(build(name, folder, position_encoding=encoding, **options)), {"mine": "yes"}, kind, file)
    return file


SHALLOW: dict[str, dict[str, Any]] = {"SASRec": {"num_blocks": 1}, "BST": {"stacked_transformer_layers": 1}}


SLOW_TO_TRACE = ("DIEN AIGRU", "BST short", "DMIN unrefined")
"""What these compute is in the graphs of other forms, too."""
EXPORTED = {
    form: (name, SHALLOW.get(name, {}) | options)
    for form, (name, options) in VARIANTS.items()
    if form not in SLOW_TO_TRACE
}
EXPORTED |= {name: (name, SHALLOW.get(name, {})) for name in SMALL}
OWN = ("dif", "euler", "fox", "kernel")
"""In self-attention they do more than add a bias."""
FORMS = [
    *EXPORTED,
    *("SASRec" if pe in OWN else "DIN" for pe in ENCODINGS[len(EXPORTED) :]),
]  # DIN's export is quickest


@pytest.mark.slow
@pytest.mark.parametrize(("form", "encoding"), [*zip(FORMS, ENCODINGS, strict=True)])
def test_onnx_of_every_backbone_variant_and_encoding(form: str, encoding: str, tmp_path: Path) -> None:
    """Each at least once, for an export takes long; the padded form that is exported is compared above for all pairs.
    export_model compares the scores."""
    name, options = EXPORTED[form]
    file = exported(name, encoding, "onnx", tmp_path, **options)
    import onnx

    model = onnx.load(file)
    assert {node.domain for node in model.graph.node} <= {"", "pkg.torch.__subgraph__"}
    assert json.loads({p.key: p.value for p in model.metadata_props}["ctr_pe"])["mine"] == "yes"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "encoding"), [("DIN", "cape"), ("DIEN", "kernel"), ("BST", "rope")])
def test_programs_of_torch(name: str, encoding: str, tmp_path: Path) -> None:
    file = exported(name, encoding, "torch", tmp_path, **SHALLOW.get(name, {}))
    extra = {"ctr_pe.json": ""}
    program = torch.export.load(str(file), extra_files=extra)
    assert json.loads(extra["ctr_pe.json"])["mine"] == "yes"
    operators = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [name for name in operators if name.startswith("ctr_pe")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "encoding"), [("DIN", "cape")])
def test_packages_compiled_ahead_of_time(name: str, encoding: str, tmp_path: Path) -> None:
    file = exported(name, encoding, "aoti", tmp_path)
    about = torch._inductor.aoti_load_package(str(file)).get_metadata()["ctr_pe"]
    assert json.loads(about)["mine"] == "yes"
