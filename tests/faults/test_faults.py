"""Every fault, put into a copy of the package, makes the tests that are named beside it fail.

The list shows what the fast tests cover. A fault is a description, a text that occurs once in the package, what
replaces it, and the tests that must fail.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.slow


class Fault(NamedTuple):
    about: str
    old: str
    new: str
    tests: str


BUILD, CUTS, LOADER = "tests/data/logs/test_log.py::", "tests/data/logs/test_cuts.py::", "tests/data/test_loader.py::"
METRICS, PAIRED = "tests/evaluation/test_metrics.py::", "tests/evaluation/test_paired.py::"
TABLES = "tests/study/test_tables.py::"
POSITIONS = "tests/sequence/test_positions.py::"
PROPERTIES, RELATIVE, GRU = "tests/pe/test_properties.py::", "tests/pe/test_relative.py::", "tests/units/test_gru.py::"
DIN = f"{BUILD}test_din_equals_the_reference[500000-time-0]"
DIN_IN_BLOCKS = f"{BUILD}test_din_equals_the_reference[60-order-0]"
ADDED_UP = f"{PAIRED}test_seeds_and_users_add_up"
CHANCE = (
    f"{PAIRED}test_chance_is_called_significant_one_time_in_twenty_and_the_detectable_difference_four_times_in_five"
)
CONTEXTUAL = f"{PROPERTIES}TestContextual::"

PACKAGE = ("ctr_pe", "model_zoo")

FAULTS = [
    # data
    Fault(
        "a history holds the event that it is for",
        "end = self._before(clock, user, first, end, before)",
        "end = self._before(clock, user, first, end, before) + 1",
        DIN,
    ),
    Fault(
        "a history holds events of the same second",
        "end = self._before(clock, user, first, end, before)",
        "end = self._before(clock, user, first, end, before + 1) - 1",
        DIN,
    ),
    Fault(
        "a long history keeps its oldest events",
        "begin = np.maximum(first, end - count)",
        "begin, end = first, np.minimum(end, first + count)",
        DIN,
    ),
    Fault(
        "a history goes on with the events of another user",
        "begin = np.maximum(first, end - count)",
        "begin = np.maximum(0, end - count)",
        DIN_IN_BLOCKS,
    ),
    Fault(
        "the last event of a user belongs to the valid split",
        "[np.minimum(later, 2)]",
        "[np.minimum(later + 1, 2)]",
        DIN,
    ),
    Fault(
        "a row at the time of a cut is of the split before",
        'pl.col("time") >= test, pl.col("time") >= valid',
        'pl.col("time") > test, pl.col("time") > valid',
        f"{CUTS}test_a_row_at_the_time_of_a_cut_is_of_the_later_split",
    ),
    Fault(
        "a negative was chosen by its user",
        "gaps = clicked - (np.arange(len(clicked)) - start[whose])",
        "gaps = clicked + 0 * start[whose]",
        f"{BUILD}test_a_negative_was_never_chosen_by_its_user_before_or_after",
    ),
    Fault(
        "some items are never drawn",
        "generator.integers(0, np.maximum(left, 1))",
        "generator.integers(0, np.maximum(left // 2, 1))",
        f"{BUILD}test_negatives_are_uniform_over_what_is_left_and_depend_on_the_seed",
    ),
    Fault(
        "negatives of all blocks are drawn alike",
        "log.catalogue.height, [recipe.seed, number], recipe)",
        "log.catalogue.height, [recipe.seed], recipe)",
        f"{CUTS}test_users_of_different_blocks_get_negatives_of_their_own",
    ),
    Fault(
        "ids go by all rows",
        "train = rows.select(rows.split == 0)",
        "train = rows",
        f"{BUILD}test_ids_go_by_frequency_in_the_training_rows",
    ),
    Fault(
        "ages are in milliseconds",
        "(np.repeat(now[rows], lengths) - self.time[source]) // SECOND",
        "(np.repeat(now[rows], lengths) - self.time[source])",
        f"{BUILD}test_rows_count_in_milliseconds_or_dates_become_seconds",
    ),
    Fault(
        "rows that nobody clicked make a history",
        '= columns["label"] == 0',
        '= columns["label"] == 2',
        f"{BUILD}test_a_log_of_impressions_under_din_gives_its_positives",
    ),
    Fault(
        "batches are padded on the other side",
        "padded[torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)] = values",
        "padded[torch.arange(width, device=lengths.device) >= width - lengths.unsqueeze(1)] = values",
        f"{LOADER}test_batches_equal_the_rows_read_one_by_one",
    ),
    Fault(
        "every epoch has the order of the first",
        "np.random.default_rng((self.seed, self.epoch))",
        "np.random.default_rng((self.seed, 0))",
        f"{LOADER}test_each_epoch_is_a_new_order_that_depends_on_seed_and_epoch_only",
    ),
    # statistics
    Fault(
        "every row is a user of its own",
        "codes, count = group_codes(users, len(np.asarray(labels)))",
        "codes, count = np.arange(len(np.asarray(labels))), len(np.asarray(labels))",
        f"{PAIRED}test_the_part_of_the_users_is_that_of_a_bootstrap",
    ),
    Fault(
        "users are not paired",
        "np.concatenate([added[name], added[baseline]])",
        "np.block([[added[name], 0 * added[name]], [0 * added[baseline], added[baseline]]])",
        f"{PAIRED}test_the_part_of_the_users_is_that_of_a_bootstrap",
    ),
    Fault(
        "seeds are taken as given",
        "[*seeds, any_runs]",
        "[any_runs]",
        CHANCE,
    ),
    Fault(
        "more seeds do not take off that runs suit some users",
        "_t_test(value, [any_runs])",
        "_t_test(value, [(of_users, users - 1)])",
        f"{PAIRED}test_what_any_number_of_runs_would_show_is_what_very_many_do",
    ),
    Fault(
        "the users that suit a run count twice",
        "max(of_users - factor * spread.interaction, 0.0)",
        "of_users",
        ADDED_UP,
    ),
    Fault(
        "p values are one-sided",
        "p = 2 * float(stdtr(freedom, -abs(value) / error))",
        "p = float(stdtr(freedom, -abs(value) / error))",
        ADDED_UP,
    ),
    Fault(
        "intervals hold nine tenths",
        "float(stdtrit(freedom, 1 - LEVEL / 2))",
        "float(stdtrit(freedom, 1 - LEVEL))",
        ADDED_UP,
    ),
    Fault(
        "an AUC's rows count for the users of the clicked ones only",
        "placement[~clicked] = _lower(-scores[~clicked], -scores[clicked])",
        "placement[~clicked] = 0 * _lower(-scores[~clicked], -scores[clicked])",
        f"{PAIRED}test_a_users_influence_is_the_derivative_of_the_metric_by_its_weight",
    ),
    Fault(
        "p values are not corrected",
        "steps = p[order] * np.arange(len(order), 0, -1)",
        "steps = p[order]",
        f"{PAIRED}test_holm_by_hand",
    ),
    Fault(
        "the table shows p uncorrected",
        "number(found.detectable), p_text(found.p_holm)]",
        "number(found.detectable), p_text(found.p)]",
        f"{TABLES}test_the_p_that_is_shown_is_the_corrected_one",
    ),
    Fault(
        "the gain of a suite is that of its smallest seed",
        "pairs = {cell: (runs[cell], runs[none])",
        "pairs = {cell: (dict([min(runs[cell].items())]), dict([min(runs[none].items())]))",
        "tests/study/test_suite.py::test_runs_resumes_and_prints_every_cell",
    ),
    Fault(
        "of two lines for one run the last counts",
        "if found.key not in results or results[found.key].failed:",
        "if True:",
        "tests/study/test_store.py::test_of_two_lines_for_one_run_the_first_counts",
    ),
    Fault(
        "heldout selects the epoch on the test rows",
        '"heldout": (("train",), "valid")',
        '"heldout": (("train",), "test")',
        "tests/training/test_run.py::test_the_epoch_is_selected_on_the_split_of_the_protocol",
    ),
    Fault(
        "corrected p values fall",
        "np.maximum.accumulate(steps)",
        "steps",
        f"{PAIRED}test_holm_by_hand",
    ),
    Fault(
        "gAUC gives all users the same weight",
        '{"gAUC": np.bincount(codes, weight, count), ',
        '{"gAUC": np.ones(count), ',
        f"{METRICS}test_gauc_by_hand",
    ),
    Fault(
        "gAUC counts users of one class",
        "counted = np.where(np.isnan(auc), 0, of_group)",
        "counted = of_group",
        f"{METRICS}test_gauc_by_hand",
    ),
    Fault(
        "ties count nothing",
        "weights=block_positives * (below + block_negatives / 2)",
        "weights=block_positives * below",
        f"{METRICS}test_equal_to_fuxictr",
    ),
    # core
    Fault(
        "distances come from the slot",
        "cls(mask, lengths, distance.masked_fill(~mask, 0), age, layout=layout)",
        "cls(mask, lengths, torch.arange(mask.shape[1], 0, -1).expand_as(mask), age, layout=layout)",
        f"{POSITIONS}test_distance_counts_from_the_newest_real_item_whatever_the_padding",
    ),
    Fault(
        "the target is an item of the past",
        "age = None if self.age is None else nn.functional.pad(self.age, (0, 1))",
        "age = None if self.age is None else nn.functional.pad(self.age, (0, 1), value=1)",
        "tests/sequence/test_with_target.py",
    ),
    Fault(
        "the target's distance is one",
        "zero = self.distance.new_zeros(1)",
        "zero = self.distance.new_ones(1)",
        f"{POSITIONS}test_pairs_of_a_target",
    ),
    Fault(
        "a causal query sees one item more",
        "allowed & (block.slot_distance <= block.slot_distance.unsqueeze(-1)).mT",
        "allowed & (block.slot_distance <= block.slot_distance.unsqueeze(-1) + 1).mT",
        f"{POSITIONS}test_pairs_of_items",
    ),
    Fault(
        "gates are summed from the oldest item",
        "return x.flip(-1).cumsum(-1).flip(-1)",
        "return x.cumsum(-1)",
        f"{CONTEXTUAL}test_open_gates_give_relative_positions_closed_gates_none",
    ),
    Fault(
        "interpolation takes the row above",
        "value = table.gather(-1, low)",
        "value = table[..., 1:].gather(-1, low)",
        f"{CONTEXTUAL}test_scoring_once_equals_scoring_interpolated_rows",
    ),
    Fault(
        "what is kept is not scaled",
        "return CHOICES / (CHOICES - dropped(rate)) if dropped(rate) < CHOICES else 0.0",
        "return 1.0",
        "tests/units/test_dropout.py::test_rate_and_mean_and_independence",
    ),
    Fault(
        "the slowest planes rotate fastest",
        "self.base ** (plane * (-2.0 / max(width, 1)))",
        "self.base ** (plane * (2.0 / max(width, 1)))",
        "tests/pe/test_against_reference.py::test_target_attention",
    ),
    Fault(
        "items after the query get no bias",
        "torch.log1p(b.unsqueeze(1) * offset.abs())",
        "torch.log1p(b.unsqueeze(1) * offset.clamp(min=0))",
        f"{RELATIVE}TestKerple::test_falls_strictly_from_zero",
    ),
    Fault(
        "attention does not scale the update of the AUGRU",
        "return torch.lerp(state, new, weight * update)",
        "return torch.lerp(state, new, update)",
        f"{GRU}TestAttention::test_augru_without_attention_stays_where_it_is",
    ),
    Fault(
        "only the last link's loss of a name counts",
        "total[name] = total[name] + loss if name in total else loss",
        "total[name] = loss",
        "tests/pe/test_chain_losses.py",
    ),
    Fault(
        "SASRec drops nothing of its input",
        "input_dropout=hidden_dropout,",
        "input_dropout=0.0,",
        "tests/models/test_input_dropout.py",
    ),
]


@pytest.fixture(scope="module")
def copy(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout. Links within it stay links, so that each module is one file."""
    root = tmp_path_factory.mktemp("copy") / "checkout"
    ignored = shutil.ignore_patterns("__pycache__", ".*", "results")
    for folder in (*PACKAGE, "tests", "benchmark", "config"):
        shutil.copytree(checkout / folder, root / folder, symlinks=True, ignore=ignored)
    shutil.copy(checkout / "pyproject.toml", root)
    return root


