"""The compiled code for contextual positions gives what torch gives: values, gradients, at every edge."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from comparing import needs_code
from fenced import Fenced
from torch import Tensor, nn

from ctr_pe import Positions, build_pe, compiled
from ctr_pe.pe import fused
from ctr_pe.pe.base import PositionLinear
from ctr_pe.pe.contextual import ContextualEncoding
from ctr_pe.positions import Pairs
from ctr_pe.units import SelfAttention, TargetAttention
from ctr_pe.units.dropout import Dropout

NAMES = ["cope", "cape", "cape_additive", "cape_time"]
LENGTHS = [7, 0, 1, 30, 2, 11, 3]


def batch(lengths: list[int], seed: int = 0) -> Positions:
    """Histories padded in the middle, with pauses of all sizes."""
    torch.manual_seed(seed)
    slots = max(lengths) + 3
    mask = torch.stack([torch.randperm(slots) < length for length in lengths])
    return Positions.from_mask(mask, torch.randint(0, 10**6, mask.shape).sort(1, descending=True)[0])


def drawn(module: nn.Module, scale: float = 0.2) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=scale)


def outcome(call: Callable[[], Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Values and the gradients of a sum of them in which all differ."""
    values = call()
    slope = torch.linspace(-1, 1, values.numel(), dtype=values.dtype).view_as(values)
    gradients = torch.autograd.grad((values * slope).sum(), leaves, allow_unused=True)
    zeros = [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, gradients, strict=True)
    ]
    return [values.detach(), *zeros]


def compare(monkeypatch: pytest.MonkeyPatch, module: nn.Module, call: Callable[..., Tensor], *inputs: Tensor) -> None:
    """In float32, compiled, against float64, for which there is nothing but torch: values and all gradients."""
    asked = []
    monkeypatch.setattr(fused, "_run", lambda *given: asked.append(1) or RUN(*given))

    def found(dtype: torch.dtype) -> list[Tensor]:
        module.to(dtype)
        given = [x.detach().to(dtype).requires_grad_() for x in inputs]
        torch.manual_seed(1)  # for dropout
        return outcome(lambda: call(*given), [*given, *module.parameters()])

    ours, calls = found(torch.float32), len(asked)
    assert calls, "the compiled code was not asked"
    wanted = found(torch.float64)
    assert len(asked) == calls
    for got, want in zip(ours, wanted, strict=True):
        assert (got - want).abs().max() <= 1e-5 * max(1.0, float(want.abs().max()))


RUN = fused._run


@needs_code
@pytest.mark.parametrize("max_len", [1, 8, 40])  # histories past the table, and short of it
@pytest.mark.parametrize(("causal", "dropout"), [(True, 0.0), (False, 0.0), (True, 0.3), (False, 1.0)])
@pytest.mark.parametrize("name", NAMES)
def test_equals_torch_in_self_attention(
    monkeypatch: pytest.MonkeyPatch, name: str, causal: bool, dropout: float, max_len: int
) -> None:
    positions = batch(LENGTHS)
    unit = SelfAttention(40, 2, build_pe(name, 40, max_len, 2), causal, dropout)  # heads of 20, more than a vector
    drawn(unit)
    compare(monkeypatch, unit, lambda items: unit(items, positions), torch.randn(sum(LENGTHS), 40))


@needs_code
@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize("seed", range(16))
def test_attention_equals_torch_over_random_shapes_and_masks(
    monkeypatch: pytest.MonkeyPatch, seed: int, rate: float
) -> None:
    torch.manual_seed(seed)
    rows, heads, queries, keys, width, places = (int(torch.randint(1, top, ())) for top in (4, 4, 9, 60, 40, 70))
    encoding, dropout, dim = Bare(places, width, 1 - 2 * (seed % 2)), Dropout(rate), width
    allowed = torch.rand(rows, 1, queries + 1, keys) < (0.6, 0.1)[seed % 2]
    allowed[0, :, 0] = False
    pairs = replace(at(allowed), scale=0.7)
    if seed % 3:
        dim = int(torch.randint(1, 40, ()))
        encoding.gate = PositionLinear(dim, width)
    if seed % 4 > 1:
        encoding.share = nn.Parameter(torch.rand(rows, heads, keys))

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pooled = encoding.attend(query.mT, key, value, pairs, dropout)
        return pooled * allowed.any(-1).mT.unsqueeze(-1)  # nobody reads what is pooled of nothing

    given = torch.randn(rows, queries + 1, dim, heads), *(torch.randn(rows, keys, heads, dim) for _ in "kv")
    compare(monkeypatch, encoding, call, *given)


