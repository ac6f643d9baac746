"""What the estimators of both tasks share: the trained model with its encoder, its folder, and parameters as text."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Self

from ctr_pe.serving.model_folder import write_model
from ctr_pe.serving.scorer import Scorer


class ModelEstimator:
    """A subclass defines ``get_params``, and gives :meth:`_fitted` what it has trained or loaded."""

    scorer_: Scorer

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} does not define get_params()")

    def save(self, folder: str | Path, histories: bool = True) -> None:
        """Write the model folder, all or nothing; an earlier model folder of this name is replaced.

        Args:
            histories: also the newest ``max_len`` events of every user; without them each call has to bring its own.
        """
        write_model(folder, self._scorer, histories)

    @property
    def _scorer(self) -> Scorer:
        if not hasattr(self, "scorer_"):
            from sklearn.exceptions import NotFittedError

            raise NotFittedError(
                f"this {type(self).__name__} is not fitted: call fit(events, items=items) or load(folder)"
            )
        return self.scorer_

    def _fitted(self, scorer: Scorer) -> Self:
        self.scorer_ = scorer
        self.metrics_, self.history_ = scorer.config["metrics"]["test"], scorer.config["history"]
        return self

    def __repr__(self) -> str:
        default = {name: one.default for name, one in inspect.signature(type(self)).parameters.items()}
        given = [f"{k}={v!r}" for k, v in self.get_params().items() if k not in default or repr(v) != repr(default[k])]
        return f"{type(self).__name__}({', '.join(given)})"
