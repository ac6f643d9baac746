"""``ctr-pe draw``: what is drawn is what encodings do, and a new encoding is drawn without further ado."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor, nn

from ctr_pe.config.yaml import model_params, parse_overrides
from ctr_pe.data.loader import BatchLoader
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.pe import available_pes, build_pe
from ctr_pe.pe.base import PositionEncoding
from ctr_pe.pe.vectors import Vectors
from ctr_pe.reporting.figures import picture
from ctr_pe.reporting.figures.figure import _bands, _extent, _scales
from ctr_pe.reporting.figures.measure import Attention, Effects, measure, planes
from ctr_pe.reporting.figures.panels import (
    AFTER,
    BEFORE,
    KINDS,
    Curve,
    Image,
    Lines,
    attention,
    merged,
    of_links,
)
from ctr_pe.reporting.figures.runs import Drawn, Wanted, drawn, some_requests
from ctr_pe.reporting.figures.trial import AGES
from ctr_pe.sequence.batch import JaggedBatch
from ctr_pe.sequence.positions import Pairs, Where
from ctr_pe.study.store import Result, RunKey, Store, hash_of
from ctr_pe.training import Run, train
from ctr_pe.utils.errors import UserError

LONGEST = 12
SMALL = ["embedding_dim=4", "attention_hidden_units=[8]", "dnn_hidden_units=[8]", "epochs=1", "position_dim=4"]
SMALL_SASREC = ["embedding_dim=4", "dnn_hidden_units=[8]", "num_heads=2", "position_dim=4"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generate(folder / "synthetic", users=60, valid_users=30, test_users=40, items=200, categories=10)
    return folder


def wanted(root: Path, pe: str, **changes: Any) -> Wanted:
    params = parse_overrides(changes.pop("set", SMALL))
    dataset = None if "store" in changes else "synthetic"  # a store's runs say which
    return Wanted(pe.split(","), params=params, data_root=root, **{"dataset": dataset} | changes)


def fresh(root: Path, pe: str, model: str = "DIN", options: list[str] | None = None) -> tuple[Any, JaggedBatch]:
    """A model whose encoding does something, and requests."""
    small = {"DIN": SMALL, "SASRec": SMALL_SASREC}.get(model, [])
    dataset, (found,) = drawn(wanted(root, pe, model=model, set=[*small, *(options or [])], seed=0))
    built = found.before
    torch.manual_seed(0)
    for parameter in built.parameters():
        nn.init.normal_(parameter, std=0.5)
    return built.eval(), some_requests(dataset, built, 100)


def effects_of(root: Path, pe: str, model: str = "DIN", options: list[str] | None = None) -> tuple[Any, Effects]:
    """The lowest unit's encoding and what it does."""
    built, batch = fresh(root, pe, model, options)
    effects = measure(built, batch, LONGEST)[0].effects[0]
    assert effects is not None
    return effects.pe, effects


@pytest.mark.parametrize("model", ["DIN", pytest.param("SASRec", marks=pytest.mark.slow)])
@pytest.mark.parametrize("pe", [*available_pes(), "rope+cape", "native"])
def test_every_encoding_is_drawn_and_watching_changes_nothing(root: Path, pe: str, model: str) -> None:
    built, batch = fresh(root, pe, model)
    with torch.inference_mode():
        undisturbed = built(batch)["y_pred"]
    seen: list[Tensor] = []
    encodings = [module for module in built.modules() if isinstance(module, PositionEncoding)]
    built.register_forward_hook(lambda _, __, out: seen.append(out["y_pred"]))
    units = measure(built, batch, LONGEST)
    contextual = ("cope", "cape", "cape_additive", "cape_constant", "cape_time")
    fused = model in ("SASRec", "BST", "DMIN") and pe in contextual
    # Observed, CAPE and its forms go through the hooks and not through their one operator: rounding differs.
    torch.testing.assert_close(seen[0], undisturbed, rtol=0, atol=1e-6 if fused else 0)
    assert [module for module in built.modules() if isinstance(module, PositionEncoding)] == encodings
    assert all(np.isfinite(curve.y).all() for curve in attention([("now", units)]).curves)
    panels = of_links([("now", units)])
    assert bool(panels) == (pe != "none" and (model, pe) != ("DIN", "native"))
    assert len({(panel.title, panel.unit, panel.when) for panel in panels}) == len(panels)


