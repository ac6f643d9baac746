"""What the estimators of both tasks share: the trained model with its encoder, its folder, and parameters as text."""

from __future__ import annotations

import html
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ctr_pe.serving.model_folder import write_model
from ctr_pe.serving.scorer import Scorer
from ctr_pe.study.rendering import Table, as_html, number
from ctr_pe.utils.files import scratch_folder

if TYPE_CHECKING:
    from ctr_pe.serving.service_options import ServiceOptions


class ModelEstimator:
    """A subclass defines ``get_params``, and gives :meth:`_fitted` what it has trained or loaded."""

    scorer_: Scorer
    metrics_: dict[str, float]
    history_: list[dict[str, Any]]

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} does not define get_params()")

    def save(self, folder: str | Path, histories: bool = True) -> None:
        """Write the model folder, all or nothing; an earlier model folder of this name is replaced.

        Args:
            histories: also the newest ``max_len`` events of every user; without them each call has to bring its own.
        """
        write_model(folder, self._scorer, histories)

    def export(self, file: str | Path, kind: str = "onnx") -> None:
        """Write the model as one file for other runtimes: ``onnx``, ``torch`` or ``aoti``, see ``docs/pipeline.md``.

        Raises UserError as :func:`ctr_pe.serving.export.export_scorer`.
        """
        from ctr_pe.serving.export import export_scorer

        export_scorer(self._scorer, kind, file)

    def serve(self, port: int, host: str = "127.0.0.1", options: ServiceOptions | None = None) -> None:
        """Answer requests over HTTP until SIGTERM or Ctrl-C, see ``docs/pipeline.md``: of a click model ``POST /rank``,
        of a next-item model ``POST /recommend``.

        A model that replaces the served one is loaded by ``ctr-pe serve`` alone, which watches a folder.

        Raises:
            UserError: packages that are not installed, an address that cannot be used.
        """
        from ctr_pe.serving import service
        from ctr_pe.serving.service_options import ServiceOptions

        with scratch_folder() as scratch:
            self.save(scratch / "model")
            service.serve(scratch / "model", port, host, options or ServiceOptions())

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

    def _repr_html_(self) -> str:
        """For a notebook: the parameters that were given, and the metrics of the test rows."""
        if not hasattr(self, "scorer_"):
            return f"<code>{html.escape(repr(self))}</code>: not fitted"
        metrics: dict[str, str | None] = {name: number(value) for name, value in self.metrics_.items()}
        row = {**metrics, "epochs": str(len(self.history_))}
        return as_html([Table(repr(self), [], [row], ["Metrics of the test rows, which are not trained on."])])
