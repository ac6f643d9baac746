"""Padded models: histories in MAX_LEN slots, all of them computed, padding masked.

The baseline for models that FuxiCTR lacks, and for all where no checkout of it is given: what one writes with its
layers and torch's, and no less efficient than its own models. Parameters have the names and shapes of ours, so that
``load_state_dict`` takes ours over and both give the same scores (tests/benchmark/test_speed.py).

B batch, L slots, S = L + 1 slots with the target, D item dim, H heads, d = D / H, P position dim. Histories are padded
at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from fuxictr.pytorch import layers
from fuxictr.pytorch.models import BaseModel
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, pad, scaled_dot_product_attention

from benchmark.speed.data import HISTORY, MAX_LEN, TARGET
from ctr_pe.utils.module_list import ModuleList


class PaddedModel(BaseModel):  # type: ignore[misc]
    """Embedding, ``interest`` and tower; a subclass makes its layers in ``build``, which returns the interest's width.

    Keys are those of a model's config.
    """

    def __init__(self, feature_map: Any, learning_rate: float, embedding_dim: int = 64, **params: Any) -> None:
        regularizers = {key: params.pop(key) or None for key in ("embedding_regularizer", "net_regularizer")}
        super().__init__(feature_map, **regularizers, **params)
        self.embedding_layer = layers.FeatureEmbeddingDict(feature_map, embedding_dim)
        dim = embedding_dim * len(TARGET)
        self.dnn = layers.MLP_Block(
            input_dim=dim + self.build(dim, **params),
            output_dim=1,
            hidden_units=params["dnn_hidden_units"],
            hidden_activations=params["dnn_activations"],
            output_activation=self.output_activation,
            dropout_rates=params["net_dropout"],
            batch_norm=params["batch_norm"],
            bn_only_once=params.get("bn_only_once", False),
        )
        self.compile(params["optimizer"], params["loss"], learning_rate)
        self.reset_parameters()
        self.model_to_device()

    def build(self, dim: int, **params: Any) -> int:
        raise NotImplementedError

    def interest(self, target: Tensor, history: Tensor, mask: Tensor, distance: Tensor) -> Tensor:
        """target (B, D), history (B, L, D), mask (B, L), distance from the target (B, L) -> (B, any width)."""
        raise NotImplementedError

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        ids = self.get_inputs(inputs)
        embedded = self.embedding_layer(ids)
        target = torch.cat([embedded[field] for field in TARGET], -1)
        history = torch.cat([embedded[field] for field in HISTORY], -1)
        mask = ids[HISTORY[0]] != 0
        distance = (mask.sum(1, keepdim=True) - mask.cumsum(1) + 1) * mask
        interest = self.interest(target, history, mask, distance)
        return {"y_pred": self.dnn(torch.cat([target, interest], -1))}


class Positions(nn.Module):
    """A table of positions, sized as the encodings of this package are; a W for what is made of item and position."""

    def __init__(self, rows: int, width: int, project: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(rows, width) * 0.02)
        if project is not None:
            self.project = nn.Linear(*project)

    def forward(self, index: Tensor) -> Tensor:
        return embedding(index.clamp(max=len(self.table) - 1), self.table)


def masked_softmax(logits: Tensor, allowed: Tensor) -> Tensor:
    return logits.masked_fill(~allowed, torch.finfo(logits.dtype).min).softmax(-1)


class DINScore(nn.Module):
    def __init__(self, dim: int, units: Sequence[int], activation: str, dropout: float) -> None:
        super().__init__()
        self.mlp = layers.MLP_Block(4 * dim, list(units), activation, output_dim=1, dropout_rates=dropout).mlp

    def forward(self, target: Tensor, items: Tensor) -> Tensor:
        """target (B, L, D), items (B, L, D) -> logits (B, L)."""
        pairs = torch.cat([target, items, target - items, target * items], -1)
        logits: Tensor = self.mlp(pairs.flatten(0, 1))
        return logits.view(items.shape[:2])


class TargetAttention(nn.Module):
    """``pe``: positions of the query, as in DMIN."""

    def __init__(self, score: DINScore, pe: Positions | None = None) -> None:
        super().__init__()
        self.score, self.pe = score, pe

    def forward(self, target: Tensor, items: Tensor, mask: Tensor, distance: Tensor) -> tuple[Tensor, Tensor]:
        """-> interest (B, D), weights (B, L)."""
        query = target.unsqueeze(1).expand_as(items)
        if self.pe is not None:
            query = self.pe.project(torch.cat([query, self.pe((distance - 1).clamp(min=0))], -1))
        weights = masked_softmax(self.score(query, items), mask)
        return (weights.unsqueeze(-1) * items).sum(1), weights


class DIN(PaddedModel):
    def build(self, dim: int, **params: Any) -> int:
        units, activation = params["attention_hidden_units"], params["attention_hidden_activations"]
        score = DINScore(dim, units, activation, params["attention_dropout"])
        self.attentions = ModuleList([TargetAttention(score)])
        return dim

    def interest(self, target: Tensor, history: Tensor, mask: Tensor, distance: Tensor) -> Tensor:
        interest: Tensor = self.attentions[0](target, history, mask, distance)[0]
        return interest


class PoolsWithPositions(nn.Module):
    """TIN's attention, whose parameters are those of its positions."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.pe = Positions(rows, dim)