@needs_code
@pytest.mark.parametrize("name", NAMES)
def test_self_attention_is_one_pass(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """No logits are laid out, nor weights."""
    positions, items = batch(LENGTHS), torch.randn(sum(LENGTHS), 8)
    asked = []
    monkeypatch.setattr(fused, "attend", lambda *given, **named: asked.append(1) or ATTEND(*given, **named))
    SelfAttention(8, 2, build_pe(name, 8, 40, 2), True, 0.2)(items, positions)
    assert len(asked) == sum(len(block.mask[0]) > 1 for block in positions.blocks) > 1


@needs_code
@pytest.mark.parametrize("hook", ["rotate", "bias", "gates", "places", "weigh", "mix"])
@pytest.mark.parametrize("of", ["cape", "cape_additive"])
def test_an_overridden_hook_counts_in_self_attention(of: str, hook: str) -> None:
    kind, asked = type(build_pe(of, 8, 9, 2)), []

    def count(self: nn.Module, *given: object) -> object:
        asked.append(1)
        return getattr(kind, hook)(self, *given)

    own = type("Own", (kind,), {hook: count})(8, 9, 2)
    plain = build_pe(of, 8, 9, 2)
    plain.load_state_dict(own.state_dict())
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 5, 2, 4) for _ in "qkv")
    pairs = at(torch.ones(2, 1, 5, 5, dtype=torch.bool))
    pooled = own.attend(query, key, value, pairs, Dropout(0.0))
    assert asked
    assert torch.allclose(pooled, plain.attend(query, key, value, pairs, Dropout(0.0)), atol=1e-5)


ATTEND = fused.attend


@needs_code
@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize(("items", "item", "row"), [(20, 4, 0), (3, 0, 1), (3, 2, 1)])
def test_what_is_no_number_stays_in_its_row_and_head(which: str, wrong: float, items: int, item: int, row: int) -> None:
    """And in what looks at it: an item of a row's second head."""
    torch.manual_seed(0)
    encoding, pairs = Bare(9, 4, -1), at(torch.ones(2, 1, items, items, dtype=torch.bool).tril())
    given = {name: torch.randn(2, items, 3, 4) for name in ("query", "key", "value")}
    before = encoding.attend(*given.values(), pairs, Dropout(0.0))
    given[which][row, item, 1] = wrong
    leaves = [x.requires_grad_() for x in given.values()]
    pooled = encoding.attend(*leaves, pairs, Dropout(0.0))
    gradients = torch.autograd.grad(pooled.sum(), leaves)
    same, own = torch.ones(2, items, 3, dtype=torch.bool), slice(item, item + 1 if which == "query" else None)
    same[row, own, 1] = False
    elsewhere = torch.ones(2, items, 3, dtype=torch.bool)
    elsewhere[row, :, 1] = False
    assert torch.equal(pooled[elsewhere], before[elsewhere])
    if item % 4 == 0 or which == "query":  # four lines share their keys, and nothing times no number is none
        assert torch.equal(pooled[same], before[same])
    assert all(gradient[elsewhere].isfinite().all() for gradient in gradients)
    if math.isnan(wrong):
        assert pooled[~same].isnan().all()
        if which != "value":  # what these queries see has no gradient that is one
            assert all(gradient[row, item, 1].isnan().all() for gradient in gradients)


@needs_code
@pytest.mark.parametrize("position_dim", [1, 16, 33])
@pytest.mark.parametrize("name", ["cape", "cape_time"])
def test_equals_torch_in_target_attention(monkeypatch: pytest.MonkeyPatch, name: str, position_dim: int) -> None:
    positions = batch(LENGTHS)
    unit = TargetAttention(6, "bilinear", build_pe(name, 6, 12, position_dim=position_dim))
    drawn(unit)
    vectors = torch.randn(len(LENGTHS), 6), torch.randn(sum(LENGTHS), 6)
    compare(monkeypatch, unit, lambda target, items: unit(target, items, positions)[0], *vectors)


