"""Every model and every encoding on a device that is not the CPU (:mod:`tests.support.pretended_device`): nothing
crashes there."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, cycle, product
from pathlib import Path
from threading import current_thread
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from benchmark.speed.cases import ENCODED, Settings, launches
from benchmark.speed.launching import step
from ctr_pe.data.synthetic.bursts import generate
from ctr_pe.ops.recurrence import gpu
from ctr_pe.ops.step_seeds import StepSeeds
from ctr_pe.pe import available_pes, build_pe
from ctr_pe.sequence import filled
from ctr_pe.sequence.jagged import Layout
from ctr_pe.sequence.positions import Positions
from ctr_pe.sequence.transfer import PinnedTransfer
from ctr_pe.serving.request_graph import CUDAGraphs, inputs_from
from ctr_pe.study.tune import plan, tune
from ctr_pe.training import fit, load, save, step_graphs
from ctr_pe.training.loop import _Training
from ctr_pe.training.step_graphs import StepGraphs
from ctr_pe.training.steps import one_by_one
from ctr_pe.units import SelfAttention
from ctr_pe.units.activations import Dice
from ctr_pe.units.gru import GATES, GRU, AttentionGRU
from ctr_pe.units.stacked_modules import each
from ctr_pe.utils.cuda_graphs import capture
from tests.support import recorded
from tests.support.models import ITEMS, SMALL, Rows, batch, build, randomised, requested
from tests.support.pretended_device import Counted, elsewhere

MODELS = tuple(SMALL)
ENCODINGS = available_pes()
OTHERS = [pe for pe in ENCODINGS if pe not in ("none", "cape")]
BATCH = batch([3, 0, 6, 1])


def in_turn(models: Sequence[str], encodings: Sequence[str]) -> list[tuple[str, str]]:
    """Each encoding with one model."""
    return [*zip(cycle(models), encodings, strict=False)]


def there(name: str, folder: Path, pe: str, **params: Any) -> Any:
    model = build(name, folder, position_encoding=pe, gpu=0, **params)
    assert {str(tensor.device) for tensor in model.state_dict().values()} == {"elsewhere:0"}
    return model


def planned(mask: Tensor, device: str) -> Positions:
    """Positions that were made on the CPU and sent."""
    positions = Positions.from_mask(mask, layout=Layout.on(torch.device(device)))
    positions.plan()
    return PinnedTransfer(positions, torch.device(device)).unpack()


class TestDevice:
    def test_what_modules_share_they_share_there(self) -> None:
        lower, upper = nn.Linear(2, 2), nn.Linear(2, 2)
        upper.weight = lower.weight
        with elsewhere():
            nn.Sequential(lower, upper, nn.GRU(2, 2)).to("elsewhere")
            assert upper.weight is lower.weight
            assert {one.device.type for one in (lower.weight, upper.bias)} == {"elsewhere"}

    def test_tensors_say_that_they_are_elsewhere_and_have_the_values_of_the_cpu(self) -> None:
        x, weight = torch.randn(3, 4), torch.randn(5, 4)
        with elsewhere():
            leaf = weight.to("elsewhere").requires_grad_()
            y = nn.functional.linear(x.to("elsewhere:0"), leaf).relu()
            y.sum().backward()
            assert (y.device.type, leaf.grad.device.type) == ("elsewhere", "elsewhere")
            assert torch.equal(y.detach().cpu(), (x @ weight.T).relu())
            view = leaf.detach().view(-1)
            view[0] = 7
            assert leaf[0, 0].item() == 7

    def test_two_devices_do_not_meet_in_one_operation(self) -> None:
        with elsewhere():
            x = torch.ones(3, device="elsewhere")
            with pytest.raises(RuntimeError, match="two devices"):
                _ = x + torch.ones(3)
            with pytest.raises(RuntimeError, match="two devices"):
                torch.ones(3).index_select(0, torch.zeros(1, dtype=torch.int64, device="elsewhere"))
            assert (x * torch.tensor(2.0)).tolist() == [2, 2, 2]  # a number goes along with the call

    @pytest.mark.parametrize("kernel", [False, True])
    @pytest.mark.parametrize("make", [GRU, AttentionGRU])
    def test_recurrences_have_the_states_and_gradients_of_the_cpu(self, make: Any, kernel: bool) -> None:
        torch.manual_seed(0)
        here, mask = make(3, 4), torch.arange(6) < torch.tensor([4, 0, 6])[:, None]
        items, weights = torch.randn(10, 3), [torch.rand(10)] * (make is AttentionGRU)
        with elsewhere() as counted, mock.patch.object(gpu, "takes", return_value=kernel):
            found = []
            for unit, device in ((here, "cpu"), (copy.deepcopy(here).to("elsewhere"), "elsewhere")):
                positions = planned(mask, device)
                given = [x.to(device).requires_grad_() for x in (items.clone(), *weights)]
                states = unit(*given, positions)
                slope = torch.linspace(-1, 1, 40).view(10, 4).to(device)
                gradients = torch.autograd.grad((states * slope).sum(), [*given, *unit.parameters()])
                found.append([x.detach().cpu() for x in (states, *gradients)])
            assert counted.launches
        for ours, wanted in zip(*found, strict=True):
            assert torch.allclose(ours, wanted, rtol=0, atol=1e-5)

    def test_an_operator_of_this_package_has_no_kernel_there(self) -> None:
        from ctr_pe.ops.dropout import keep_mask_cpu

        with elsewhere(), pytest.raises(NotImplementedError, match="no kernel for 'elsewhere'"):
            keep_mask_cpu(torch.ones(1, dtype=torch.int64, device="elsewhere"), (3,), 0)

    @pytest.mark.parametrize(
        ("call", "launches", "waits"),
        [
            (lambda x: x.view(-1).expand(2, 6).mT, 0, 0),
            (lambda x: torch.empty_like(x), 0, 0),
            (lambda x: x + 1, 1, 0),
            (lambda x: x.sum().item(), 1, 1),
            (lambda x: bool(x[0, 0]), 0, 1),
            (lambda x: x.tolist(), 0, 1),
            (lambda x: x.cpu(), 0, 1),
            (lambda x: torch.zeros(2, 3).copy_(x), 0, 1),
            (lambda x: x.nonzero(), 1, 1),
            (lambda x: x.unique(), 1, 1),
            (lambda x: x[x > 0], 2, 1),
            (lambda x: x[torch.tensor([0, 1], device=x.device)], 1, 1),  # the numbers are sent, which waits
            (lambda x: x[torch.arange(2, device=x.device)], 2, 0),
            (lambda x: x[0].repeat_interleave(x[0]), 2, 1),
            (lambda x: x[0].repeat_interleave(x[0], output_size=6), 2, 0),
            (lambda x: torch.zeros(3).to(x.device), 0, 1),
            (lambda x: torch.zeros(3).to(x.device, non_blocking=True), 0, 0),
        ],
    )
    def test_launches_and_waits_are_counted(self, call: Any, launches: int, waits: int) -> None:
        with elsewhere():
            x = torch.ones(2, 3, dtype=torch.int64).to("elsewhere") * torch.arange(1, 4, device="elsewhere")
        with elsewhere() as counted:
            call(x)
        assert (counted.launches, counted.waits) == (launches, waits), counted

    @pytest.mark.parametrize("masked", [False, True])
    def test_attention_is_one_kernel_each_way_with_the_values_of_the_cpu(self, masked: bool) -> None:
        vectors, allowed = torch.randn(3, 2, 3, 5, 4), torch.rand(2, 1, 5, 5).bernoulli() + torch.eye(5)
        mask = allowed > 0 if masked else torch.randn(2, 1, 5, 5)
        found = []
        for device in ("cpu", "elsewhere"):
            with elsewhere() as counted:
                query, key, value = leaves = [x.to(device).requires_grad_() for x in vectors]
                y = nn.functional.scaled_dot_product_attention(query, key, value, mask.to(device), scale=0.3)
                y.sin().sum().backward()
                found.append([y.detach().cpu(), *(x.grad.cpu() for x in leaves)])
        assert sum(count for name, count in counted.kernels.items() if "attention" in name) == 2
        assert all(torch.allclose(got, want, atol=1e-6) for got, want in zip(*found, strict=True))

    def test_outside_the_block_the_machine_is_as_it_is(self) -> None:
        before = torch.accelerator.is_available()
        with elsewhere():
            assert torch.accelerator.is_available()
        assert torch.accelerator.is_available() is before


@pytest.mark.parametrize("counts", [[3, 0, 6, 1], [2, 2], [0, 0], [1]], ids=str)
def test_a_plan_arrives_in_a_copy_per_dtype_and_nothing_is_left_to_ask(counts: list[int]) -> None:
    ids, given = batch(counts)["item_history"], Positions.from_mask(batch(counts)["item_history"] != 0)
    packed = torch.arange(1.0, 2 * sum(counts) + 1).view(-1, 2)
    with elsewhere() as counted:
        at = Positions.from_mask(ids != 0, layout=Layout.on(torch.device("elsewhere")))
        at.plan(with_target=True)
        there, items = PinnedTransfer((at, packed), torch.device("elsewhere")).unpack()
        assert (there.blocks is there.whole) == (sum(counts) > 0)
        found = [there.at_items.distance, there.newest, there.lengths, there.unpack(items), there.total(items)]
        found += [there.whole.pad(items)[0], there.newest_of(items), there.in_last(items, 3), there.item_rows]
        for blocks in (there.blocks, there.with_target().blocks, there.with_target().newest_blocks):
            assert len(blocks) <= 1
            found += [block.mask for block in blocks]
        assert counted.waits == 0
        assert counted.sent.total() == 3 + 2 + 3  # and what newest_of and in_last send
        wanted = [given.pack(given.distance), given.newest, given.lengths, given.unpack(packed), given.total(packed)]
        wanted += [given.whole.pad(packed)[0], given.newest_of(packed), given.in_last(packed, 3), given.item_rows]
        for x, y in zip(found, wanted, strict=False):
            assert torch.equal(x.cpu(), y)


def test_a_batch_of_training_and_evaluation_is_planned_ahead(tmp_path: Path) -> None:
    threads: list[str] = []
    with elsewhere():
        model = there("BST", tmp_path, "cape")
        plan = model.planned
        with mock.patch.object(model, "planned", lambda rows: (threads.append(current_thread().name), plan(rows))[1]):
            model.fit(Rows(), 1, Rows())
    ahead = [name for name in threads if name.startswith("ThreadPoolExecutor")]
    assert len(ahead) == len(threads) / 2 == 2 * len(Rows())


class TestEach:
    """Modules that are computed as one."""

    def test_has_the_results_gradients_and_statistics_of_a_loop(self) -> None:
        def made() -> list[nn.Module]:
            torch.manual_seed(0)
            return [nn.Sequential(nn.Linear(3, 4), Dice(4), nn.Linear(4, 2)) for _ in range(3)]

        inputs, weight = torch.randn(3, 7, 3), torch.randn(7, 2)
        loop, alone = made(), made()
        (torch.stack(each(lambda module, x: module(x), loop, inputs)) * weight).sum().backward()
        with elsewhere() as counted:
            together = [module.to("elsewhere") for module in alone]
            given = [x.to("elsewhere") for x in inputs]
            counted.kernels.clear()
            found = each(lambda module, x: module(x), together, given)
            assert counted.kernels["native_batch_norm"] == 1
            (torch.stack(found) * weight.to("elsewhere")).sum().backward()
            for one, other in zip(loop, together, strict=True):
                for (name, x), y in zip(one.named_parameters(), other.parameters(), strict=True):
                    assert torch.allclose(x.grad, y.grad.cpu(), atol=1e-6), name
                for (name, state), its in zip(one.named_buffers(), other.buffers(), strict=True):
                    assert torch.allclose(state, its.cpu(), atol=1e-6), name

    def test_in_evaluation_statistics_stay(self) -> None:
        modules = [nn.BatchNorm1d(2).eval() for _ in range(2)]
        with elsewhere():
            modules = [module.to("elsewhere") for module in modules]
            x = torch.randn(5, 2).to("elsewhere")
            assert torch.allclose(torch.stack(each(lambda module, own: module(own), modules, [x, x])).cpu()[1], x.cpu())
            assert modules[0].running_mean.tolist() == [0, 0]

    def test_losses_of_units_are_not_lost(self, tmp_path: Path) -> None:
        params = {"position_encoding": "euler", "euler_contrast": 0.5, "euler_mask_rate": 1e-6, "max_len": 4}
        here = randomised(build("DMIN", tmp_path, **params)).train()
        with elsewhere():
            other = build("DMIN", tmp_path, gpu=0, **params).train()
            other.load_state_dict(here.state_dict())
            found = [model(BATCH)["losses"]["phase contrast"].item() for model in (here, other)]
        assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("pe", ["none", "rope", "t5", "rope+alibi", "xlnet"])
def test_attention_is_fused_where_its_bias_knows_nothing_of_the_items(pe: str) -> None:
    """And gives what the CPU gives, at padding and in an empty row too."""
    torch.manual_seed(0)
    mask = torch.arange(4) < torch.tensor([[4], [0], [1], [3]])
    unit, items = SelfAttention(8, 2, build_pe(pe, dim=8, max_len=3, num_heads=2)), torch.randn(4, 4, 8)
    randomised(unit)
    wanted = unit(items, Positions.from_mask(mask))
    wanted.sin().sum().backward()
    gradients = [p.grad.clone() for p in unit.parameters()]
    unit.zero_grad()
    with elsewhere() as counted:
        there = unit.to("elsewhere")
        states = there(items.to("elsewhere"), planned(mask, "elsewhere"))
        states.sin().sum().backward()
        assert torch.allclose(states.detach().cpu(), wanted, atol=1e-6)
        for got, want in zip(there.parameters(), gradients, strict=True):
            assert torch.allclose(got.grad.cpu(), want, atol=1e-5)
    assert any("attention" in name for name in counted.kernels) == (pe != "xlnet")


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_waits_for_nothing(name: str, tmp_path: Path) -> None:
    params = {"aux_loss_alpha": 0.5} if name == "DIEN" else {}
    counted = second_step(name, tmp_path, position_encoding="cape", max_len=4, **params)
    assert not counted.waited
    assert counted.launches


@pytest.mark.slow
@pytest.mark.parametrize("pe", ["none", "cape"])
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_takes_few_launches_and_waits_for_nothing(name: str, pe: str, tmp_path: Path) -> None:
    """With the published configurations."""
    counted = step(Settings(False, tmp_path), name, pe)
    assert counted.waits == 0
    assert counted.launches <= launches(name, pe)


@pytest.mark.slow
@pytest.mark.parametrize("pe", OTHERS)
@pytest.mark.parametrize("name", ENCODED)
def test_so_does_one_with_any_encoding(name: str, pe: str, tmp_path: Path) -> None:
    counted = step(Settings(True, tmp_path), name, pe)
    assert counted.waits == 0
    assert counted.launches <= launches(name, pe)


def test_items_that_did_not_come_next_need_no_waiting(tmp_path: Path) -> None:
    negative = {"source": "", "type": "sequence", "padding_idx": 0, "max_len": 6, "feature_encoder": None}
    changes = {"item_neg": negative | {"vocab_size": ITEMS, "share_embedding": "item_id"}}
    rows = BATCH | {"item_neg": BATCH["item_history"].flip(1)}
    params = {"neg_seq_field": [["item_neg", "cate_history"]], "aux_loss_alpha": 0.5}
    assert not second_step("DIEN", tmp_path, rows, changes=changes, **params).waited


def second_step(name: str, folder: Path, rows: dict[str, Tensor] = BATCH, **params: Any) -> Counted:
    """What a training step there asks for; the first makes the optimiser's state."""
    with elsewhere():
        model = build(name, folder, gpu=0, **params).train()
        model._max_gradient_norm = 10.0
        model.train_step(rows)
    with elsewhere() as counted:
        model.train_step(rows)
    return counted


