"""Triton's kernels give what torch gives in float64: number by number through its interpreter, or on a GPU.

Run by ``test_triton.py``, in a process that has ``TRITON_INTERPRET=1``: there the doors of the operators take float32,
bfloat16 and float16 on the CPU to Triton, as they do on a GPU. Without it they run on the GPU, by ``test_gpu.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmark import kernels
from ctr_pe import Positions, build_pe
from ctr_pe.ops import accelerator
from ctr_pe.ops.contextual import contextual_attention, contextual_bias
from ctr_pe.ops.contextual import gpu as contextual
from ctr_pe.ops.dropout import in_torch, keep_mask, keep_mask_gpu, least
from ctr_pe.units import SelfAttention, TargetAttention
from tests.support.comparing import outcome

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where an exponential is 0 or infinite
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
TF32 = 1e-3
DEVICE = "cpu" if accelerator.INTERPRETED else "cuda"
SEED = torch.tensor([-(2**62) - 5], device=DEVICE)


@pytest.fixture(autouse=True)
def _on_the_device() -> Iterator[None]:
    """New memory is NaN there, so that what a kernel should have written and did not shows."""
    assert accelerator.USABLE
    torch.use_deterministic_algorithms(True, warn_only=DEVICE == "cuda")
    with torch.device(DEVICE):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Which kernels are launched, and how often."""
    seen, launch = Counter[str](), accelerator.launch

    def noting(kernel: Any, *given: Any, **constants: Any) -> None:
        seen[kernel.__name__] += 1
        launch(kernel, *given, **constants)

    monkeypatch.setattr(accelerator, "launch", noting)
    return seen


class Case:
    """Random operands of contextual positions."""

    def __init__(
        self, seed: int, rows: int, heads: int, queries: int, keys: int, dim: int, places: int, share: float = 0.7
    ) -> None:
        torch.manual_seed(seed)
        self.gated, self.stepped, self.sign = seed % 3 > 0, seed % 4 > 1, 1.0 - seed % 3
        width = 5 + seed % 14 if self.gated else dim
        self.shape, self.allowed = (rows, heads, queries, keys), torch.rand(rows, 1, queries, keys) < share
        self.allowed[:1, :, :1] = False
        self.query = torch.randn(rows, queries, heads, dim)
        self.key, self.value = torch.randn(2, rows, keys, heads, dim)
        self.learned = [torch.randn(places, width)]
        self.learned += [torch.randn(width, dim) / dim**0.5, torch.randn(width) / 4] if self.gated else []
        self.learned += [torch.rand(rows, heads, keys)] if self.stepped else []

    def operands(self, learned: tuple[Tensor, ...]) -> tuple[Any, ...]:
        gate = (learned[1], learned[2]) if self.gated else None
        return learned[0], self.allowed, gate, learned[-1] if self.stepped else None

    def attention(self, dropout: tuple[Tensor, float] | None = None) -> Callable[..., Tensor]:
        def call(query: Tensor, key: Tensor, value: Tensor, *learned: Tensor) -> Tensor:
            options = {"sign": self.sign, "scale": 0.5, "product": 0.7, "dropout": dropout}
            return contextual_attention(query, key, value, *self.operands(learned), **options)

        return call

    def bias(self, among_items: bool) -> Callable[..., Tensor]:
        def call(logits: Tensor, query: Tensor, likeness: Tensor | None, *learned: Tensor) -> Tensor:
            table, allowed, gate, steps = self.operands(learned)
            options = {"sign": self.sign, "scale": 0.5, "among_items": among_items}
            return contextual_bias(logits, query, table, allowed, gate, steps, likeness, **options) * allowed

        return call


