"""SASRec drops entries of the items before its first block (Kang and McAuley 2018, section III-A)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tests.support.models import batch, build


def test_sasrec_drops_entries_of_its_input_in_training_only(tmp_path: Path) -> None:
    rate = 0.25
    model = build("SASRec", tmp_path, hidden_dropout=rate)
    seen: list[Tensor] = []
    model.transformers[0].blocks[0].layer_norm1.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    rows = batch([6] * 40)
    with torch.no_grad():
        model.eval()(rows)
        model.train()(rows)
    whole, dropped = seen
    kept = dropped != 0
    assert (whole != 0).all()
    assert abs(1 - kept.float().mean().item() - rate) < 0.05
    assert torch.allclose(dropped[kept], whole[kept] / (1 - rate), rtol=1e-5)
