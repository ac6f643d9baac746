"""Scores by an exported file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from ctr_pe.data.timeline import EncodedLog
from ctr_pe.serving.request_graph import inputs_from, inputs_of
from ctr_pe.serving.scorer import Scorer


def onnx_scores(
    scorer: Scorer, file: Path, requests: pl.DataFrame, events: EncodedLog | None
) -> npt.NDArray[np.float32]:
    """(n,) of requests by an ONNX file, whose inputs are as the scorer encodes the requests and their events."""
    import onnxruntime

    encoded, rows = scorer.encoder.requests(requests, events), np.arange(requests.height)
    inputs, kinds = inputs_from(scorer.model, encoded.histories(rows), encoded.fields(rows)), inputs_of(scorer.model)
    session, given = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"]), {}
    for one in session.get_inputs():
        values = inputs[one.name].unsqueeze(1) if kinds[one.name] == "target" else inputs[one.name]
        given[one.name] = values.to(torch.float32 if one.type == "tensor(float)" else torch.int64).numpy()
    found: npt.NDArray[np.float32] = session.run(None, given)[0][:, 0]
    return found
