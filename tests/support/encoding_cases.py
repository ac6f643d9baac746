"""Encodings with their options, as tests of every encoding take them."""

from __future__ import annotations

from torch import Tensor

from ctr_pe.pe import available_pes, build_pe
from ctr_pe.sequence.positions import Items
from ctr_pe.testing import Factory

NAMES = [*available_pes(), "rope+cape", "naive+cope"]
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "naive by rank": ("naive", {"position_index": "rank"}),
    "naive on items only": ("naive", {"on_target": False}),
    "sinusoidal by rank": ("sinusoidal", {"position_index": "rank"}),
    "rope interleaved": ("rope", {"rope_layout": "interleaved", "rope_base": 50.0}),
    "cope scaled": ("cope", {"scale_bias": True}),
    "cope between": ("cope", {"position_span": "between"}),
    "cape between": ("cape", {"position_span": "between"}),
    "cape_constant between": ("cape_constant", {"position_span": "between"}),
    "cape_cosine between": ("cape_cosine", {"position_span": "between", "likeness_dim": 3}),
    "cape_cosine of fields": ("cape_cosine", {"field_dims": (5, 3), "likeness_of": "fields"}),
    "cape_constant+cape_cosine": ("cape_constant+cape_cosine", {}),
    "likeness of fields": ("likeness", {"field_dims": (5, 3), "likeness_dim": 3}),
    "cape_constant+likeness": ("cape_constant+likeness", {"likeness_of": "item"}),
    "time_rope summed": ("time_rope", {"rope_time": "sum", "rope_layout": "interleaved"}),
    "cape_time between": ("cape_time", {"position_span": "between"}),
    "time_bias+cape": ("time_bias+cape", {}),
    "dif attributes": ("dif", {"field_dims": (3, 3, 2), "dif_source_dim": 4}),
    "dif concat": ("dif", {"field_dims": (5, 3), "dif_fusion": "concat"}),
    "dif gate": ("dif", {"field_dims": (5, 3), "dif_fusion": "gate", "dif_positions": False}),
    "dif predictors": ("dif", {"field_dims": (5, 3), "field_sizes": (9, 4), "dif_predict": 5.0}),
    "rope+dif gate": ("rope+dif", {"field_dims": (5, 3), "dif_fusion": "gate"}),
    "euler scalar": ("euler", {"euler_adaptation": "scalar", "euler_layout": "interleaved"}),
    "euler full": ("euler", {"euler_planes": "full", "euler_frequencies": "learned", "position_index": "rank"}),
    "euler not adapted": ("euler", {"euler_adaptation": "none", "euler_rotary_embedding": False}),
    "euler contrast": ("euler", {"euler_contrast": 0.5}),
    "kernel full toeplitz": ("kernel", {"kernel_u": "full", "kernel_l": "toeplitz"}),
    "kernel from the start": ("kernel", {"kernel_u": "full", "kernel_anchor": "start"}),
    "kernel per head": ("kernel", {"kernel_band": 3, "kernel_per_head": True}),
    "kernel without u": ("kernel", {"kernel_u": "none", "kernel_anchor": "start"}),
    "cape+kernel": ("cape+kernel", {}),
    "pdm reorder": ("pdm", {"pdm_contrast": 0.1, "pdm_ratio": 0.5}),
    "pdm mask": ("pdm", {"pdm_contrast": 0.1, "pdm_augment": "mask", "pdm_ratio": 0.5, "pdm_contrast_on": "last"}),
    "pdm crop": ("pdm", {"pdm_contrast": 0.1, "pdm_augment": "crop", "pdm_ratio": 0.5, "pdm_contrast_on": "norm"}),
    "rope+pdm+kernel": ("rope+pdm+kernel", {}),
}
CASES: dict[str, tuple[str, dict[str, object]]] = {name: (name, {}) for name in NAMES} | VARIANTS


def factory(case: str) -> Factory:
    name, options = CASES[case]
    return lambda dim, max_len, heads: build_pe(name, dim, max_len, heads, **options)


def known(embedding: Tensor) -> Items:
    """Items (..., D) with an id that their embedding decides."""
    return Items(embedding, (1 + (embedding[..., 0] > 0).long(),))
