"""A model's weights in one file: safetensors, which holds numbers and no code. FuxiCTR's own files are read too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ctr_pe.utils.errors import UserError, no_such_file, one_line
from ctr_pe.utils.files import replacing

SUFFIX = ".safetensors"
LONGEST = 120  # characters of another library's message in an error line


def save(model: nn.Module, file: Path) -> None:
    """Write a model's weights: all or nothing, also when two processes write the same file, or raise UserError."""
    names = _names(model)
    write_tensors({name: own(x) for name, x in model.state_dict().items() if names[name] == name}, file)


def write_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """As :func:`save`, of weights by name that :func:`read_tensors` gave."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with replacing(file) as part:
            part.touch()
            mode = part.stat().st_mode
            save_file(dict(tensors), part)
            part.chmod(mode)  # safetensors lets nobody else read it
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: {getattr(error, 'strerror', None) or error}") from None


def read_tensors(file: Path) -> dict[str, Tensor]:
    """What :func:`save` wrote, by name; weights that have two names have one of them."""
    from safetensors.torch import load_file

    return load_file(file)


def load(model: nn.Module, file: Path) -> None:
    """Give a model the weights that :func:`save` wrote, or FuxiCTR's ``save_weights``, which ``torch.load`` reads
    without running code.

    Floating-point weights may have another precision than the model's.

    Raises UserError for a file that is missing or damaged, or holds the weights of another model.
    """
    try:
        with open(file, "rb") as stream:
            is_safetensors = stream.read(9)[8:] == b"{"  # a JSON object, after its length in eight bytes
        if is_safetensors:
            found, names = read_tensors(file), _names(model)
            by_first = {names.get(name, name): x for name, x in found.items()}
            found |= {name: by_first[first] for name, first in names.items() if first in by_first}
        else:
            found = torch.load(file, map_location="cpu", weights_only=True)
        _check_kinds(model, found)
        model.load_state_dict(found)
    except FileNotFoundError:
        raise no_such_file(file) from None
    except Exception as error:  # safetensors and torch raise many kinds for a damaged file
        reason = one_line(str(error))
        reason = reason if len(reason) <= LONGEST else f"{reason[:LONGEST]} …"
        raise UserError(f"{file}: not the weights of this model ({type(error).__name__}: {reason})") from None


def own(x: Tensor) -> Tensor:
    """On the CPU, in a storage with nothing else in it, as safetensors wants it."""
    here = x.detach().cpu()
    if here.untyped_storage().nbytes() != here.nbytes or not here.is_contiguous():
        here = here.clone(memory_format=torch.contiguous_format)
    return here


def _names(model: nn.Module) -> dict[str, str]:
    """Each name of a weight -> the first name of the same one."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(x), name) for name, x in model.state_dict(keep_vars=True).items()}


def _check_kinds(model: nn.Module, found: Mapping[str, Tensor]) -> None:
    """torch would cast integers and complex numbers to the model's floats."""
    for name, x in model.state_dict().items():
        there = found.get(name, x)
        if there.dtype != x.dtype and not (there.is_floating_point() and x.is_floating_point()):
            raise ValueError(f"{name} is {there.dtype}, not {x.dtype}".replace("torch.", ""))
