"""Attention units. They take any position encoding and know none by name."""

from ctr_pe.units.activations import Dice
from ctr_pe.units.gru import GRU, AttentionGRU
from ctr_pe.units.scores import BilinearScore, DINScore, DotScore
from ctr_pe.units.self_attention import SelfAttention
from ctr_pe.units.target_attention import TargetAttention
from ctr_pe.units.transformer import Transformer, TransformerBlock

__all__ = [
    "GRU",
    "AttentionGRU",
    "BilinearScore",
    "DINScore",
    "Dice",
    "DotScore",
    "SelfAttention",
    "TargetAttention",
    "Transformer",
    "TransformerBlock",
]
