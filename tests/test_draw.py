"""``ctr-pe draw``: what is drawn is what encodings do, and a new encoding is drawn without further ado."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ctr_pe.config import model_params, parse_overrides
from ctr_pe.data.loader import BatchLoader
from ctr_pe.data.synthetic import generate
from ctr_pe.draw import picture
from ctr_pe.draw.figure import _packed, _scales
from ctr_pe.draw.measure import Attention, Effects, measure, planes
from ctr_pe.draw.panels import Image, Lines, attention, of_links
from ctr_pe.draw.runs import Drawn, Wanted, drawn, some_requests
from ctr_pe.draw.trial import AGES
from ctr_pe.errors import UserError
from ctr_pe.pe import available_pes, build_pe
from ctr_pe.pe.base import PositionEncoding
from ctr_pe.pe.vectors import Vectors
from ctr_pe.positions import Pairs, Where
from ctr_pe.study.store import Key, Result, Store, hash_of
from ctr_pe.training import Run, train

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
    return Wanted(pe.split(","), params=params, data_root=root, **changes)


def fresh(root: Path, pe: str, model: str = "DIN", options: list[str] | None = None) -> tuple[Any, dict[str, Tensor]]:
    """A model whose encoding does something, and requests."""
    small = {"DIN": SMALL, "SASRec": SMALL_SASREC}.get(model, [])
    dataset, (found,) = drawn(wanted(root, pe, model=model, set=[*small, *(options or [])]))
    torch.manual_seed(0)
    for parameter in found.before.parameters():
        nn.init.normal_(parameter, std=0.5)
    return found.before.eval(), some_requests(dataset, found.before, 100)


def effects_of(root: Path, pe: str, model: str = "DIN", options: list[str] | None = None) -> tuple[Any, Effects]:
    """The lowest unit's encoding and what it does."""
    built, batch = fresh(root, pe, model, options)
    effects = measure(built, batch, LONGEST)[0].effects[0]
    assert effects is not None
    return effects.pe, effects


@pytest.mark.parametrize("model", ["DIN", "SASRec"])
@pytest.mark.parametrize("pe", [*available_pes(), "rope+cape", "native"])
def test_every_encoding_is_drawn_and_watching_changes_nothing(root: Path, pe: str, model: str) -> None:
    built, batch = fresh(root, pe, model)
    with torch.inference_mode():
        undisturbed = built(batch)["y_pred"]
    seen: list[Tensor] = []
    encodings = [module for module in built.modules() if isinstance(module, PositionEncoding)]
    built.register_forward_hook(lambda _, __, out: seen.append(out["y_pred"]))
    units = measure(built, batch, LONGEST)
    fused = model in ("SASRec", "BST", "DMIN") and pe in ("cope", "cape", "cape_additive", "cape_time")
    # Watched, CAPE and its forms go through the hooks and not through their one operator: rounding differs.
    torch.testing.assert_close(seen[0], undisturbed, rtol=0, atol=1e-6 if fused else 0)
    assert [module for module in built.modules() if isinstance(module, PositionEncoding)] == encodings
    assert all(np.isfinite(curve.y).all() for curve in attention(pe, [("now", units)]).curves)
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
    (curve,) = attention("new", [("now", [unit])]).curves
    assert (np.diff(curve.y[:5]) < 0).all()


def test_attention_is_relative_to_an_even_share_however_long_the_history(root: Path) -> None:
    built, batch = fresh(root, "none")
    for parameter in built.attentions[0].score.parameters():
        nn.init.zeros_(parameter)
    units = measure(built, batch, LONGEST)
    assert int(units[0].items.max()) > LONGEST
    (curve,) = attention("none", [("now", units)]).curves
    np.testing.assert_allclose(curve.y, 1, rtol=1e-5)


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
    assert [panel.title for panel in of_links([("now", [holding(effects)])])] == ["Bias by age"]


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


@pytest.mark.parametrize(("pe", "sign"), [("cape", -1), ("cope", 1), ("cape_additive", -1)])
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
    assert _scales([heat(0.0)])["matrix"].vmax == 1


