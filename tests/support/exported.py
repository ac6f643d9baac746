"""Scores by an exported file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from torch import Tensor

from ctr_pe.data.timeline import EncodedLog
from ctr_pe.serving.request_graph import inputs_from, inputs_of
from ctr_pe.serving.scorer import Scorer


def graph_inputs(scorer: Scorer, requests: pl.DataFrame, events: EncodedLog | None) -> dict[str, Tensor]:
    """Inputs of an exported graph, of requests and their events as the scorer encodes them; each has one target."""
    encoded, rows = scorer.encoder.requests(requests, events), np.arange(requests.height)
    found = inputs_from(scorer.model, encoded.histories(rows), encoded.fields(rows))
    kinds = inputs_of(scorer.model)
    return {name: found[name].unsqueeze(1) if kinds[name] == "target" else found[name] for name in kinds}


def onnx_scores(
    scorer: Scorer, file: Path, requests: pl.DataFrame, events: EncodedLog | None
) -> npt.NDArray[np.float32]:
    """(n,) of requests by an ONNX file, whose inputs are as the scorer encodes the requests and their events."""
    import onnxruntime

    inputs = graph_inputs(scorer, requests, events)
    session, given = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"]), {}
    for one in session.get_inputs():
        given[one.name] = inputs[one.name].to(torch.float32 if one.type == "tensor(float)" else torch.int64).numpy()
    found: npt.NDArray[np.float32] = session.run(None, given)[0][:, 0]
    return found