class Recency(PositionEncoding):
    """Nobody has heard of it."""

    def bias(self, logits: Tensor, vectors: Vectors, pairs: Pairs) -> Tensor:
        return logits + 3.0 / (1 + pairs.offset)


def test_a_new_encoding_needs_no_word_here(root: Path) -> None:
    built, batch = fresh(root, "none")
    built.attentions[0].pe = Recency(8, 50)
    for parameter in built.attentions[0].score.parameters():
        nn.init.zeros_(parameter)
    (unit,) = measure(built, batch, LONGEST)
    (panel,) = of_links([("now", [unit])])
    assert isinstance(panel, Lines)
    np.testing.assert_allclose(panel.curves[0].x, np.arange(1, LONGEST + 1))
    np.testing.assert_allclose(panel.curves[0].y, 3 / (1 + np.arange(1, LONGEST + 1)), rtol=1e-6)
    (curve,) = attention([("now", [unit])]).curves
    assert (np.diff(curve.y[:5]) < 0).all()


def test_attention_is_relative_to_an_even_share_however_long_the_history(root: Path) -> None:
    built, batch = fresh(root, "none")
    for parameter in built.attentions[0].score.parameters():
        nn.init.zeros_(parameter)
    units = measure(built, batch, LONGEST)
    assert int(units[0].items.max()) > LONGEST
    panel = attention([("now", units)])
    (curve,) = panel.curves
    np.testing.assert_allclose(curve.y, 1, rtol=1e-5)
    assert panel.title == "attention relative to uniform"
    histories = (batch["item_history"] != 0).sum(1)
    assert panel.requests is not None
    assert panel.requests.tolist() == [int((histories >= place).sum()) for place in curve.x]
    assert panel.requests.min() >= 20  # where fewer requests reach, nothing is shown


@pytest.mark.parametrize("model", ["DIN", "SASRec"])
def test_biases_without_content_are_found_by_distance(root: Path, model: str) -> None:
    pe, effects = effects_of(root, "alibi", model)
    offset = torch.arange(1, LONGEST + 1) if model == "DIN" else torch.arange(LONGEST + 1)
    assert effects.bias is not None
    torch.testing.assert_close(effects.bias, -pe.slopes.unsqueeze(1) * offset)
    assert effects.added is None
    pe, effects = effects_of(root, "t5", model)
    assert effects.bias is not None
    torch.testing.assert_close(effects.bias, pe.curve(offset, True))


@pytest.mark.parametrize("model", ["DIN", "SASRec"])
def test_a_bias_of_time_is_found_by_age(root: Path, model: str) -> None:
    pe, effects = effects_of(root, "time_bias", model)
    age, decay = torch.tensor(AGES, dtype=torch.float32), nn.functional.softplus(pe.decay).unsqueeze(1)
    bucket = torch.tensor([0, *range(1, len(AGES))])
    assert effects.bias_by_age is not None
    expected = pe.amount.unsqueeze(1) * (1 + age / 3600) ** -decay + pe.table[bucket].T
    torch.testing.assert_close(effects.bias_by_age, expected, rtol=1e-4, atol=1e-5)
    assert [panel.title for panel in of_links([("now", [holding(effects)])])] == ["bias by age"]


def holding(*effects: Effects | None) -> Attention:
    nothing = torch.zeros(1, LONGEST + 1)
    return Attention("", nothing, torch.ones(1, dtype=torch.int64), True, list(effects))


@pytest.mark.parametrize("model", ["DIN", "SASRec"])
@pytest.mark.parametrize("u", ["toeplitz", "full"])
def test_the_matrices_are_the_kernels(root: Path, model: str, u: str) -> None:
    pe, effects = effects_of(root, "kernel", model, [f"kernel_u={u}"])
    width = LONGEST + (model == "SASRec")
    for found, factor in ((effects.upper, "U"), (effects.lower, "L")):
        assert found is not None
        torch.testing.assert_close(found[0], pe.matrix(factor, width), rtol=1e-4, atol=1e-4)
    assert torch.equal(effects.upper, effects.upper.triu())  # type: ignore[union-attr]
    assert torch.equal(effects.lower, effects.lower.tril())  # type: ignore[union-attr]


