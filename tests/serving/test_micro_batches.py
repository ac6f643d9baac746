"""Requests that wait together are scored together, within bounds, each with its own answer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ctr_pe.serving import micro_batches
from ctr_pe.serving.micro_batches import SURE, MicroBatches, Overloaded
from ctr_pe.serving.service_options import Queueing
from tests.support.processes import PATIENCE

SIZE = 10  # candidates of a request
Ask = Callable[..., Awaitable[Any]]


def scored(test: Callable[[Ask, threading.Event, MicroBatches], Awaitable[None]], **queueing: Any) -> list[Any]:
    """The batches that ``test`` had scored, each its model and its requests. It asks for requests, of which "wait" is
    scored when the event is set, an exception is its own answer, and "raise" ends its batch with one."""
    seen: list[Any] = []
    go = threading.Event()

    def score(model: Any, requests: Sequence[Any]) -> list[Any]:
        seen.append((model, list(requests)))
        assert "wait" not in requests or go.wait(PATIENCE)
        if "raise" in requests:
            raise ValueError("no scores")
        return [one if isinstance(one, Exception) else f"{model} {one}" for one in requests]

    async def main() -> None:
        with ThreadPoolExecutor(1) as threads:
            batches = MicroBatches(score, threads, 1, Queueing(**{"wait": 30.0} | queueing))

            async def ask(request: Any, model: str = "m", wait: float | None = None) -> Any:
                return await batches(model, request, SIZE, wait)

            try:
                await test(ask, go, batches)
            finally:
                go.set()

    asyncio.run(main())
    return seen


async def one_waits(ask: Ask) -> asyncio.Task[Any]:
    """A request that has the thread."""
    task = asyncio.ensure_future(ask("wait"))
    await asyncio.sleep(0.05)
    return task


@pytest.mark.parametrize(
    ("queueing", "want"),
    [({}, [5]), ({"batch": 2}, [2, 2, 1]), ({"candidates": 3 * SIZE}, [3, 2]), ({"candidates": 1}, [1] * 5)],
)
def test_a_batch_has_what_waited_within_its_bounds(queueing: dict[str, Any], want: list[int]) -> None:
    async def test(ask: Ask, go: threading.Event, batches: MicroBatches) -> None:
        first = await one_waits(ask)
        others = [asyncio.ensure_future(ask(number)) for number in range(5)]
        await asyncio.sleep(0)
        assert batches.open == 6
        go.set()
        assert [await one for one in (first, *others)] == ["m wait", *(f"m {number}" for number in range(5))]
        assert batches.open == 0

    seen = scored(test, **queueing)
    assert [len(requests) for _, requests in seen] == [1, *want]
    assert [one for _, requests in seen for one in requests] == ["wait", *range(5)]


def test_a_window_waits_for_more_but_not_once_the_batch_is_full() -> None:
    async def test(ask: Ask, go: threading.Event, batches: MicroBatches) -> None:
        first = asyncio.ensure_future(ask(0))
        await asyncio.sleep(0.02)
        more = [asyncio.ensure_future(ask(number)) for number in (1, 2)]
        async with asyncio.timeout(10):
            assert [await one for one in (first, *more)] == ["m 0", "m 1", "m 2"]

    assert scored(test, window=60.0, batch=3) == [("m", [0, 1, 2])]


def test_requests_of_a_replaced_model_are_no_part_of_a_batch_of_the_new_one() -> None:
    async def test(ask: Ask, go: threading.Event, batches: MicroBatches) -> None:
        asked = [await one_waits(ask), *(asyncio.ensure_future(ask(model, model)) for model in "aabba")]
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*asked)

    assert scored(test)[1:] == [("a", ["a", "a"]), ("b", ["b", "b"]), ("a", ["a"])]


def test_what_is_wrong_with_one_request_is_its_own_answer() -> None:
    async def test(ask: Ask, go: threading.Event, batches: MicroBatches) -> None:
        asked = [ask(0), ask(KeyError("mine")), ask(1)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(one) for one in answers] == [str, KeyError, str]
        together = await asyncio.gather(ask("raise"), ask(0), return_exceptions=True)
        assert [type(one) for one in together] == [ValueError] * 2
        assert await ask(1) == "m 1"  # the thread is free again

    scored(test)


def test_a_request_without_a_place_or_time_is_turned_away_and_never_scored() -> None:
    async def test(ask: Ask, go: threading.Event, batches: MicroBatches) -> None:
        first = await one_waits(ask)
        late, gone = asyncio.ensure_future(ask("late", wait=0.01)), asyncio.ensure_future(ask("gone"))
        await asyncio.sleep(0.05)
        gone.cancel()
        third = asyncio.ensure_future(ask(0))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="too many"):
            await ask(1)
        go.set()
        with pytest.raises(Overloaded, match="was over"):
            await late
        assert list(await asyncio.gather(first, third)) == ["m wait", "m 0"]
        slow = [asyncio.ensure_future(ask(name)) for name in "ab"]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="in time"):  # the first one took a tenth of a second
            await ask("c", wait=0.001)
        await asyncio.gather(*slow)

    assert [requests for _, requests in scored(test, waiting=3)] == [["wait"], [0], ["a", "b"]]


@pytest.mark.parametrize(
    ("patience", "sure", "taken"), [(1.1, SURE, False), (1.5, SURE, True), (0.9, 1.0, False), (1.1, 1.0, True)]
)
def test_a_request_is_read_only_where_its_turn_is_sure_and_kept_while_it_can_have_it(
    patience: float, sure: float, taken: bool
) -> None:
    """Ten requests of a tenth of a second are before it."""

    async def test(ask: Ask, go: threading.Event, batches: MicroBatches) -> None:
        first = await one_waits(ask)
        others = [asyncio.ensure_future(ask(number)) for number in range(10)]
        await asyncio.sleep(0)
        batches._pace, batches._running = 0.1, dict.fromkeys(batches._running, 0.0)
        problem = batches.problem(patience, sure)
        assert problem is None if taken else problem is not None and "in time" in problem
        go.set()
        await asyncio.gather(first, *others)

    scored(test, wait=10.0)


def test_after_a_refusal_the_loop_rests_until_a_batch_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batches, "REST", 10.0)
    done = threading.Event()  # set by the thread before its answer

    async def test(ask: Ask, go: threading.Event, batches: MicroBatches) -> None:
        batches.rest()
        await asyncio.sleep(0)  # a thread is free, and nothing to wait for
        first = await one_waits(ask)
        batches.rest()
        batches.no_rest()
        await asyncio.sleep(0)
        assert not done.is_set()
        threading.Timer(0.05, lambda: (done.set(), go.set())).start()
        batches.rest()
        batches.rest()
        began = time.monotonic()
        await asyncio.sleep(0)
        assert done.is_set()
        assert await first == "m wait"
        assert time.monotonic() - began < 5

    scored(test)