@pytest.mark.parametrize("gate", GATES)
class TestRecurrences:
    """DIEN's GRU is cuDNN's; its gated steps are a kernel of Triton, or else a few calls each."""

    def step(self, gate: str, folder: Path, items: int) -> Counted:
        return second_step("DIEN", folder, batch([items, 2], slots=max(items, 2)), gru_type=gate)

    def test_launches_do_not_depend_on_the_steps(self, gate: str, tmp_path: Path) -> None:
        with mock.patch.object(gpu, "takes", return_value=True):
            few, many = (self.step(gate, tmp_path, items) for items in (3, 30))
        assert {many.kernels[name] for name in ("gru", "gru_backward", "recurrence", "recurrence_back")} == {1}
        assert few.kernels == many.kernels

    def test_without_triton_a_step_is_a_few_launches(self, gate: str, tmp_path: Path) -> None:
        few, many = (self.step(gate, tmp_path, items).launches for items in (3, 30))
        assert many - few <= 13 * 27

    @pytest.mark.parametrize("kernel", [False, True])
    def test_loss_and_gradients_are_those_of_the_cpu(self, gate: str, kernel: bool, tmp_path: Path) -> None:
        with mock.patch.object(gpu, "takes", return_value=kernel):
            assert_trains("DIEN", "cape", tmp_path, gru_type=gate)