def environment(copy: Path) -> dict[str, str]:
    """Of processes that import from the copy, whatever is installed."""
    return {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="module")
def run(copy: Path) -> Iterator[Callable[..., tuple[int, str]]]:
    """Runs tests of the copy, each time in a process of its own -> exit code, output."""
    # What does not change is compiled once; by the content, for a fault may come within a second.
    compiled = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", *PACKAGE, "tests/support"]
    subprocess.run([sys.executable, *compiled], cwd=copy, check=True)
    command = [sys.executable, "-m", "tests.support.forked_tests"]
    with subprocess.Popen(
        command, cwd=copy, env=environment(copy), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def ran(*tests: str) -> tuple[int, str]:
            slow_too = ["-m", ""] if all("::" in test for test in tests) else []  # of tests by their names
            arguments = ["-q", "-x", "--tb=line", "-p", "no:cacheprovider", "-n", "0", *slow_too, *tests]
            print(json.dumps(arguments), file=process.stdin, flush=True)
            code, output = json.loads(process.stdout.readline())
            return code, output

        yield ran
        process.stdin.close()


@pytest.fixture
def broken(copy: Path, fault: Fault) -> Iterator[None]:
    texts = {path: path.read_text(encoding="utf-8") for of in PACKAGE for path in sorted((copy / of).rglob("*.py"))}
    found = [path for path, text in texts.items() for _ in range(text.count(fault.old))]
    assert len(found) == 1, f"'{fault.old}' is {len(found)} times in the package: name another text for this fault"
    (path,) = found
    path.write_text(texts[path].replace(fault.old, fault.new), encoding="utf-8")
    yield
    path.write_text(texts[path], encoding="utf-8")


def test_modules_are_imported_from_the_copy(copy: Path) -> None:
    code = "import ctr_pe, ctr_pe.model_zoo.din; print(ctr_pe.__file__, ctr_pe.model_zoo.din.__file__)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=copy, env=environment(copy), capture_output=True, text=True)
    root, found = copy.resolve(), ran.stdout.split()
    assert [Path(file).resolve() for file in found] == [root / "ctr_pe/__init__.py", root / "model_zoo/din.py"]


def test_unbroken_all_of_them_pass(run: Callable[..., tuple[int, str]]) -> None:
    code, output = run(*sorted({fault.tests for fault in FAULTS}))
    assert code == 0, output


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.about for fault in FAULTS])
@pytest.mark.usefixtures("broken")
def test_is_noticed(run: Callable[..., tuple[int, str]], fault: Fault) -> None:
    """By a test that fails: one that cannot be imported or prepared counts as an error."""
    code, output = run(fault.tests)
    assert (code, "1 failed" in output) == (1, True), f"{fault.about}: nobody noticed\n{output}"