class TIN(PaddedModel):
    def build(self, dim: int, **params: Any) -> int:
        self.attentions = ModuleList([PoolsWithPositions(MAX_LEN + 1, dim)])
        return dim

    def interest(self, target: Tensor, history: Tensor, mask: Tensor, distance: Tensor) -> Tensor:
        pe = self.attentions[0].pe
        items: Tensor = history + pe(distance)
        query = target + pe.table[0]
        weights = masked_softmax((items @ query.unsqueeze(-1)).squeeze(-1) * target.shape[-1] ** -0.5, mask)
        return (weights.unsqueeze(-1) * items).sum(1) * query


class AUGRU(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight_ih, self.weight_hh = (nn.Parameter(torch.randn(3 * dim, dim) * dim**-0.5) for _ in range(2))
        self.bias_ih, self.bias_hh = (nn.Parameter(torch.zeros(3 * dim)) for _ in range(2))

    def forward(self, items: Tensor, weights: Tensor) -> Tensor:
        """items (B, L, D), weights (B, L), 0 at padding -> the last state (B, D)."""
        state = torch.zeros_like(items[:, 0])
        for item, weight in zip(items.unbind(1), weights.unbind(1), strict=True):
            of_item = linear(item, self.weight_ih, self.bias_ih).chunk(3, -1)
            of_state = linear(state, self.weight_hh, self.bias_hh).chunk(3, -1)
            update = weight.unsqueeze(-1) * torch.sigmoid(of_item[0] + of_state[0])
            reset = torch.sigmoid(of_item[1] + of_state[1])
            state = (1 - update) * state + update * torch.tanh(of_item[2] + reset * of_state[2])
        return state


class DIEN(PaddedModel):
    def build(self, dim: int, **params: Any) -> int:
        units, activation = params["attention_hidden_units"], params["attention_activation"]
        score = DINScore(dim, units, activation, params["attention_dropout"])
        self.extractors = ModuleList([nn.GRU(dim, dim, batch_first=True)])
        self.attentions = ModuleList([TargetAttention(score)])
        self.evolutions = ModuleList([AUGRU(dim)])
        return dim

    def interest(self, target: Tensor, history: Tensor, mask: Tensor, distance: Tensor) -> Tensor:
        states, _ = self.extractors[0](history)
        _, weights = self.attentions[0](target, states, mask, distance)
        interest: Tensor = self.evolutions[0](states, weights)
        return interest


class SelfAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int, dropout: float, pe: Positions | None = None) -> None:
        super().__init__()
        self.num_heads = num_heads
        if pe is not None:
            self.pe = pe
        self.query, self.key, self.value, self.output = (nn.Linear(dim, dim) for _ in range(4))
        self.dropout = dropout

    def forward(self, items: Tensor, allowed: Tensor) -> Tensor:
        """items (B, S, D), allowed (B, 1, S, S) -> (B, S, D)."""
        heads: Tensor = self.output(self.heads(items, allowed).transpose(1, 2).flatten(2))
        return heads

    def heads(self, items: Tensor, allowed: Tensor) -> Tensor:
        """-> (B, H, S, d)."""
        query, key, value = (self._split(project(items)) for project in (self.query, self.key, self.value))
        return scaled_dot_product_attention(query, key, value, allowed, self.dropout if self.training else 0.0)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_heads, -1).transpose(1, 2)


class Block(nn.Module):
    """``norm``: before attention and network, after them, or not at all."""

    def __init__(self, attention: SelfAttention, dim: int, activation: nn.Module, dropout: float, norm: str) -> None:
        super().__init__()
        self.attention, self.norm = attention, norm
        self.ffn = nn.Sequential(nn.Linear(dim, dim), activation, nn.Linear(dim, dim))
        self.dropout = nn.Dropout(dropout)
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(dim) if norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        if self.norm == "pre":
            x = x + self.dropout(self.attention(self.layer_norm1(x), allowed))
            whole: Tensor = x + self.dropout(self.ffn(self.layer_norm2(x)))
            return whole
        x = self.layer_norm1(x + self.dropout(self.attention(x, allowed)))
        summed: Tensor = self.layer_norm2(x + self.dropout(self.ffn(x)))
        return summed


class Transformer(nn.Module):
    def __init__(self, blocks: Sequence[Block], last_norm: nn.Module) -> None:
        super().__init__()
        self.blocks, self.layer_norm = ModuleList(blocks), last_norm

    @property
    def pe(self) -> Positions:
        return self.blocks[0].attention.pe

    def forward(self, items: Tensor, allowed: Tensor) -> Tensor:
        for block in self.blocks:
            items = block(items, allowed)
        normed: Tensor = self.layer_norm(items)
        return normed


