"""Position encodings: one small file each, listed here. Adding one means one new file and one line."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from ctr_pe.utils import plugins
from ctr_pe.utils.errors import UserError, nearest, quoted

if TYPE_CHECKING:
    from ctr_pe.pe.base import PositionEncoding

REGISTRY = {
    "none": "ctr_pe.pe.base:PositionEncoding",
    "naive": "ctr_pe.pe.naive:Naive",
    "sinusoidal": "ctr_pe.pe.sinusoidal:Sinusoidal",
    "rope": "ctr_pe.pe.rope:RoPE",
    "cope": "ctr_pe.pe.cope:CoPE",
    "cape": "ctr_pe.pe.cape:CAPE",
    "cape_additive": "ctr_pe.pe.cape_additive:AdditiveCAPE",
    "cape_cosine": "ctr_pe.pe.cape_cosine:CosineCAPE",
    "cape_constant": "ctr_pe.pe.cape_constant:ConstantCAPE",
    "cape_oracle": "ctr_pe.pe.cape_oracle:OracleCAPE",
    "likeness": "ctr_pe.pe.likeness:Likeness",
    "t5": "ctr_pe.pe.t5:T5",
    "alibi": "ctr_pe.pe.alibi:ALiBi",
    "kerple_log": "ctr_pe.pe.kerple:KerpleLog",
    "kerple_power": "ctr_pe.pe.kerple:KerplePower",
    "fire": "ctr_pe.pe.fire:FIRE",
    "dape": "ctr_pe.pe.dape:DAPE",
    "fox": "ctr_pe.pe.fox:FoX",
    "xlnet": "ctr_pe.pe.xlnet:XLNet",
    "kernel": "ctr_pe.pe.kernel:Kernel",
    "euler": "ctr_pe.pe.euler:Euler",
    "dif": "ctr_pe.pe.dif:DIF",
    "pdm": "ctr_pe.pe.pdm:PDM",
    "time_bias": "ctr_pe.pe.time_bias:TimeBias",
    "time_rope": "ctr_pe.pe.time_rope:TimeRoPE",
    "cape_time": "ctr_pe.pe.cape_time:TimeCAPE",
}

MOST_LINKS = 16
"""Of a chain."""

log = logging.getLogger(__name__)
_broken: set[str] = set()  # encodings of other packages that a warning has named

FROM_DATA = ("field_dims", "field_sizes")
"""Options that a model fills in from its data: they are no keys of a config."""


def available_pes() -> list[str]:
    """Names that ``build_pe`` takes: the built-in ones, then those of installed packages."""
    return plugins.names("encoding", REGISTRY)


def build_pe(name: str, dim: int, max_len: int, num_heads: int = 1, **options: Any) -> PositionEncoding:
    """Build an encoding, or with ``a+b`` a chain of several, the first applied first.

    Args:
        name: one of :func:`available_pes`, a dotted name (:mod:`ctr_pe.utils.plugins`), or several joined by ``+``.
        dim: item dim D; the attention it joins has the same.
        max_len: items of the longest history; a sequence that ends with the target has one more.
        num_heads: heads of the attention it joins.
        options: keyword arguments of the encoding's class. Those of other encodings are left aside, so that one
            config can run them all; those of none are an error. ``field_dims`` says which fields an item embedding
            has, side by side, the item's id first; ``field_sizes`` how many ids each has, 0 for vectors.

    Raises:
        UserError: an unknown name or option, or a value that the encoding refuses.
    """
    from ctr_pe.pe.base import Chain

    names = check_pe_name(name).split("+")
    known = pe_options()
    for option in options.keys() - FROM_DATA:
        if option not in known:
            raise UserError(f"position encoding option '{option}' is unknown: {nearest(option, known)}")
    links = []
    for link in names:
        cls = encoding_class(link)
        own = {option: value for option, value in options.items() if option in options_of(cls)}
        try:
            links.append(cls(dim, max_len, num_heads, **own))
        except ValueError as error:
            raise UserError(f"position encoding '{link}': {error}") from None
    return links[0] if len(links) == 1 else Chain(links)


def check_pe_name(name: str) -> str:
    """The name, if :func:`build_pe` takes it.

    Raises:
        UserError: it names no encoding or chain of encodings, or code that may not be imported
            (:mod:`ctr_pe.utils.plugins`).
    """
    links = str(name).split("+")
    if len(links) > MOST_LINKS:
        raise UserError(f"position encoding {quoted(name)}: a chain of {len(links)}, {MOST_LINKS} are the most")
    for link in links:
        plugins.place("encoding", link, REGISTRY)
    return name


def check_encodings(names: Any) -> None:
    """Check a model's ``position_encoding``: one name or one per field group; ``native`` is the model's own.

    Raises:
        UserError: as :func:`check_pe_name`.
    """
    for name in [names] if isinstance(names, str) else names:
        check_pe_name("+".join("none" if link == "native" else link for link in str(name).split("+")))


def pe_options() -> list[str]:
    """Options of all encodings, which are ordinary keys of a model config."""
    return sorted({option for cls in known_encodings() for option in options_of(cls)} - set(FROM_DATA))


def known_encodings() -> Iterable[type[PositionEncoding]]:
    """Classes of all names, and of the dotted names in use. One that cannot be imported is left out, with a warning:
    it hurts only who uses it."""
    for name in [*available_pes(), *plugins.used("encoding")]:
        try:
            yield encoding_class(name)
        except UserError as error:
            if name not in _broken:
                log.warning("%s", error)
            _broken.add(name)


def encoding_class(name: str) -> type[PositionEncoding]:
    """The class of an encoding. Raises UserError if there is none of this name, or its module cannot be imported."""
    from ctr_pe.pe.base import PositionEncoding

    return plugins.load("encoding", name, REGISTRY, PositionEncoding)


def options_of(cls: Any) -> tuple[str, ...]:
    """Names of the keyword arguments of an encoding, with those that it hands on to the next class by ``**``."""
    return _options_of(cls)


@cache
def _options_of(cls: Any) -> tuple[str, ...]:
    found: tuple[str, ...] = ()
    for base in cls.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(base.__init__).parameters.values()
            found = (*(p.name for p in parameters if p.kind is p.KEYWORD_ONLY), *found)
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return found
