"""Work in parts on Ray and Spark: each part once, groups whole, a dead worker's part again, errors in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctr_pe.utils import engines
from ctr_pe.utils.engines import RayEngine, open_engine
from ctr_pe.utils.errors import UserError
from tests.support.on_clusters import CLUSTERS, DyingOnce


@pytest.mark.parametrize("name", ["rya", "spark:local", "ray:x", "polars"])
def test_an_unknown_engine_is_named(name: str) -> None:
    with pytest.raises(UserError, match=f"engine='{name}'"):
        open_engine(name)


def test_spark_does_not_take_a_gpu() -> None:
    with pytest.raises(UserError, match="engine='spark' computes on CPUs: gpu=-1"):
        open_engine("spark", gpu=0)


class EndedRay:
    """Ray, as far as a call in parts needs it; once it has ended, nothing may be asked of it."""

    exceptions = SimpleNamespace(RayTaskError=OSError, RayError=OSError)

    def __init__(self) -> None:
        self.ended, self.cancelled = False, list[int]()

    def remote(self, **_: Any) -> Callable[[Any], Any]:
        return lambda call: SimpleNamespace(remote=lambda given, part: part)

    def put(self, what: Any) -> Any:
        return what

    def wait(self, running: list[int]) -> tuple[list[int], list[int]]:
        return running[:1], running[1:]

    def get(self, part: int) -> tuple[None, int]:
        return None, part

    def cancel(self, part: int, force: bool) -> None:
        assert not self.ended
        self.cancelled.append(part)

    def is_initialized(self) -> bool:
        return not self.ended

    def shutdown(self) -> None:
        self.ended = True


@pytest.mark.parametrize("closed_first", [True, False])
def test_parts_under_way_are_cancelled_once_and_before_ray_ends(
    closed_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked anything after its end, Ray would begin anew on this machine."""
    ray = EndedRay()
    monkeypatch.setattr(engines, "connect_ray", lambda *_: (ray, True))
    engine = RayEngine()
    answers: Any = engine.map(square, range(5))
    assert next(answers) == 0
    ends = [engine.close, answers.close]
    for end in ends if closed_first else ends[::-1]:
        end()
    assert sorted(ray.cancelled) == [1, 2, 3, 4]
    assert ray.ended


@pytest.fixture(scope="module", params=sorted(CLUSTERS))
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    with CLUSTERS[request.param]():
        yield request.param


def square(number: int) -> int:
    return number * number


def refuse(number: int) -> int:
    if number == 2:
        raise UserError("log.csv: row 2: wrong")
    return number


def fail(number: int) -> int:
    raise ValueError("first line\nsecond line")


def digits(number: int) -> Iterator[tuple[int, bytes]]:
    return ((digit, bytes([number])) for digit in (0, 3, 4) if (number + digit) % 2)


def write(folder: Path, group: int, pieces: list[bytes]) -> None:
    (folder / str(group)).write_bytes(b"".join(pieces))


@pytest.mark.slow
def test_parts_and_groups(engine: str, tmp_path: Path) -> None:
    with closing(open_engine(engine)) as opened:
        assert sorted(opened.map(square, range(7))) == [0, 1, 4, 9, 16, 25, 36]
        assert list(opened.map(square, [])) == []
        with pytest.raises(UserError, match=r"^log\.csv: row 2: wrong$"):
            list(opened.map(refuse, range(4)))
        with pytest.raises(UserError, match=f"^engine='{engine}': ValueError: first line") as error:
            list(opened.map(fail, [1]))
        assert "\n" not in str(error.value)
        opened.shuffle(digits, 6, partial(write, tmp_path))
        found = {int(file.name): list(file.read_bytes()) for file in tmp_path.iterdir()}
        assert found == {0: [1, 3, 5], 3: [0, 2, 4], 4: [1, 3, 5]}


@pytest.mark.slow
def test_a_part_whose_worker_dies_is_made_again_alone(engine: str, tmp_path: Path) -> None:
    with closing(open_engine(engine)) as opened:
        assert sorted(opened.map(DyingOnce(square, tmp_path, 2), range(5))) == [0, 1, 4, 9, 16]
    assert DyingOnce.calls(tmp_path) == [0, 1, 2, 2, 3, 4]