@needs_code
@pytest.mark.parametrize("seed", range(24))
def test_equals_torch_over_random_shapes_and_masks(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    torch.manual_seed(seed)
    rows, heads, queries, keys, width, places = (int(torch.randint(1, top, ())) for top in (4, 4, 9, 60, 40, 70))
    encoding = Bare(places, width, 1 - 2 * (seed % 2))
    pairs = at(torch.rand(rows, 1, queries, keys) < 0.7)  # holes in it, too
    dim = width
    if seed % 3:
        dim = int(torch.randint(1, 40, ()))
        encoding.gate = PositionLinear(dim, width)
    if seed % 4 > 1:
        encoding.share = nn.Parameter(torch.rand(rows, heads, keys))
    given = 4 * torch.randn(rows, heads, queries, keys), torch.randn(rows, heads, queries, dim)
    compare(monkeypatch, encoding, lambda logits, query: placed(encoding, logits, query, pairs), *given)


@needs_code
@pytest.mark.parametrize("rate", [None, 0.0, 0.4])
@pytest.mark.parametrize("seed", range(8))
def test_weights_equal_torch_s_over_random_shapes_and_masks(
    monkeypatch: pytest.MonkeyPatch, seed: int, rate: float | None
) -> None:
    torch.manual_seed(seed)
    rows, heads, queries, keys, width, places = (int(torch.randint(1, top, ())) for top in (4, 4, 9, 60, 40, 70))
    encoding, dropout = Bare(places, width, 1 - 2 * (seed % 2)), None if rate is None else Dropout(rate)
    allowed = torch.rand(rows, 1, queries, keys) < 0.6
    allowed[0, :, 0] = False
    pairs = at(allowed)
    if seed % 3:
        encoding.share = nn.Parameter(torch.rand(rows, heads, keys))
    given = 4 * torch.randn(rows, heads, queries, keys), torch.randn(rows, heads, queries, width)

    def call(logits: Tensor, query: Tensor) -> Tensor:
        return encoding.weigh(query, query, logits, pairs, dropout) * allowed.any(-1, keepdim=True)

    compare(monkeypatch, encoding, call, *given)
    elsewhere = encoding.float().weigh(given[1], given[1], given[0], pairs) * ~pairs.allowed
    assert torch.equal(elsewhere, (1 / keys * ~pairs.allowed.any(-1, True)).expand_as(elsewhere))


@needs_code
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e30, -1e30])
def test_weights_of_logits_without_bounds(wrong: float) -> None:
    """As torch's softmax has them; what is no number takes its own line along, and no other."""
    encoding, slope = Bare(40, 16, -1), torch.arange(30)
    pairs, query = at(torch.ones(2, 1, 1, 30, dtype=torch.bool)), torch.ones(2, 1, 1, 16)

    def found(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        logits = torch.zeros(2, 1, 1, 30, dtype=dtype)
        logits[0, 0, 0, 7] = wrong
        logits.requires_grad_()
        encoding.to(dtype)
        weights = encoding.weigh(query.to(dtype), query, logits, pairs)
        return weights.detach(), torch.autograd.grad((weights * slope).sum(), logits)[0]

    weights, gradient = found(torch.float32)
    assert weights[1].isfinite().all()
    assert gradient[1].isfinite().all()
    if math.isnan(wrong) or wrong == math.inf:
        assert weights[0].isnan().all()
        assert gradient[0].isnan().any()
    else:
        for got, want in zip((weights, gradient), found(torch.float64), strict=True):
            assert torch.allclose(got.double(), want, atol=1e-4)


@needs_code
def test_gradients_that_are_no_numbers_stay_in_their_line() -> None:
    logits, of_weights = torch.randn(3, 1, 1, 21, requires_grad=True), torch.ones(3, 1, 1, 21)
    of_weights[1] = math.nan
    given = torch.randn(3, 1, 1, 4), torch.randn(9, 4), torch.ones(3, 1, 1, 21, dtype=torch.bool)
    fused.place(fused.Rule(-1, softmax=True), logits, *given).backward(of_weights)
    assert logits.grad is not None
    assert logits.grad.isnan().flatten(1).any(1).tolist() == [False, True, False]


@needs_code
def test_a_long_history(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding, pairs = Bare(5000, 16, -1), at(torch.ones(1, 1, 1, 20_000, dtype=torch.bool))
    encoding.table.data *= 0.01  # places go to thousands, of which float32 has three digits after the point
    given = torch.randn(1, 1, 1, 20_000), torch.randn(1, 1, 1, 16)
    logits, query = (x.requires_grad_() for x in given)
    ours = encoding.bias(query, query, logits, pairs)
    encoding.double()
    assert (ours - encoding.bias(query.double(), query.double(), logits.double(), pairs)).abs().max() < 1e-4


@needs_code
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 3])
def test_threads_share_the_work(monkeypatch: pytest.MonkeyPatch, rows: int, threads: int) -> None:
    before = torch.get_num_threads()
    encoding, pairs = Bare(9, 16, 1), at(torch.ones(rows, 1, 3, 12, dtype=torch.bool).tril())
    encoding.share, encoding.gate = nn.Parameter(torch.rand(rows, 1, 12)), PositionLinear(5, 16)
    given = torch.randn(rows, 1, 3, 12), torch.randn(rows, 1, 3, 5)
    try:
        torch.set_num_threads(threads)
        compare(monkeypatch, encoding, lambda logits, query: placed(encoding, logits, query, pairs), *given)
        given = torch.randn(rows, 3, 1, 5), torch.randn(rows, 12, 1, 5), torch.randn(rows, 12, 1, 5)
        compare(monkeypatch, encoding, lambda *given: encoding.attend(*given, pairs, Dropout(0.3)), *given)
    finally:
        torch.set_num_threads(before)


