"""Each metric as a weighted mean over users, so that one can see what a single user adds to it.

U users. With share s_u and value v_u of user u, a metric is Σ s_u v_u / Σ s_u:

gAUC     v: AUC within the user's rows, s: the user's share of the rows of users with both classes
AUC      v: the user's mean placement, s: the share of the clicked rows plus the share of the others
logloss  v: mean loss of the user's rows, s: the user's share of the rows

The placement of a clicked row is the share of the other rows with a lower score, that of another row the share of
the clicked rows with a higher one, ties one half (DeLong, DeLong and Clarke-Pearson, Biometrics 1988). In all three, to
draw user u once more changes the metric by s_u (v_u - metric), to first order; in AUC too, where each pair of rows
counts for the users of both and the shares add up to 2.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ctr_pe.evaluation.metrics import METRICS, Bools, Floats, Ints, group_auc, row_loss


class Users(NamedTuple):
    """Rows and clicked rows of each user, (U,) both: they are the same for every run that is tested on these users."""

    rows: Ints
    positives: Ints

    @classmethod
    def of(cls, clicked: Bools, codes: Ints, count: int) -> Users:
        """From whether each row was clicked, and its user as 0 … count-1."""
        positives = np.bincount(codes[clicked], minlength=count)
        return cls(np.bincount(codes, minlength=count), positives)

    @property
    def shares(self) -> dict[str, Floats]:
        """Metric -> (U,) share of each user; NaN where the metric is not defined."""
        negatives = self.rows - self.positives
        mixed = self.rows * ((self.positives > 0) & (negatives > 0))
        with np.errstate(invalid="ignore"):
            found = (
                mixed / mixed.sum(),
                self.positives / self.positives.sum() + negatives / negatives.sum(),
                self.rows / self.rows.sum(),
            )
        return dict(zip(METRICS, found, strict=True))


def user_values(clicked: Bools, scores: Floats, codes: Ints, count: int) -> dict[str, Floats]:
    """Metric -> (U,) value of each user in one run; 0 where the user has no share in it."""
    users = Users.of(clicked, codes, count)
    share = users.shares["AUC"]
    placement = np.empty(len(scores))  # over the number of rows of its class
    placement[clicked] = _lower(scores[clicked], scores[~clicked]) / max(1, clicked.sum())
    placement[~clicked] = _lower(-scores[~clicked], -scores[clicked]) / max(1, (~clicked).sum())
    auc = np.zeros(count)
    np.divide(np.bincount(codes, weights=placement, minlength=count), share, out=auc, where=share > 0)
    loss = np.bincount(codes, weights=row_loss(clicked, scores), minlength=count) / np.maximum(1, users.rows)
    return {"gAUC": np.nan_to_num(group_auc(clicked, scores, codes, count)), "AUC": auc, "logloss": loss}


def _lower(scores: Floats, others: Floats) -> Floats:
    """The share of ``others`` that are lower than each score, ties one half."""
    ordered = np.sort(others)
    ends = np.searchsorted(ordered, scores, "left") + np.searchsorted(ordered, scores, "right")
    return np.asarray(ends / 2 / max(1, len(others)))