def compare(call: Callable[..., Tensor], *given: Tensor, factor: float = 1.0) -> None:
    """Values and gradients are those in float64 of the same numbers."""
    for got, want in zip(outcome(call, *given), outcome(call, *(x.double() for x in given)), strict=True):
        tolerance = factor * TOLERANCE[got.dtype]
        assert got.shape == want.shape
        assert not got.numel() or float((got - want).abs().max()) <= tolerance * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("rate", [None, 0.4, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_attention_equals_the_reference(seed: int, rate: float | None) -> None:
    share = (0.1, 0.7)[seed % 2]
    case = Case(seed, 1 + seed % 2, 2, 3 + 4 * seed, 7 + 6 * seed, 4 + 3 * seed, 20 - 3 * seed, share)
    call = case.attention(None if rate is None else (SEED, rate))
    compare(call, case.query, case.key, case.value, *case.learned, factor=4)
    assert (call(case.query, case.key, case.value, *case.learned)[0, 0] == 0).all()


@pytest.mark.parametrize("among_items", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_bias_equals_the_reference(seed: int, apart: bool, among_items: bool) -> None:
    case = Case(seed, 2, 2, 1 + 9 * (seed % 2), 5 + 14 * seed, 5 + 6 * seed, 22 - 4 * seed)
    rows, _, queries, keys = case.shape
    likeness = [3 * torch.randn(rows, 1, queries, keys)] if apart else []
    whole = case.bias(among_items)
    call = whole if apart else lambda logits, query, *learned: whole(logits, query, None, *learned)
    compare(call, 4 * torch.randn(case.shape), case.query.transpose(1, 2), *likeness, *case.learned, factor=4)


def test_a_layer_is_three_launches(launched: Counter[str]) -> None:
    """Dropout's mask is made in them."""
    case = Case(2, 2, 2, 3, 6, 4, 5)
    outcome(case.attention((SEED, 0.3)), case.query, case.key, case.value, *case.learned)
    assert launched == {"attend": 1, "attend_backward": 1, "total": 1}
    launched.clear()
    call, query = case.bias(False), case.query.transpose(1, 2)
    outcome(lambda logits, *learned: call(logits, query, None, *learned), torch.randn(case.shape), *case.learned)
    assert launched == {"add_bias": 1, "add_bias_backward": 1, "total": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """All parameters in it, or table and gate in float32 as under autocast; positions are always in float32."""
    case = Case(5, 2, 2, 9, 30, 8, 12)
    vectors = [x.to(dtype) for x in (case.query, case.key, case.value)]
    compare(case.attention(), *vectors, *(x.to(dtype) for x in case.learned), factor=2)
    call = case.attention()
    found = outcome(lambda *x: call(*x).float(), *vectors, *case.learned)
    assert [x.dtype for x in found] == [torch.float32, *[dtype] * 3, *[torch.float32] * len(case.learned)]
    biased = case.bias(False)
    logits, query = torch.randn(case.shape).to(dtype), vectors[0].transpose(1, 2)
    given = logits, query, *(x.to(dtype) for x in case.learned)
    assert biased(logits, query, None, *case.learned).dtype == torch.float32
    factor = 2 if DEVICE == "cpu" else TF32 / TOLERANCE[torch.float32]  # the interpreter's products are exact
    compare(lambda logits, query, *learned: biased(logits.float(), query, None, *learned), *given, factor=factor)


@pytest.mark.parametrize("places", [1, 40, 1100])
def test_a_thousand_items(places: int) -> None:
    """More than the table has rows, and fewer."""
    case = Case(2 + places % 3, 1, 1, 3, 1000, 8, places)
    compare(case.attention((SEED, 0.2)), case.query, case.key, case.value, *case.learned, factor=40)
    call = case.bias(True)
    given = torch.randn(case.shape), case.query.transpose(1, 2), *case.learned
    compare(lambda logits, query, *learned: call(logits, query, None, *learned), *given, factor=40)


def test_one_item_and_none() -> None:
    for items in (1, 0):
        case = Case(4, 2, 1, items, items, 4, 3, share=1.0)
        compare(case.attention(), case.query, case.key, case.value, *case.learned, factor=4)
    case = Case(4, 0, 1, 1, 5, 4, 3)
    assert case.attention()(case.query, case.key, case.value, *case.learned).shape == (0, 1, 1, 4)


def test_more_heads_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program takes several, and adds up their gradients of the table."""
    monkeypatch.setattr(accelerator, "FORWARDS", 2)
    monkeypatch.setattr(accelerator, "BACKWARDS", 3)
    case = Case(2, 3, 2, 19, 18, 5, 9)
    compare(case.attention((SEED, 0.3)), case.query, case.key, case.value, *case.learned, factor=4)
    call, logits = case.bias(True), torch.randn(case.shape)
    given = logits, case.query.transpose(1, 2), *case.learned
    compare(lambda logits, query, *learned: call(logits, query, None, *learned), *given, factor=4)


@pytest.mark.parametrize("size", [16, 32])
def test_sizes_of_tiles_are_free(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUERIES", "KEYS", "ROWS"):
        monkeypatch.setattr(accelerator, name, size)
    case = Case(5, 1, 1, 34, 35, 5, 40)
    compare(case.attention((SEED, 0.3)), case.query, case.key, case.value, *case.learned, factor=4)


@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_nan_stays_in_its_row(which: str) -> None:
    case = Case(1, 2, 2, 5, 20, 4, 9, share=1.0)
    given = [case.query, case.key, case.value]
    before = case.attention()(*given, *case.learned)
    getattr(case, which)[1, 2] = torch.nan
    leaves = [x.requires_grad_() for x in given]
    pooled = case.attention()(*leaves, *case.learned)
    assert torch.equal(pooled[0], before[0])
    assert pooled[1, 2 if which == "query" else slice(None)].isnan().all()
    assert all(x[0].isfinite().all() for x in torch.autograd.grad(pooled.sum(), leaves))


def test_open_gates_reach_a_row_each() -> None:
    """The most that a tile of keys can reach."""
    torch.manual_seed(0)
    allowed, likeness = torch.ones(1, 1, 3, 40, dtype=torch.bool), torch.full((1, 1, 3, 40), 30.0)

    def call(logits: Tensor, query: Tensor, table: Tensor) -> Tensor:
        found: Tensor = contextual_bias(logits, query, table, allowed, gate_logits=likeness.to(logits.dtype), sign=1.0)
        return found

    compare(call, torch.randn(1, 1, 3, 40), torch.randn(1, 1, 3, 8), torch.randn(60, 8), factor=4)


def test_open_gates_reach_whole_positions_exactly() -> None:
    """What a control with gates of 0 and 1 relies on: no interpolation moves it to the next row."""
    logits = torch.full((1, 1, 1, 40), -200.0)
    logits[..., ::3] = 200.0
    table, allowed = torch.arange(60.0).unsqueeze(1), torch.ones(1, 1, 1, 40, dtype=torch.bool)
    found = contextual_bias(
        torch.zeros_like(logits), torch.ones(1, 1, 1, 1), table, allowed, gate_logits=logits, sign=1.0
    )
    assert torch.equal(found, (logits > 0).float().flip(-1).cumsum(-1).flip(-1))


@pytest.mark.parametrize("count", [1, 3, 257, 1003])
@pytest.mark.parametrize("rate", [0.0, 0.3, 1 - 2**-16])
def test_dropout_keeps_what_it_keeps_on_a_cpu(rate: float, count: int) -> None:
    for seed in (SEED, torch.tensor([7])):
        shape = torch.Size([count])
        assert torch.equal(keep_mask(seed, shape, rate), in_torch(seed, shape, least(rate)))


@pytest.mark.skipif(DEVICE == "cuda", reason="test_gpu.py trains whole models")
@pytest.mark.parametrize("pe", ["cope", "cape", "cape_additive", "cape_constant", "cape_cosine", "cape_time"])
def test_every_form_in_both_kinds_of_attention(pe: str, launched: Counter[str]) -> None:
    """A model's units call the kernels; with the same weights they give what they give in float64."""
    torch.manual_seed(0)
    mask = torch.arange(6) < torch.tensor([[6], [0], [3], [1]])
    positions = Positions.from_mask(mask, torch.randint(0, 10**5, mask.shape).sort(1, descending=True).values)
    items, target = torch.randn(int(mask.sum()), 8), torch.randn(4, 8)
    units = SelfAttention(8, 2, build_pe(pe, dim=8, max_len=4, num_heads=2), causal=True, dropout=0.3)
    attention = TargetAttention(8, "dot", build_pe(pe, dim=8, max_len=4))
    for unit in (units, attention):
        for parameter in unit.pe.parameters():
            torch.nn.init.normal_(parameter)

    def alone(items: Tensor) -> Tensor:
        torch.manual_seed(1)  # of dropout
        return units.to(items.dtype)(items, positions)

    def at_target(target: Tensor, items: Tensor) -> Tensor:
        found: Tensor = attention.to(items.dtype)(target, items, positions)[0]
        return found

    compare(alone, items, factor=10)
    compare(at_target, target, items, factor=10)
    blocks = len(positions.blocks)
    del launched["keep_mask"]  # in float64
    if pe == "cape_cosine":
        assert launched == dict.fromkeys(("add_bias", "add_bias_backward", "total"), blocks + 1)
    elif pe == "cape_additive":  # it scores the moved items again
        assert launched == {"attend": blocks, "attend_backward": blocks, "total": blocks}
    else:
        assert launched == dict.fromkeys(("attend", "attend_backward"), blocks) | {
            "add_bias": 1,
            "add_bias_backward": 1,
            "total": blocks + 1,
        }


def test_shapes_that_do_not_match_are_refused() -> None:
    case = Case(2, 2, 2, 3, 8, 4, 5)
    for name in ("key", "value"):
        vectors = {"query": case.query, "key": case.key, "value": case.value}
        vectors[name] = vectors[name][..., 1:]
        with pytest.raises(ValueError, match=rf"{name} .* does not match"):
            case.attention()(*vectors.values(), *case.learned)
    with pytest.raises(ValueError, match="gate_logits"):
        contextual.contextual_bias(
            torch.randn(case.shape), case.query.transpose(1, 2), None, None, torch.randn(5, 4), None, case.allowed,
            torch.randn(2, 2, 3, 7), False, 1.0, 1.0,
        )  # fmt: skip


def test_the_script_that_measures_them(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"--gpu {-1 if DEVICE == 'cpu' else 0} --model DIN --pe cope --tile 16,32 --batch-size 2 --repeats 1"
    with torch.device("cpu"):
        assert kernels.main(arguments.split()) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("DIN")]
    assert [line.split()[:3] for line in lines] == [["DIN", "cope", "16"], ["DIN", "cope", "32"]]
    assert all(float(number) > 0 for line in lines for number in line.split()[3:6])


def test_registration() -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    case = Case(2, 2, 2, 3, 6, 4, 5)
    table, weight, bias, steps = [x.requires_grad_() for x in case.learned]
    learned = weight, bias, table, steps, case.allowed
    vectors = [x.requires_grad_() for x in (case.query, case.key, case.value)]
    given = *vectors, *learned, SEED, -1.0, 0.5, 0.7, 0.4
    torch.library.opcheck(contextual.contextual_attention, given, test_utils=tests)
    logits = torch.randn(case.shape, requires_grad=True)
    given = logits, case.query.transpose(1, 2), *learned, logits.detach(), True, -1.0, 0.5
    torch.library.opcheck(contextual.contextual_bias, given, test_utils=tests)
    torch.library.opcheck(keep_mask_gpu, (SEED, [3, 7], 100), test_utils=tests)
