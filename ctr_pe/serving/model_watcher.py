"""The served model folder: what replaces it is loaded and tried beside the old model, which answers until the new one
does, and goes on if the new one cannot be used."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ctr_pe.serving.model_folder import MANIFEST, read_model
from ctr_pe.serving.scorer import Scorer
from ctr_pe.utils.errors import UserError

log = logging.getLogger("ctr_pe.service")
TRIES = 5  # to read a folder that is replaced again and again


class WatchedModel:
    """A model folder, loaded and tried: ``scorer``; ``name``, which changes with the content of the folder; ``facts``
    for readers."""

    def __init__(self, folder: Path, gpu: int = -1) -> None:
        """Raises UserError for a folder that cannot be read, or a model that cannot answer for one user."""
        self.scorer: Scorer = read_model(folder, gpu, task=None)
        config = self.scorer.config
        self.name = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=6).hexdigest()
        facts = {key: config.get(key) for key in ("model", "position_encoding", "dataset_id", "created")}
        self.facts = {"name": self.name, "loaded": time.time(), **facts}
        # The first request pays for what is made at first use; and what fails here would fail for every request.
        catalogue = self.scorer.encoder.catalogue
        some: list[Any] = ["0"] if catalogue is None else catalogue.sorted.head(2).to_list()
        try:
            kinds = self.scorer.encoder.behaviours
            given = {kinds.column: [kinds.values[0]] * len(some)} if kinds else {}
            past: dict[str, Any] = {"times": list(range(len(some))), "history_context": given}
            if self.scorer.task == "click":
                scores = self.scorer.score_one(some, some, **past)
            else:
                scores = self.scorer.recommend(self.scorer.encoder.one(some, None, **past), 1, False).scores
        except UserError as error:
            raise UserError(f"{folder}: cannot be served: {error}") from None
        if not np.isfinite(scores).all():
            raise UserError(f"{folder}: cannot be served: its scores are not numbers")


class ModelWatcher:
    """The model of a folder, replaced when the folder is.

    Attributes:
        model: the one that answers now.
        refused: why the present content of the folder is not loaded, or None.
        wake: set it to load the folder now.
    """

    def __init__(
        self, folder: Path, poll: float = 2.0, on_reload: Callable[[str], object] = str, gpu: int = -1
    ) -> None:
        """Raises UserError as ``WatchedModel``.

        ``poll``: seconds between looks at the folder; ``on_reload``: called after each, ``loaded`` or ``refused``."""
        self.folder, self.poll, self.on_reload, self.gpu = folder, poll, on_reload, gpu
        self.wake, self._over = threading.Event(), False
        self.refused: str | None = None
        self._seen = self._content()
        self.model = self._load()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at the folder from a thread."""
        self._over = False
        thread = threading.Thread(target=self._watch, name="model folder", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over = True
            self.wake.set()
            thread.join()

    def reload(self) -> None:
        """Load the folder; its model answers from now on, or is refused."""
        try:
            model = self._load()
        except Exception as error:  # whatever is wrong with it, the old model goes on
            self.refused = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            log.error("%s; the model %s goes on", self.refused, self.model.name)
        else:
            self.model, self.refused = model, None
            log.info("%s: now the model %s", self.folder, model.name)
        self.on_reload("refused" if self.refused else "loaded")

    def _load(self) -> WatchedModel:
        """The folder's model; once more if it was replaced meanwhile, because old and new files may have met."""
        for _ in range(TRIES):
            before, error = self._content(), None
            try:
                model = WatchedModel(self.folder, self.gpu)
            except UserError as found:
                error = found
            if self._content() == before:
                break
        if error is not None:
            raise error
        return model

    def _watch(self) -> None:
        before = self._seen
        while not self._over:
            woken = self.wake.wait(self.poll)
            self.wake.clear()
            if self._over:
                return
            now = self._content()
            # a folder that is still being copied changes from one look to the next
            if woken or (now and now != self._seen and now == before):
                self._seen = now
                self.reload()
            before = now

    def _content(self) -> list[tuple[str, int, int, int]]:
        """Names and facts of the files, which change with them; none without a manifest."""
        try:
            files = sorted(self.folder.iterdir())
            facts = [(file.name, file.stat()) for file in files]
        except OSError:  # just now being replaced
            return []
        found = [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in facts]
        return found if any(name == MANIFEST for name, *_ in found) else []