def test_layers_that_share_a_matrix_have_one_picture(root: Path) -> None:
    built, batch = fresh(root, "kernel", "SASRec")
    panels = of_links([("now", measure(built, batch, LONGEST))])
    assert [(panel.title[0], panel.unit) for panel in panels] == [("U", "layer 1"), ("U", "layer 2"), ("L", "")]


@pytest.mark.parametrize(("pe", "sign"), [("cape", -1), ("cope", 1), ("cape_additive", -1), ("cape_constant", 0)])
def test_contextual_positions_are_sums_of_gates(root: Path, pe: str, sign: int) -> None:
    built, batch = fresh(root, pe)
    logits: list[Tensor] = []
    score = built.attentions[0].score
    score.register_forward_hook(lambda _, __, out: logits.append(out))
    effects = measure(built, batch, LONGEST)[0].effects[0]
    assert effects is not None
    assert effects.positions is not None
    count = int((batch["item_history"][0] != 0).sum())
    gates = torch.sigmoid(sign * logits[0][:count])  # packed, the oldest item first
    expected = gates.flip(0).cumsum(0)[:LONGEST]
    torch.testing.assert_close(effects.positions[0, 0, 1 : 1 + len(expected)], expected, rtol=1e-4, atol=1e-4)
    assert effects.positions[0, 0, 1 + count :].isnan().all()


