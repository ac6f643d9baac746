"""One request of a ranking service: one user, many candidates. What depends on the history alone is computed once.

Repeated rows, the baseline, are a batch with a copy of the history for each candidate.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmark.speed import data, models
from benchmark.speed.cases import Settings
from benchmark.speed.memory import Peak, status
from benchmark.speed.timing import Figure, alternate, say
from ctr_pe.serving.export import export_model
from ctr_pe.serving.request_graph import inputs_of

FIELDS = ("item_id", "cate_id")
CHANGES: dict[str, dict[str, Any]] = {"DIN": {"attention_hidden_units": [64]}}
"""Of the published configurations: DIN with FuxiCTR's default score, whose one hidden layer can share what it computes.
The second and third of the published 512, 256, 128 belong to (target, item) pairs, whoever computes them."""


def against_fuxictr(settings: Settings, model: str, pe: str, candidates: int) -> Figure:
    """FuxiCTR's model with repeated rows over ours."""
    mine, shared, _, rows = _request(settings, model, pe, candidates)
    theirs, name = models.baseline(model, mine.dataset, settings.gpu, settings.zoo, **CHANGES.get(model, {}))
    return _alternate(settings, shared, _call(theirs.eval(), rows), f"{name}, repeated rows", candidates)


def against_repeated_rows(settings: Settings, model: str, pe: str, candidates: int) -> Figure:
    """Our own repeated rows over our shared history."""
    _, shared, repeated, _ = _request(settings, model, pe, candidates)
    return _alternate(settings, shared, repeated, "repeated rows", candidates)


def onnx(settings: Settings, model: str, pe: str, candidates: int) -> Figure:
    """Milliseconds (p50) of one request to the exported model in onnxruntime; ours in torch in the details."""
    import onnxruntime

    mine, shared, _, rows = _request(settings, model, pe, candidates)
    file = settings.folder / "model.onnx"
    export_model(mine.model, {}, "onnx", file)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(file), options)
    kinds = inputs_of(mine.model)
    lengths = (rows[data.HISTORY[0]][:1] != 0).sum(1)
    one = {name: rows[name][:1] if kind in ("history", "age") else lengths if kind == "length" else rows[name][None]
           for name, kind in kinds.items()}  # fmt: skip
    given = {name: values.numpy() for name, values in one.items()}
    timed = alternate(lambda _: session.run(["scores"], given), shared, settings.size(100, 5), warm_up=5)
    theirs, torchs = (1000 * statistics.median(seconds) for seconds in (timed.ours, timed.baseline))
    say(f"{model} with {pe}, {candidates} candidates: onnxruntime {theirs:.3g} ms, torch {torchs:.3g} ms")
    return Figure([theirs], unit="ms", against="torch in the details", details={"torch": torchs})


def slowest(settings: Settings, model: str, pe: str, candidates: int) -> Figure:
    """Milliseconds of one request in a hundred (p99); half of them (p50) in the details."""
    _, shared, _, _ = _request(settings, model, pe, candidates)
    taken = alternate(shared, lambda _: None, settings.size(300, 20), warm_up=10).ours
    percentiles = statistics.quantiles([1000 * seconds for seconds in taken], n=100)
    say(f"{model} with {pe}, {candidates} candidates: p50 {percentiles[49]:.3g} ms, p99 {percentiles[98]:.3g} ms")
    return Figure([percentiles[98]], unit="ms", against="p50 in the details", details={"p50": percentiles[49]})


def memory_(settings: Settings, model: str, pe: str, candidates: int) -> Figure:
    """The most memory that a request takes besides the model, in MB."""
    _, shared, _, _ = _request(settings, model, pe, candidates)
    before = status("RssAnon")
    with Peak() as peak:
        for number in range(settings.size(50, 5)):
            shared(number)
    return Figure([(peak.bytes - before) / 1e6], unit="MB", against="the process with the model")


class _Ours:
    def __init__(self, settings: Settings, model: str, pe: str) -> None:
        self.dataset = data.write(settings.folder / "amazon", data.draw(8, full=True), ages=models.needs_age(pe))
        self.model = models.ours(model, self.dataset, settings.gpu, pe=pe, **CHANGES.get(model, {})).eval()


def _request(
    settings: Settings, model: str, pe: str, candidates: int
) -> tuple[_Ours, Callable[[int], object], Callable[[int], object], data.Batch]:
    """Ours, its call with a shared history and with repeated rows, and these rows, of one user with a full history."""
    candidates = settings.size(candidates, 20)
    mine = _Ours(settings, model, pe)
    ((batch, _),) = data.batches(mine.dataset, mine.model.feature_map, 1, 1)
    items = torch.from_numpy(data.draw(candidates, seed=1).item)
    targets = {"item_id": items, "cate_id": torch.from_numpy(data.category(items.numpy()))}
    user = batch.to(mine.model.device)
    rows = {name: values.expand(candidates, *values.shape[1:]).contiguous() for name, values in user.items()}
    rows |= {name: targets[name].to(mine.model.device) for name in FIELDS}
    asked = {name: rows[name].unsqueeze(0) for name in FIELDS}

    @torch.inference_mode()
    def shared(number: int) -> object:
        return mine.model.score_candidates(mine.model.encode(user), asked)

    return mine, shared, _call(mine.model, rows), rows


def _call(model: Any, rows: data.Batch) -> Callable[[int], object]:
    @torch.inference_mode()
    def call(number: int) -> object:
        return model.forward(rows)

    return call


def _alternate(
    settings: Settings, ours: Callable[[int], object], theirs: Callable[[int], object], against: str, candidates: int
) -> Figure:
    say(f"one user, {settings.size(candidates, 20)} candidates, history {data.MAX_LEN}, against {against}")
    timed = alternate(ours, theirs, settings.size(31, settings.repeats), warm_up=2, wait=models.wait(settings.gpu))
    return timed.speedup(against, candidates=settings.size(candidates, 20))
