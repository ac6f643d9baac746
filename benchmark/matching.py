"""BST and SASRec whose attention starts as a likeness of items: a control for what keeps position from helping there.

On synthetic_context a click depends on what follows the item of the history that is the target's own. DIN's score is
given the products of target and item; queries and keys of self-attention are projected apart from one another, and have
to learn to match. Here they start as one projection, so that items attend to those like them from the first step, and
go on from there each by itself.

example:
  PYTHONPATH=benchmark ctr-pe benchmark --model matching:MatchingBST,matching:MatchingSASRec \\
      --pe none,cape_constant,cape,cape_cosine,cape_oracle --repeats 3 --set embedding_init=1.0 --set num_heads=1
"""

from __future__ import annotations

import torch

from ctr_pe.model_zoo.bst import BST
from ctr_pe.model_zoo.sasrec import SASRec
from ctr_pe.models.rank_model import RankModel
from ctr_pe.units import SelfAttention

GAIN = 3.0
"""Length of a projected item over that of the item: the logit of an item with itself is far above the others."""


class Matching(RankModel):
    """After every other weight is drawn; draws nothing itself, so that all else starts as without."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            for unit in self.modules():
                if isinstance(unit, SelfAttention):
                    unit.query.weight.copy_(GAIN * torch.linalg.qr(unit.query.weight)[0])
                    unit.key.load_state_dict(unit.query.state_dict())


class MatchingBST(Matching, BST):
    pass


class MatchingSASRec(Matching, SASRec):
    pass