def test_sections_stand_side_by_side_where_they_fit() -> None:
    sections = {
        str(index): [Lines(title="", y="", curves=[])] * count for index, count in enumerate((2, 1, 3, 1, 6, 1))
    }
    packed = [[len(sections[name]) for name in row] for row in _packed(sections, 4)]
    assert packed == [[2], [1, 3], [1], [6], [1]]


# From a benchmark's store.


def stored(root: Path, store: Store, pe: str, seed: int = 0, keep: bool = True, **params: Any) -> Result:
    """A run, trained and stored as the benchmark does it."""
    from ctr_pe.data.dataset import open_dataset

    dataset = open_dataset("synthetic", root)
    small: dict[str, Any] = {"embedding_dim": 4, "attention_hidden_units": [8], "dnn_hidden_units": [8], "epochs": 1}
    params = {**model_params("DIN", "synthetic"), **small, "position_dim": 4, "learning_rate": 0.02, **params}
    params = {key: value for key, value in params.items() if key not in ("model", "dataset_id", "position_encoding")}
    params = {key: value for key, value in params.items() if key not in ("model_root", "seed", "debug_mode")}
    key = Key("DIN", dataset.dataset_id, "heldout", hash_of(params), dataset.data_hash, pe, seed)
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
        rows = BatchLoader(one.after.feature_map, dataset.split("test"), split="test")
        np.testing.assert_allclose(one.after.predict(rows), store.scores(one.result.key), atol=1e-6)
    assert not found[1].before.attentions[0].pe.table.any()
    assert found[1].after.attentions[0].pe.table.any()
    backbones = [weights_of(one) for one in found]
    assert all(torch.equal(backbones[0][name], backbones[1][name]) for name in backbones[0])


def weights_of(one: Drawn) -> dict[str, Tensor]:
    return {name: value for name, value in one.before.state_dict().items() if ".pe." not in name}


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("PDF", b"%PDF")])
def test_a_picture_of_each_kind(root: Path, store: Store, tmp_path: Path, suffix: str, start: bytes) -> None:
    out = tmp_path / "new" / f"picture.{suffix}"
    picture(out, wanted(root, "none,cape", store=store.path, set=[]))
    assert out.read_bytes().startswith(start)


def test_the_picture_says_what_has_no_effect_yet(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctr_pe.draw.LONGEST", 5)
    out = tmp_path / "fresh.svg"
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text stays text
    picture(out, wanted(root, "alibi,t5,kernel"))
    assert "No effect as initialised, they start as none: t5, kernel." in out.read_text()


def test_the_picture_says_what_it_leaves_out(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    out = tmp_path / "dmin.svg"
    picture(out, wanted(root, "none", model="DMIN", set=[]))
    assert "Shown: the lowest 3 of 6 attentions." in out.read_text()


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
    assert "ctr-pe benchmark --model DIN --pe none,cope --dataset synthetic --protocol heldout --seed 0" in message
    assert "--set embedding_dim=4" in message
    assert "batch_size" not in message  # as it is anyway
    assert f"--keep-weights --out {store.path}-weights" in message


def test_weights_that_are_none_are_one_line(root: Path, tmp_path: Path) -> None:
    made = Store(tmp_path)
    file = made.weights(stored(root, made, "none").key)
    for content in (b"", b"x" * 100):
        file.write_bytes(content)
        with pytest.raises(UserError, match="not the weights of this model") as error:
            drawn(wanted(root, "none", store=tmp_path, set=[]))
        assert "\n" not in str(error.value)
    torch.save({"nothing": torch.zeros(1)}, file)
    with pytest.raises(UserError, match="not the weights of this model"):
        drawn(wanted(root, "none", store=tmp_path, set=[]))


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


def test_the_first_seed_that_all_have(root: Path, copies: Callable[..., Store]) -> None:
    made = copies({"seed": 1}, {"seed": 2}, {"seed": 3, "pe": "none"}, {"seed": 2, "pe": "none"})
    with pytest.raises(UserError, match="cape seed 2 was stored without weights"):
        drawn(wanted(root, "cape,none", store=made.path, set=[]))


def test_without_matplotlib_the_extra_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'ctr_pe\[draw\]'"):
        picture(Path("x.png"), wanted(root, "cape"))
