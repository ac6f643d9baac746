"""The state of a training in one file, from which an equal run goes on after its process was killed.

The file is safetensors: its header has the values as JSON.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ctr_pe.training.weights import own
from ctr_pe.utils.errors import UserError
from ctr_pe.utils.files import replacing

TENSOR, PAIRS = "tensor", "pairs"  # the keys of JSON objects that stand for a tensor and for a mapping


@dataclass(frozen=True)
class Checkpoint:
    """``file`` holds the state of the run that ``run`` describes."""

    file: Path
    run: str

    def write(self, state: Mapping[str, Any]) -> None:
        """Replace the file: all or nothing. ``state``: values of JSON and tensors in mappings and lists.

        Raises UserError if it cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        tensors: dict[str, Tensor] = {}
        header = {"run": self.run, "state": json.dumps(_packed(state, tensors))}
        try:
            with replacing(self.file) as partial:
                save_file(tensors, partial, header)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.file}: {getattr(error, 'strerror', None) or error}") from None

    def read(self) -> Any:
        """The state, tuples as lists; None without a file, or, after a line in the log, if it is damaged or another
        run's."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.file, "pt") as content:
                header = content.metadata() or {}
                if header.get("run") == self.run:
                    return _unpacked(json.loads(header["state"]), content.get_tensor)
            problem = "the state of another run"
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            problem = f"damaged ({type(error).__name__})"
        logging.warning("%s: %s: training starts at its beginning", self.file, problem)
        return None


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of all random generators that a training may draw from."""
    return {
        "python": random.getstate(),
        "numpy": [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],  # noqa: NPY002
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Go on with the random generators of :func:`random_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def _packed(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON; its tensors go into ``tensors``, one that is there under two names once."""
    if isinstance(value, Tensor):
        same = f"{value.data_ptr()} {value.dtype} {list(value.shape)} {value.stride()}"
        tensors.setdefault(same, own(value))
        return {TENSOR: same}
    if isinstance(value, Mapping):
        return {PAIRS: [[key, _packed(one, tensors)] for key, one in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_packed(one, tensors) for one in value]
    return value


def _unpacked(value: Any, tensor: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(one, tensor) for one in value]
    if isinstance(value, dict):
        if TENSOR in value:
            return tensor(value[TENSOR])
        return {key: _unpacked(one, tensor) for key, one in value[PAIRS]}
    return value