@pytest.mark.parametrize("model", ["DIN", "SASRec"])
def test_a_rotation_is_found_by_distance(root: Path, model: str) -> None:
    pe, effects = effects_of(root, "rope", model)
    offset = torch.arange(1, LONGEST + 1) if model == "DIN" else torch.arange(LONGEST + 1)
    width = pe.head_dim
    rotated = torch.cos(offset.unsqueeze(1) * 10000.0 ** (-2 * torch.arange(width // 2) / width)).mean(1)
    assert effects.rotated is not None
    torch.testing.assert_close(effects.rotated[0], rotated, rtol=0, atol=0.1)


@pytest.mark.parametrize("options", [{}, {"rope_layout": "interleaved"}])
def test_phases_are_those_of_coordinates_that_turn_together(options: dict[str, str]) -> None:
    pe, x = build_pe("rope", 8, 10, **options), torch.randn(1, 8)
    here, there = Where(torch.zeros(1, dtype=torch.int64)), Where(torch.tensor([3]))
    before, after = planes(pe, x), planes(pe, pe.rotate(x, x, here, there)[1])
    by = torch.atan2(after[1], after[0]) - torch.atan2(before[1], before[0])
    expected = -3 * 10000.0 ** (-2 * torch.arange(4) / 8)
    torch.testing.assert_close(torch.remainder(by[0] - expected + math.pi, 2 * math.pi) - math.pi, torch.zeros(4))


def test_every_key_has_a_phase(root: Path) -> None:
    built, batch = fresh(root, "euler")
    effects = measure(built, batch, LONGEST)[0].effects[0]
    assert effects is not None
    assert effects.phases is not None
    counts = (batch["item_history"] != 0).sum(1)
    reaching = torch.tensor([int((counts >= distance).sum()) for distance in range(1, LONGEST + 1)])
    assert torch.equal(effects.phases[:, 1:].sum(-1), reaching.expand(4, -1).float())


def test_attention_is_what_the_model_uses(root: Path) -> None:
    sums = {}
    for model in ("DIN", "DIEN"):
        built, batch = fresh(root, "pdm", model)
        sums[model] = measure(built, batch, 50)[0].weights.nansum(1)
    torch.testing.assert_close(sums["DIN"], torch.full((100,), 2.0))
    torch.testing.assert_close(sums["DIEN"], torch.full((100,), 1.0))  # it reads no pooled values


def test_panels_of_a_kind_have_one_colour_scale_in_which_the_diagonal_hides_nothing() -> None:
    def heat(beside: float) -> Image:
        return Image(title="", values=np.array([[1.0, beside], [0.0, 1.0]]), kind="matrix")

    scale = _scales([heat(0.1), heat(-0.3)])["matrix"]
    assert (scale.vmin, scale.vmax) == (-0.3, 0.3)
    assert _scales([heat(0.0)])["matrix"].vmax == 0.1  # rounding errors are no signal
    cosine = Image(title="", values=np.array([[1.0, 0.12], [0.12, 1.0]]), kind="cosine")
    assert _scales([cosine])["cosine"].vmax == 1


def line(name: str, *y: float, when: str = "now", **more: Any) -> Lines:
    return Lines(title=name, name=name, y="", curves=[Curve(when, np.arange(len(y)), np.array(y))], **more)


def test_a_grid_has_an_encoding_per_column_and_a_kind_per_row() -> None:
    both = [line("attention", 1, 1), line("bias", 0, 1)]
    columns = {"none": both[:1], "rope": [both[0], line("rotation", 1, 1)], "cape": both}
    (band,) = _bands(columns, 7.0)
    assert band.names == ["none", "rope", "cape"]
    shown = [[[panel.name for panel in cell] for cell in row.cells] for row in band.rows]
    assert shown == [[["attention"]] * 3, [[], [], ["bias"]], [[], ["rotation"], []]]
    narrow = _bands({str(number): both for number in range(7)}, 3.35)
    assert [len(band.names) for band in narrow] == [3, 3, 1]
    assert [len(row.cells) for band in narrow for row in band.rows] == [3] * 6  # of one width
    (single,) = _bands({"cape": [*both, line("rotation", 1, 1)]}, 7.0)
    assert [[len(cell) for cell in row.cells] for row in single.rows] == [[1, 1, 1]]


def test_before_and_after_share_a_cell_where_it_is_wide() -> None:
    pair = [line("positions", 1, 2, when="", share=True), line("positions", 1, 3, when="", share=True)]
    pair = [dataclasses.replace(panel, when=when) for panel, when in zip(pair, (BEFORE, AFTER), strict=True)]
    columns = {"none": [line("attention", 1, 1)], "cape": [line("attention", 1, 1), *pair]}
    assert [[len(cell) for cell in row.cells] for row in _bands(columns, 7.0)[0].rows] == [[1, 1], [0, 2]]
    narrow = _bands(columns, 3.35)[0].rows
    assert [[len(cell) for cell in row.cells] for row in narrow] == [[1, 1], [0, 1], [0, 1]]
    assert narrow[1].limits == narrow[2].limits  # the two can be compared


def test_axes_have_a_least_height_and_a_row_has_common_ones() -> None:
    flat = line("attention", 0.99, 1.01, share=True, least=(0.5, 1.5))
    steep = line("attention", 0.2, 4.0, share=True, least=(0.5, 1.5))
    assert _extent(flat) == (0.5, 1.5)
    low, high = _extent(steep)
    assert low < 0.2
    assert high > 4.0
    (band,) = _bands({"none": [flat], "cape": [steep]}, 7.0)
    assert band.rows[0].limits == (low, high)


def test_seeds_are_averaged_with_a_band_of_their_spread() -> None:
    def of_seed(shift: float) -> list[Any]:
        curves = [
            Curve(BEFORE, np.arange(2), np.array([0.0, shift])),
            Curve(AFTER, np.arange(2), np.array([1.0, 2.0 + shift])),
            Curve(
                AFTER, np.arange(2), np.array([0.0, 0.0]), "mean", 1, (np.full(2, -1 - shift), np.full(2, 1 + shift))
            ),
        ]
        heat = Image(title="L", name="l", values=np.full((2, 2), shift), kind="matrix")
        rings = Image(title="phases", name="phases", values=np.full((2, 2), shift), kind="density")
        return [Lines(title="bias", name="bias", y="", curves=curves), heat, rings]

    lines, heat, rings = cast(list[Any], merged([of_seed(0.0), of_seed(1.0), of_seed(5.0)]))
    before, after, over_requests = lines.curves
    assert before.band is None
    np.testing.assert_allclose(before.y, [0, 2])
    np.testing.assert_allclose(after.y, [1, 4])
    spread = np.std([2.0, 3.0, 7.0], ddof=1)
    np.testing.assert_allclose(after.band, [[1, 4 - spread], [1, 4 + spread]])
    np.testing.assert_allclose(over_requests.band, [[-3, -3], [3, 3]])  # of the requests, averaged
    np.testing.assert_allclose(heat.values, 2)
    np.testing.assert_allclose(rings.values, 0)  # planes of two seeds have nothing in common
    (alone, *_) = cast(list[Any], merged([of_seed(1.0)]))
    assert alone.curves[1].band is None


def test_the_seeds_of_a_new_encoding_are_those_of_a_benchmark(root: Path) -> None:
    _, found = drawn(wanted(root, "naive"))
    assert [one.run.seed for one in found] == [0, 1, 2, 3, 4]
    dataset, batch = found[0].dataset, some_requests(found[0].dataset, found[0].before, 100)
    assert dataset.dataset_id == "synthetic"
    measured = [[("now", measure(one.before, batch, LONGEST))] for one in found]
    panels = merged([[attention(moments), *of_links(moments)] for moments in measured])
    assert isinstance(panels[0], Lines)
    assert panels[0].curves[0].band is not None
    assert {panel.name for panel in panels} == {"attention", "vectors"} <= KINDS.keys()


# From a benchmark's store.


def stored(root: Path, store: Store, pe: str, seed: int = 0, keep: bool = True, **params: Any) -> Result:
    """A run, trained and stored as the benchmark does it."""
    from ctr_pe.data.dataset import open_dataset

    dataset = open_dataset("synthetic", root)
    small: dict[str, Any] = {"embedding_dim": 4, "attention_hidden_units": [8], "dnn_hidden_units": [8], "epochs": 1}
    params = {**model_params("DIN", "synthetic"), **small, "position_dim": 4, "learning_rate": 0.02, **params}
    params = {key: value for key, value in params.items() if key not in ("model", "dataset_id", "position_encoding")}
    params = {key: value for key, value in params.items() if key not in ("model_root", "seed", "debug_mode")}
    key = RunKey("DIN", dataset.dataset_id, "heldout", hash_of(params), dataset.data_hash, pe, seed)
    weights = store.weights(key) if keep else None
    outcome = train(Run("DIN", dataset.path, pe, seed, params=params, weights=weights))
    facts: dict[str, Any] = {"revision": None, "versions": {}, "seconds": 1.0, "threads": 1, "finished": ""}
    result = Result(
        **{name: value for name, value in key._asdict().items() if name != "device"},
        **facts,
        metrics=outcome.metrics,
        epoch=outcome.epoch,
        parameters=outcome.parameters,
        params=params,
    )
    store.append(result, outcome.scores)
    return result


@pytest.fixture(scope="module")
def store(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """none and cape at seed 0 with weights; cope without."""
    made = Store(tmp_path_factory.mktemp("store"))
    stored(root, made, "none")
    stored(root, made, "cape")
    stored(root, made, "cope", keep=False)
    return made


def test_before_is_the_first_step_and_after_gives_the_stored_scores(root: Path, store: Store) -> None:
    dataset, found = drawn(wanted(root, "none,cape", store=store.path, set=[]))
    assert [one.run.pe for one in found] == ["none", "cape"]
    for one in found:
        assert one.result is not None
        after = one.after
        rows = BatchLoader(after.feature_map, dataset.split("test"), split="test")
        np.testing.assert_allclose(after.predict(rows), store.scores(one.result.key), atol=1e-6)
    assert not found[1].before.attentions[0].pe.table.any()
    assert found[1].after.attentions[0].pe.table.any()
    backbones = [weights_of(one) for one in found]
    assert all(torch.equal(backbones[0][name], backbones[1][name]) for name in backbones[0])


def weights_of(one: Drawn) -> dict[str, Tensor]:
    return {name: value for name, value in one.before.state_dict().items() if ".pe." not in name}


@pytest.mark.parametrize(
    ("suffix", "start"),
    [
        ("png", b"\x89PNG"),
        pytest.param("svg", b"<?xml", marks=pytest.mark.slow),
        pytest.param("PDF", b"%PDF", marks=pytest.mark.slow),
    ],
)
def test_a_picture_of_each_kind(root: Path, store: Store, tmp_path: Path, suffix: str, start: bytes) -> None:
    out = tmp_path / "new" / f"picture.{suffix}"
    picture(out, wanted(root, "none,cape", store=store.path, set=[]))
    assert out.read_bytes().startswith(start)


def test_the_picture_says_what_has_no_effect_yet(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctr_pe.reporting.figures.LONGEST", 5)
    out = tmp_path / "fresh.svg"
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text stays text
    picture(out, wanted(root, "alibi,t5,kernel", seed=0))
    assert "No effect as initialised, they start as none: t5, kernel." in out.read_text()


def test_the_picture_says_what_it_leaves_out(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    out = tmp_path / "dmin.svg"
    picture(out, wanted(root, "none", model="DMIN", set=[], seed=0))
    assert "Shown: the lowest 3 of 6 attentions." in out.read_text()


def test_the_picture_and_the_terminal_say_how_many_requests_there_are(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    picture(tmp_path / "a.svg", wanted(root, "none", seed=0))
    said = capsys.readouterr().err
    assert "a.svg: DIN on synthetic, seed 0" in said
    (places,) = [text for text in said.splitlines() if "Requests with an item at a place: " in text]
    assert "at 1, " in places
    assert "Cut off after " in places
    picture(tmp_path / "b.svg", wanted(root, "cape,alibi"))
    written = (tmp_path / "b.svg").read_text()
    assert "Bands: ± one standard deviation over seeds 0 to 4." in written
    assert places.split(". Cut")[0].strip() in (tmp_path / "a.svg").read_text()


def test_a_picture_of_one_history(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest of the test rows; ``dpi`` sets the pixels."""
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    dataset, (found, *_) = drawn(wanted(root, "cape", seed=0))
    history = found.before.groups[0].history[0]
    every = pl.read_parquet(dataset.split("test"))[history].list.len().to_list()
    three = some_requests(dataset, found.before, 3, longest=True)
    assert three.lengths[history].tolist() == sorted(every, reverse=True)[:3]
    picture(tmp_path / "one.svg", wanted(root, "cape", seed=0), longest_histories=1)
    text = (tmp_path / "one.svg").read_text()
    assert f"Its {max(every)} items." in text
    assert "1 test request;" in text
    for dpi in (50, 100):
        picture(tmp_path / f"{dpi}.png", wanted(root, "alibi", seed=0), ["bias"], longest_histories=1, dpi=dpi)
        width = int.from_bytes((tmp_path / f"{dpi}.png").read_bytes()[16:20])
        assert width == 7 * dpi


def test_only_some_panels(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    out = tmp_path / "a.svg"
    picture(out, wanted(root, "alibi,rope", seed=0), only=["rotation"])
    text = out.read_text()
    assert "rotation by distance" in text
    assert "bias by distance" not in text
    assert "items back: one request in ten reaches further." in text
    assert "attention relative" not in text
    for only, message in (
        {"rotations": "did you mean 'rotation'?", "l": "alibi, rope have no such panel: (attention, "}
    ).items():
        with pytest.raises(UserError) as error:
            picture(out, wanted(root, "alibi,rope", seed=0), only=[only])
        assert message in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("size", "width"), [("column", 3.35), ("page", 7.0)])
def test_a_picture_is_as_wide_as_asked(root: Path, tmp_path: Path, size: str, width: float) -> None:
    picture(tmp_path / "a.png", wanted(root, "none,alibi", seed=0), only=["attention"], size=size)
    with (tmp_path / "a.png").open("rb") as stream:
        assert int.from_bytes(stream.read(20)[16:]) == round(300 * width)
    with pytest.raises(UserError, match="--size colum: no such size: did you mean 'column'"):
        picture(tmp_path / "a.png", wanted(root, "none"), size="colum")


@pytest.mark.parametrize(
    ("pe", "changes", "message"),
    [
        ("cop", {}, "did you mean 'cope'?"),
        ("cape", {"out": Path("x.jpg")}, "--out x.jpg"),
        ("cape", {"store": Path("nowhere")}, "nowhere: no results of a benchmark: `ctr-pe benchmark --pe cape "),
        ("cape", {"model": "DIM"}, "did you mean 'DIN'?"),
        ("cape", {"model": "BST", "store": ...}, "no run with --model BST: (DIN)"),
        ("rope", {"store": ...}, "no run with encoding 'rope': did you mean 'cope'? (cape, cope, none)"),
        ("cape", {"seed": 3, "store": ...}, "no run with --seed 3: (0)"),
        ("cape", {"dataset": "mine"}, "no data set 'mine'"),
        ("cape", {"set": ["embedding_dim=5"], "store": ...}, "--set embedding_dim=5: (4)"),
        ("cape", {"set": ["seed=5"]}, "--set seed: use --seed"),
    ],
)
def test_mistakes_are_one_line(
    root: Path, store: Store, tmp_path: Path, pe: str, changes: dict[str, Any], message: str
) -> None:
    changes = {name: store.path if value is ... else value for name, value in changes.items()}
    given = {"set": [] if "store" in changes else SMALL} | changes
    with pytest.raises(UserError) as error:
        picture(given.pop("out", tmp_path / "x.png"), wanted(root, pe, **given))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_run_without_weights_names_the_command_that_makes_them(root: Path, store: Store) -> None:
    with pytest.raises(UserError) as error:
        drawn(wanted(root, "none,cope", store=store.path, set=[]))
    message = str(error.value)
    assert "DIN cope seed 0" in message
    assert "ctr-pe benchmark --model DIN --pe none,cope --dataset synthetic --protocol heldout --repeats 1" in message
    assert "--set embedding_dim=4" in message
    assert "batch_size" not in message  # as it is anyway
    assert f"--keep-weights --out {store.path}-weights" in message


def test_weights_that_are_none_are_one_line(root: Path, tmp_path: Path) -> None:
    made = Store(tmp_path)
    file = made.weights(stored(root, made, "none").key)
    for content in (b"", b"x" * 100):
        file.write_bytes(content)
        with pytest.raises(UserError, match="not the weights of this model") as error:
            picture(tmp_path / "x.png", wanted(root, "none", store=tmp_path, set=[]))
        assert "\n" not in str(error.value)
    torch.save({"nothing": torch.zeros(1)}, file)
    with pytest.raises(UserError, match="not the weights of this model"):
        picture(tmp_path / "x.png", wanted(root, "none", store=tmp_path, set=[]))


def test_runs_on_other_data_are_not_drawn(store: Store, tmp_path: Path) -> None:
    generate(tmp_path / "synthetic", users=20, valid_users=10, test_users=10, items=50, categories=5)
    with pytest.raises(UserError, match="not the data that the runs"):
        drawn(wanted(tmp_path, "none", store=store.path, set=[]))


@pytest.fixture
def copies(store: Store, tmp_path: Path) -> Callable[..., Store]:
    """A store of made-up runs like that of cape."""
    like = next(result for result in store.read().values() if result.pe == "cape")

    def make(*changes: dict[str, Any]) -> Store:
        made = Store(tmp_path)
        for changed in changes:
            params = {**like.params, **changed.pop("params", {})}
            record = {**vars(like), "config_hash": hash_of(params), "params": params, **changed}
            made.append(Result(**record), np.zeros(1, np.float32))
        return made

    return make


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([{"model": "DIN"}, {"model": "BST"}], "differ in model (BST, DIN): choose with --model …"),
        ([{}, {"params": {"epochs": 7}}], "differ in epochs (1, 7): choose with --set epochs=…"),
        ([{}, {"protocol": "paper"}], "differ in protocol (heldout, paper)"),
        ([{"pe": "none", "seed": 1}, {"seed": 2}], "no seed at which"),
    ],
)
def test_runs_that_cannot_be_told_apart(
    root: Path, copies: Callable[..., Store], changes: list[dict[str, Any]], message: str
) -> None:
    made = copies(*changes)
    with pytest.raises(UserError) as error:
        drawn(wanted(root, "none,cape" if "pe" in changes[0] else "cape", store=made.path, set=[]))
    assert message in str(error.value)


def test_all_seeds_that_all_have_with_weights(root: Path, copies: Callable[..., Store]) -> None:
    made = copies(
        *({"seed": seed, "pe": pe} for pe in ("cape", "none") for seed in range(1, 6) if (pe, seed) != ("none", 1))
    )
    with pytest.raises(UserError, match="cape seed 2 was stored without weights"):
        drawn(wanted(root, "cape,none", store=made.path, set=[]))
    for result in made.read().values():
        if (result.pe, result.seed) != ("none", 3):
            made.weights(result.key).parent.mkdir(exist_ok=True)
            made.weights(result.key).touch()
    _, found = drawn(wanted(root, "cape,none", store=made.path, set=[]))
    assert [(one.pe, one.run.seed) for one in found] == [(pe, seed) for pe in ("cape", "none") for seed in (2, 4, 5)]
    assert sum(one.left_out for one in found) == 3  # said in the picture
    _, found = drawn(wanted(root, "cape,none", store=made.path, set=[], seed=4))
    assert [one.run.seed for one in found] == [4, 4]


def test_without_matplotlib_the_extra_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'ctr_pe\[draw\]'"):
        picture(Path("x.png"), wanted(root, "cape"))