@needs_code
def test_logits_without_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding, pairs = Bare(9, 4, -1), at(torch.ones(1, 1, 1, 8, dtype=torch.bool))
    logits = torch.tensor([[[[-1e30, 1e30, -200.0, 200.0, 0.0, -88.0, 88.0, 1e-30]]]])

    def call(logits: Tensor, query: Tensor) -> Tensor:
        return placed(encoding, logits, query, pairs) - logits

    query = torch.randn(1, 1, 1, 4)
    assert call(logits, query).isfinite().all()
    compare(monkeypatch, encoding, call, logits.clamp(-120, 120), query)


@needs_code
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_stays_none(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    encoding = Bare(40, 16, -1)
    logits = torch.zeros(2, 1, 1, 30)
    logits[0, 0, 0, 7] = wrong
    logits.requires_grad_()
    query, pairs = torch.ones(2, 1, 1, 16, requires_grad=True), at(torch.ones(2, 1, 1, 30, dtype=torch.bool))
    values = encoding.bias(query, query, logits, pairs)
    gradient, of_query, of_table = torch.autograd.grad(values.sum(), [logits, query, encoding.table])
    assert not values[0, 0, 0, 7].isfinite()
    assert values[1].isfinite().all()  # no other row is touched
    assert gradient[1].isfinite().all()
    if math.isnan(wrong):  # all of the line: it would be wrong to rank by a part of it
        assert values[0].isnan().all()
        assert gradient[0].isnan().all()
        assert of_query[0].isnan().all()
        alone = encoding.bias(query[1:], query[1:], logits[1:], at(pairs.allowed[1:]))
        assert torch.equal(of_table, torch.autograd.grad(alone.sum(), encoding.table)[0])


@needs_code
def test_gradients_where_nobody_may_look() -> None:
    """Those of steps are zero there, those of logits go through."""
    logits, steps = torch.rand(2, 1, 3, 9, requires_grad=True), torch.rand(2, 1, 9, requires_grad=True)
    allowed = torch.zeros(2, 1, 3, 9, dtype=torch.bool)
    allowed[:, :, :2, 3:6] = True
    given = torch.randn(2, 1, 3, 4), torch.randn(9, 4), allowed
    fused.place(fused.Rule(1), logits, *given, steps=steps).sum().backward()
    assert steps.grad is not None
    assert logits.grad is not None
    assert torch.equal(logits.grad[~allowed], torch.ones(int((~allowed).sum())))
    nobody = ~allowed[:, 0].any(1)
    assert torch.equal(steps.grad[:, 0][nobody], torch.zeros(int(nobody.sum())))
    assert (steps.grad[:, 0][~nobody] != 0).any()


@needs_code
def test_arrays_that_lie_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding, pairs = Bare(9, 4, 1), at(torch.ones(2, 1, 5, 8, dtype=torch.bool).tril())

    def call(logits: Tensor, query: Tensor) -> Tensor:
        return placed(encoding, logits.permute(3, 2, 1, 0), query.mT, pairs).transpose(1, 3)  # the gradient, too

    compare(monkeypatch, encoding, call, torch.randn(8, 5, 3, 2), torch.randn(2, 3, 4, 5))


@needs_code
def test_nothing_is_kept_where_no_gradient_is_asked() -> None:
    encoding, logits = Bare(9, 4, 1), torch.randn(2, 3, 5, 8)
    with torch.inference_mode():
        values = encoding.bias(torch.randn(2, 3, 5, 4), logits, logits, at(torch.ones(2, 1, 5, 8, dtype=torch.bool)))
    assert values.shape == logits.shape


@needs_code
def test_who_records_operations_gets_torch_s() -> None:
    unit = SelfAttention(8, 2, build_pe("cape", 8, 6, 2))
    drawn(unit)
    logits, query = torch.randn(2, 2, 5, 5), torch.randn(2, 2, 5, 4)
    pairs = at(torch.ones(2, 1, 5, 5, dtype=torch.bool))

    class Serve(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pe = unit.pe

        def forward(self, query: Tensor, logits: Tensor) -> Tensor:
            return self.pe.bias(query, query, logits, pairs)

    want = Serve()(query + 1, logits - 1)
    exported = torch.export.export(Serve(), (query, logits)).module()
    assert torch.allclose(exported(query + 1, logits - 1), want, atol=1e-5)


@needs_code
@pytest.mark.parametrize("hook", ["gates", "places"])
def test_an_overridden_hook_counts(hook: str) -> None:
    logits, query = torch.randn(2, 1, 1, 6), torch.randn(2, 1, 1, 16)
    pairs = at(torch.ones(2, 1, 1, 6, dtype=torch.bool))
    still = type("Still", (Bare,), {hook: lambda self, logits, pairs: torch.zeros_like(logits)})(9, 16, 1)
    want = logits + (query * still.table[0]).sum(-1, keepdim=True)
    assert torch.allclose(still.bias(query, query, logits, pairs), want, atol=1e-5)


@needs_code
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("what", ["logits", "shares", "pooled"])
@pytest.mark.parametrize("keys", [1, 5, 16, 27])
def test_no_memory_of_others_is_touched(keys: int, what: str, at_end: bool) -> None:
    """Whatever is given or wanted lies between closed pages; values are those that lie elsewhere gives."""
    torch.manual_seed(keys)
    rule, fences = fused.Rule(-1, softmax=what != "logits", factor=1.25, product=0.4), []

    def fenced(given: Tensor | None) -> Tensor | None:
        if given is None:
            return None
        fences.append(Fenced(given, at_end))
        return fences[-1].held

    def copied(given: Tensor | None) -> Tensor | None:
        return None if given is None else given.clone()

    allowed = (torch.rand(2, 1, 3, keys) < 0.8).contiguous()
    logits, query, key, value = torch.randn(2, 2, 3, keys), torch.randn(2, 2, 3, 5), None, None
    if what == "pooled":
        logits, query, key, value = None, torch.randn(2, 3, 2, 5), *torch.randn(2, 2, keys, 2, 5)
    vectors = logits, query, key, value
    parameters = torch.randn(4, 5), torch.randn(4), torch.randn(9, 4), torch.rand(2, 2, keys)
    kept, norms = (torch.rand(2, 2, 3, keys) < 0.8).short(), torch.randn(2, 2, 3, 2)
    results = []
    for hold in (copied, fenced):
        given = [hold(x) for x in (*vectors, *parameters, allowed, kept, norms)]
        like = query if logits is None else logits
        out, grad = hold(torch.empty_like(like)), hold(torch.linspace(-1, 1, like.numel()))
        into = [hold(None if x is None else torch.empty_like(x)) for x in (*vectors, *parameters)]
        compiled.run("contextual_forward", fused._input(rule, given), out.data_ptr())
        to = ctypes.byref(fused._Gradients(*map(compiled.address, into)))
        compiled.run("contextual_backward", fused._input(rule, given), grad.data_ptr(), to, 9)
        results.append([x.clone() for x in (out, *into) if x is not None])
    assert not any(x.isnan().any() for x in results[0])
    for got, want in zip(results[1], results[0], strict=True):
        assert torch.equal(got, want)
    for fence in fences:
        fence.protect()


@needs_code
@pytest.mark.parametrize("step", [-1.0, -math.inf, math.inf, math.nan, 1e9])
def test_steps_out_of_range_reach_no_row_that_is_not_there(step: float) -> None:
    logits, steps = torch.randn(1, 2, 3, 40, requires_grad=True), torch.rand(1, 2, 40)
    steps[0, 0, 9:20] = steps[0, 0, 30:] = step
    given = torch.randn(1, 2, 3, 4), torch.randn(90, 4), torch.ones(1, 1, 3, 40, dtype=torch.bool)
    values = fused.place(fused.Rule(1), logits, *given, steps=steps)
    values.sum().backward()
    assert values[0, 1].isfinite().all()


@needs_code
@pytest.mark.parametrize("which", ["query", "weight", "bias", "steps", "allowed", "kept"])
def test_shapes_that_do_not_match_are_refused(which: str) -> None:
    shapes = {"query": (2, 3, 5, 6), "weight": (4, 6), "bias": (4,), "steps": (2, 3, 8)}
    shapes |= {"allowed": (2, 1, 5, 8), "kept": (2, 3, 5, 8)}
    shapes[which] = (*shapes[which][:-1], 1)
    given = {name: torch.ones(shape) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=f"{'weight' if which == 'query' else which} .* does not match"):
        fused.place(
            fused.Rule(1),
            torch.ones(2, 3, 5, 8),
            given["query"],
            torch.ones(9, 4),
            given["allowed"].bool(),
            (given["weight"], given["bias"]),
            given["steps"],
            given["kept"].short(),
        )


@needs_code
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_vectors_that_do_not_match_are_refused(which: str) -> None:
    given = {"query": torch.ones(2, 5, 3, 4), "key": torch.ones(2, 8, 3, 4), "value": torch.ones(2, 8, 3, 4)}
    given[which] = given[which][..., :1]
    others = torch.ones(9, 6), torch.ones(2, 1, 5, 8).bool(), (torch.ones(6, 4), torch.ones(6))
    with pytest.raises(ValueError, match=f"{'key' if which == 'query' else which} .* does not match"):
        fused.attend(fused.Rule(1), *given.values(), *others)


@needs_code
def test_a_mask_that_is_no_bool_is_refused() -> None:
    with pytest.raises(ValueError, match=r"allowed .* torch.float32 does not match .* torch.bool"):
        fused.place(fused.Rule(1), *(torch.ones(2, 1, 5, n) for n in (8, 4)), torch.ones(9, 4), torch.ones(2, 1, 5, 8))


class Bare(ContextualEncoding):
    """Nothing but a table of random numbers."""

    def __init__(self, places: int, width: int, sign: int) -> None:
        super().__init__(width, places)
        self.table = nn.Parameter(torch.randn(places, width))
        self.sign = sign  # type: ignore[misc]
        self.share: nn.Parameter | None = None

    def steps(self, pairs: Pairs, dtype: torch.dtype) -> Tensor | None:
        return self.share


def placed(encoding: Bare, logits: Tensor, query: Tensor, pairs: Pairs) -> Tensor:
    """Zero where not allowed: nobody reads what stands there."""
    return encoding.bias(query, query, logits, pairs) * pairs.admitted


def at(allowed: Tensor) -> Pairs:
    """Pairs with any mask at all."""
    block = Positions.from_mask(torch.ones(len(allowed), allowed.shape[-1], dtype=torch.bool)).whole
    pairs = block.from_target()
    return Pairs(pairs.query, pairs.key, allowed, block, causal=True)