@pytest.mark.parametrize("pe", ["none", "cape"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_evaluates_is_saved_and_loaded(name: str, pe: str, tmp_path: Path) -> None:
    with elsewhere():
        for _ in range(2):  # a second model in the same process, which gpus in use must not disturb
            model = there(name, tmp_path, pe)
        model.fit(Rows(), 1, Rows())
        model.eval()
        scores = model.predict(Rows())
        save(model, tmp_path / "weights")
        again = there(name, tmp_path, pe)
        load(again, tmp_path / "weights")
        assert again.predict(Rows()).tolist() == scores.tolist()
    here = build(name, tmp_path, position_encoding=pe)
    load(here, tmp_path / "weights")
    assert here.predict(Rows()) == pytest.approx(scores, rel=1e-5)


@pytest.mark.parametrize("pe", ENCODINGS)
def test_every_encoding_trains(pe: str, tmp_path: Path) -> None:
    assert_trains("DIN", pe, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pe"), [*in_turn(MODELS[1:], ENCODINGS), *in_turn(MODELS[3:] + MODELS[1:3], ENCODINGS)]
)
def test_every_encoding_trains_in_other_models(name: str, pe: str, tmp_path: Path) -> None:
    """In two of them."""
    assert_trains(name, pe, tmp_path)


def assert_trains(name: str, pe: str, folder: Path, **params: Any) -> None:
    """A step there has the loss of one here, and its gradients."""
    here = randomised(build(name, folder, position_encoding=pe, **params)).train()
    here._max_gradient_norm = 10.0
    with elsewhere():
        other = there(name, folder, pe, **params)
        other.load_state_dict(here.state_dict())
        losses = [model.train().train_step(BATCH).item() for model in (here, other)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
        assert {p.grad.device.type for p in other.parameters() if p.grad is not None} == {"elsewhere"}
        assert not missing(here.state_dict(), other.state_dict())
    with elsewhere() as counted:
        other.train_step(BATCH)
    assert not counted.waited


def missing(here: dict[str, Tensor], there: dict[str, Tensor]) -> set[str]:
    return {key for key in here if not torch.allclose(here[key], there[key].cpu(), rtol=1e-3, atol=3e-3)}


@pytest.mark.parametrize("pe", ["none", "cape"])
@pytest.mark.parametrize("name", MODELS)
def test_requests_of_like_size_are_one_recording(name: str, pe: str, tmp_path: Path) -> None:
    assert_records(name, pe, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pe"), [*product(["DIN"], OTHERS), *in_turn(["BST", "SASRec"], OTHERS)])
def test_so_are_those_of_any_encoding(name: str, pe: str, tmp_path: Path) -> None:
    """In target attention and in self-attention."""
    assert_records(name, pe, tmp_path)


def assert_records(name: str, pe: str, folder: Path) -> None:
    """Kernels that were recorded with one request score others as the model does."""
    model = randomised(build(name, folder, position_encoding=pe)).eval()
    requests = [requested(model, *size, seed) for seed, size in enumerate([(2, 5, 3), (2, 3, 4), (1, 1, 1), (2, 6, 3)])]
    wanted = [model.score_candidates(model.encode(histories), others).detach() for histories, others in requests]
    inputs = [inputs_from(model, *one) for one in requests]
    with elsewhere(), mock.patch.multiple(torch.cuda, **recorded.CUDA):
        other = there(name, folder, pe)
        other.load_state_dict(model.state_dict())
        cuda_graphs = CUDAGraphs(other)
        for _ in range(2):
            for given, want in zip(inputs, wanted, strict=True):
                assert torch.allclose(cuda_graphs(given), want, atol=1e-5)
        with elsewhere() as counted:
            cuda_graphs(inputs[1])
    assert set(cuda_graphs._graphs) == {(2, 6, 4), (2, 4, 4), (1, 1, 1)}
    assert counted.waited.total() == 1  # for the scores


class Saved:
    """In place of a checkpoint's file, which tensors without storage cannot be in."""

    state: Any = None

    def write(self, state: Any) -> None:
        self.state = tree_map_only(Tensor, lambda x: x.detach().clone(), state)

    def read(self) -> Any:
        return tree_map_only(Tensor, torch.clone, self.state)


class Spy:
    """A function that keeps what it has given."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call, self.answers = call, list[Any]()

    def __call__(self, *given: Any) -> Any:
        self.answers.append(self.call(*given))
        return self.answers[-1]


class TestStepGraphs:
    """Training steps as CUDA graphs, by a recording that repeats the kernels of its first step."""

    EVERYTHING: ClassVar[dict[str, Any]] = {
        "position_encoding": "cape",
        "net_dropout": 0.2,
        "attention_dropout": 0.2,
        "max_gradient_norm": 0.5,
    }

    @pytest.fixture(autouse=True)
    def _few_sizes(self) -> Iterator[None]:
        small = mock.patch.multiple(filled, SHARE=1, SAVED=0, VAIN=100)  # few sizes, and blocks of like length
        with elsewhere(), mock.patch.multiple(torch.cuda, **recorded.CUDA), small:
            yield

    def batches(self, count: int) -> list[dict[str, Tensor]]:
        draw = random.Random(0)
        return [batch([draw.randint(0, 6) for _ in range(6)], seed, slots=6) for seed in range(count)]

    def model(self, name: str, folder: Path, **params: Any) -> Any:
        given = self.EVERYTHING | params
        model = build(name, folder, gpu=0, **{key: x for key, x in given.items() if (name, key) not in UNREAD})
        return model.train()

    @pytest.mark.parametrize("name", ["DIN", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS[1:])])
    def test_twenty_steps_are_those_that_are_launched_one_by_one(self, name: str, tmp_path: Path) -> None:
        """With dropout, gradients that are clipped, and negatives that are drawn."""
        found = []
        for most in (0, step_graphs.MOST):
            model = self.model(name, tmp_path)
            graphs = StepGraphs(model)
            with mock.patch.object(step_graphs, "MOST", most):
                steps = [graphs(rows, 0.5) for rows in self.batches(20)]
            assert graphs.works
            assert len(graphs._graphs) in ((2, 3) if most else (0,))
            norms = {key: x.cpu() for key, x in model.gradients.norms.items()}
            weights = {key: x.cpu() for key, x in model.state_dict().items()}
            found.append(([float(loss) for loss in steps], weights, norms))
        graphed, wanted = found
        assert graphed[0] == pytest.approx(wanted[0], rel=1e-5)
        for one, other in zip(graphed[1:], wanted[1:], strict=True):
            assert one.keys() == other.keys()
            for key, x in other.items():
                torch.testing.assert_close(one[key], x, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("name", ["DIN", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS[1:])])
    def test_no_tensor_has_a_size_that_the_data_decide(self, name: str, tmp_path: Path) -> None:
        """Batches of one size, whose histories have other lengths, are captured with tensors of the same sizes."""
        found, rows = [], self.batches(8)
        for batches in (rows, rows[::-1]):
            graphs, spy = StepGraphs(self.model(name, tmp_path)), Spy(capture)
            with mock.patch.object(step_graphs, "capture", spy):
                for one in batches:
                    graphs(one, 0.5)
            kernels = [[tree_flatten(results)[0] for _, results in graph.kernels] for graph, _ in spy.answers]
            shapes = [[x.shape for x in chain(*one) if isinstance(x, Tensor)] for one in kernels]
            found.append(dict(zip(graphs._graphs, shapes, strict=True)))
        common = found[0].keys() & found[1].keys()  # which sizes there are depends on those before
        assert common
        for sizes in common:
            assert found[0][sizes] == found[1][sizes]

    def test_a_seed_that_the_host_draws_would_be_noticed(self, tmp_path: Path) -> None:
        """The test above is one that finds what is frozen into a recording."""

        def drawn(seeds: StepSeeds) -> Tensor:
            return torch.randint(2**62, (1,), generator=torch.Generator().manual_seed(int(seeds.step))).to("elsewhere")

        with mock.patch.object(StepSeeds, "next", drawn), pytest.raises(AssertionError, match="approx"):
            self.test_twenty_steps_are_those_that_are_launched_one_by_one("DIN", tmp_path)

    def fit(
        self, folder: Path, epochs: int, saved: Saved, captured: bool
    ) -> tuple[list[float], dict[str, Tensor], Any]:
        params = {
            "learning_rate_schedule": "linear",
            "weight_average": 0.3,
            "metrics": ["logloss"],
            "monitor": "logloss",
        }
        model = self.model("DIN", folder, **params)
        graphs = StepGraphs(model)
        made = mock.patch.object(StepGraphs, "of", return_value=graphs)
        with made, mock.patch.object(step_graphs, "MOST", step_graphs.MOST if captured else 0):
            rows = self.batches(8)
            if epochs == 1:  # the process ends after the first of two
                with mock.patch.object(_Training, "train_epoch", _once(_Training.train_epoch)), pytest.raises(Ended):
                    fit(model, Rows(*rows), Rows(*rows[:2]), 2, checkpoint=saved)
                return [], {}, graphs
            fitted = fit(model, Rows(*rows), Rows(*rows[:2]), epochs, checkpoint=saved)
        assert (model.step_graphs, model.fills) == (None, False)
        losses = [x for epoch in fitted.history for x in (epoch.loss, epoch.metrics["logloss"])]
        return losses, {key: x.cpu() for key, x in model.state_dict().items()}, graphs

    @pytest.mark.slow
    def test_a_training_with_schedule_and_average_is_the_same_and_goes_on(self, tmp_path: Path) -> None:
        losses, weights, graphs = self.fit(tmp_path, 2, Saved(), captured=False)
        assert not graphs._graphs
        killed = Saved()
        self.fit(tmp_path, 1, killed, captured=True)
        for saved in (Saved(), killed):
            own, its_weights, graphs = self.fit(tmp_path, 2, saved, captured=True)
            assert graphs.works
            assert own == pytest.approx(losses, rel=1e-5)
            for key, x in weights.items():
                torch.testing.assert_close(its_weights[key], x, rtol=1e-5, atol=1e-5, msg=key)

    def test_a_step_is_one_launch_and_a_few_copies_and_waits_for_nothing(self, tmp_path: Path) -> None:
        model, rows = self.model("DIN", tmp_path), self.batches(1)[0]
        graphs = StepGraphs(model)
        for _ in range(2):
            graphs(rows, 0.5)
        with elsewhere() as by_kernels:
            model.step_graphs = None
            one_by_one(model, rows, 1.0)
        with elsewhere() as counted, mock.patch.object(recorded.Recording, "replay"):
            graphs(rows, 0.5)
        assert not counted.waited
        assert counted.launches <= 7 < by_kernels.launches  # copies of the inputs, and of the results
        assert counted.sent.total() <= 4 + 2  # one per dtype, the seed and the rates
        with elsewhere() as counted:
            graphs(rows, 0.5)
        assert not counted.waited  # nor does any kernel of it

    def test_where_a_capture_fails_training_goes_on(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        model = self.model("DIN", tmp_path)
        graphs, broken = (
            StepGraphs(model),
            mock.Mock(side_effect=RuntimeError("operation not permitted\nwhen capturing")),
        )
        with mock.patch.object(step_graphs, "capture", broken):
            losses = [float(graphs(rows, 0.5)) for rows in self.batches(8)]
        assert all(map(math.isfinite, losses))
        assert broken.call_count == 1
        (record,) = caplog.records
        assert record.message.endswith("capturing one failed (RuntimeError: operation not permitted when capturing)")
        assert not model.fills


class Ended(Exception):
    """A process was killed."""


def _once(call: Callable[[Any], None]) -> Callable[[Any], None]:
    def called(training: Any) -> None:
        if training.epoch:
            raise Ended
        call(training)

    return called


UNREAD = {("TIN", "attention_dropout")}


@pytest.mark.slow
def test_a_second_trial_of_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)  # where steps are timed
    generate(tmp_path / "small", users=20, valid_users=10, test_users=10, items=50, categories=5)
    small = {"embedding_dim": 4, "attention_hidden_units": [4], "dnn_hidden_units": [4], "epochs": 1, "batch_size": 50}
    space = {"learning_rate": [0.01, 0.001], "position_dim": None, "attention_dropout": None, "net_dropout": None}
    with elsewhere():
        search = plan("DIN", "cape", "small", tmp_path, small, space, gpu=0)
        assert tune(search, 2, tmp_path / "out") == 0  # a model folder needs storage, which its tensors lack
    trials = (tmp_path / "out" / "trials.csv").read_text().splitlines()[1:]
    assert [trial.split(",")[1] for trial in trials] == ["complete", "complete"]