class BST(PaddedModel):
    """With a position beside each item, without causal mask, and the target's state, as the published configuration."""

    def build(self, dim: int, embedding_dim: int = 64, **params: Any) -> int:
        if params["seq_pooling_type"] != "target" or params["use_causal_mask"] or not params["use_residual"]:
            raise ValueError("the padded BST pools the target's state, has residuals and no causal mask")
        position_dim, width = dim // len(TARGET), dim + dim // len(TARGET)

        def attention(pe: Positions | None) -> SelfAttention:
            return SelfAttention(width, params["num_heads"], params["attention_dropout"], pe)

        norm, dropout = "post" if params["layer_norm"] else "", params["net_dropout"]
        first = Positions(MAX_LEN + 1, position_dim)
        blocks = [
            Block(attention(None if layer else first), width, nn.LeakyReLU(), dropout, norm)
            for layer in range(params["stacked_transformer_layers"])
        ]
        self.transformers = ModuleList([Transformer(blocks, nn.Identity())])
        return width

    def interest(self, target: Tensor, history: Tensor, mask: Tensor, distance: Tensor) -> Tensor:
        transformer = self.transformers[0]
        items = torch.cat([history, target.unsqueeze(1)], 1)
        items = torch.cat([items, transformer.pe(pad(distance, (0, 1)))], -1)
        states: Tensor = transformer(items, pad(mask, (0, 1), value=True)[:, None, None, :])
        return states[:, -1]


class SASRec(PaddedModel):
    """With a position added to each item, and the state at the target."""

    def build(self, dim: int, **params: Any) -> int:
        if params["ffn_dim"] is not None or params["ffn_activation"] != "ReLU" or params["layer_norm"] != "pre":
            raise ValueError("the padded SASRec norms first and has feed-forward networks of the item dim with ReLU")

        def attention(pe: Positions | None) -> SelfAttention:
            return SelfAttention(dim, params["num_heads"], params["attention_dropout"], pe)

        first = Positions(MAX_LEN + 2, dim)
        blocks = [
            Block(attention(None if layer else first), dim, nn.ReLU(), params["hidden_dropout"], "pre")
            for layer in range(params["num_blocks"])
        ]
        self.transformers = ModuleList([Transformer(blocks, nn.LayerNorm(dim))])
        self.dropout = nn.Dropout(params["hidden_dropout"])
        return dim

    def interest(self, target: Tensor, history: Tensor, mask: Tensor, distance: Tensor) -> Tensor:
        transformer = self.transformers[0]
        items = torch.cat([history, target.unsqueeze(1)], 1) + transformer.pe(pad(distance, (0, 1)))
        real = pad(mask, (0, 1), value=True)
        states: Tensor = transformer(self.dropout(items), causal(real))
        return states[:, -1]


def causal(mask: Tensor) -> Tensor:
    """(B, S) -> (B, 1, S, S): each slot sees itself and what is real before it."""
    slots = mask.shape[1]
    return mask[:, None, None, :] & torch.ones(slots, slots, dtype=torch.bool, device=mask.device).tril()


class AfterAttention(nn.Module):
    def __init__(self, dim: int, dropout: float, layer_norm: bool) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(dim) if layer_norm else nn.Identity()
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, attended: Tensor, items: Tensor) -> Tensor:
        x = self.norm(items + self.dropout(attended))
        summed: Tensor = x + self.ffn(x)
        return summed


class Interests(nn.Module):
    def __init__(self, dim: int, heads: int, **params: Any) -> None:
        super().__init__()
        self.refiner, self.extractor = (SelfAttention(dim, heads, params["attention_dropout"]) for _ in range(2))

        def after() -> AfterAttention:
            return AfterAttention(dim, params["net_dropout"], params["layer_norm"])

        def unit() -> TargetAttention:
            units, activation = params["attention_hidden_units"], params["attention_activation"]
            score = DINScore(dim, units, activation, params["attention_dropout"])
            width = params["pos_emb_dim"]
            return TargetAttention(score, Positions(MAX_LEN, width, (dim + width, dim)))

        self.after_refiner = after()
        self.after_heads = ModuleList(after() for _ in range(heads))
        self.units = ModuleList(unit() for _ in range(heads))

    def forward(self, target: Tensor, history: Tensor, mask: Tensor, distance: Tensor) -> Tensor:
        allowed = causal(mask)
        items = self.after_refiner(self.refiner(history, allowed), history)
        heads, output, interests = self.extractor.heads(items, allowed), self.extractor.output, []
        for index, columns in enumerate(output.weight.chunk(len(self.units), 1)):
            states = self.after_heads[index](linear(heads[:, index], columns, output.bias), items)
            interests.append(self.units[index](target, states, mask, distance)[0])
        return torch.cat(interests, -1)


class DMIN(PaddedModel):
    def build(self, dim: int, **params: Any) -> int:
        heads = params.pop("num_heads")
        self.interests = ModuleList([Interests(dim, heads, **params)])
        return dim * int(heads)

    def interest(self, target: Tensor, history: Tensor, mask: Tensor, distance: Tensor) -> Tensor:
        interests: Tensor = self.interests[0](target, history, mask, distance)
        return interests
