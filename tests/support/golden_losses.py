"""What losses.json holds, measured anew: loss curves of small trainings from a log, and hashes of data sets' rows.

Only names that users call are used here, so that the values stay comparable when the package is rearranged: the
command ``ctr-pe``, ``open_dataset``, ``BatchLoader``, the models' constructors, ``train_step``, ``forward`` and
``evaluate``. A batch is handed on as it comes, whatever it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from ctr_pe import model_zoo
from ctr_pe.cli import main
from ctr_pe.data.dataset import Dataset, open_dataset
from ctr_pe.data.loader import BatchLoader
from ctr_pe.evaluation import evaluate

SPLITS = ("train", "valid", "test")
BUILT_IN = ("synthetic_context", "synthetic", "synthetic_time", "synthetic_shuffled")
MODELS: dict[str, dict[str, Any]] = {  # what each has on top of PARAMS
    "DIN": {"attention_hidden_units": [6, 4], "attention_hidden_activations": "Dice", "din_use_softmax": True},
    "DIEN": {"gru_type": "AUGRU", "attention_type": "din_attention", "attention_hidden_units": [6], "batch_norm": True},
    "BST": {"num_heads": 2, "stacked_transformer_layers": 2, "attention_dropout": 0.1, "seq_pooling_type": "target"},
    "DMIN": {"num_heads": 2, "attention_hidden_units": [6], "aux_hidden_units": [5], "aux_loss_lambda": 0.2},
    "TIN": {},
    "SASRec": {"num_heads": 2, "num_blocks": 2, "hidden_dropout": 0.1, "ffn_dim": 12},
}
ENCODINGS: dict[str, dict[str, Any]] = {"none": {}, "cape": {}, "euler": {}, "dif": {}}
AUXILIARY: dict[tuple[str, str], dict[str, Any]] = {  # cells with the encoding's own loss, which is off by default
    **{(model, "euler"): {"euler_contrast": 0.1} for model in ("DIN", "BST", "DMIN")},
    **{(model, "dif"): {"dif_predict": 0.1} for model in ("DIN", "BST", "DMIN")},
}
CELLS = list(itertools.product(MODELS, ENCODINGS))
PARAMS: dict[str, Any] = {
    "target_field": [["item_id", "cate_id"]],
    "sequence_field": [["item_history", "cate_history"]],
    "age_field": "age_history",
    "embedding_dim": 4,
    "embedding_init": 0.8,  # so large that positions count from the first step on
    "embedding_regularizer": 1e-3,
    "dnn_hidden_units": [8, 4],
    "dnn_activations": "ReLU",
    "net_dropout": 0.1,
    "learning_rate": 0.01,
    "position_dim": 4,
    "gpu": -1,
}
BATCH, EPOCHS, SEED, LONGEST = 64, 2, 3, 10


def log() -> tuple[pl.DataFrame, pl.DataFrame]:
    """A log of 22 users with one to 20 events each, and a table of its items.

    Every fourth user begins with two events of the same time, so that their rows see no history. Most events are of few
    items, some items come late or never.
    """
    draw = np.random.default_rng(41)
    users, items, times, labels = [], [], [], []
    for user in range(22):
        count = 1 + (7 * user) % 20
        chosen = draw.permutation(60)[np.sort(np.argsort(draw.random(60) * np.arange(1, 61))[:count])]
        time = 1_600_000_000 + np.cumsum(draw.integers(60, 400_000, count))
        if user % 4 == 0 and count > 1:
            time[1] = time[0]
        users += [f"user {user * 37 % 22}"] * count
        items += [f"item {item}" for item in chosen.tolist()]
        times += time.tolist()
        labels += (draw.random(count) < 0.5).astype(int).tolist()
    events = pl.DataFrame({"user_id": users, "item_id": items, "timestamp": times, "clicked": labels})
    table = pl.DataFrame({"item_id": [f"item {i}" for i in range(65)], "cate_id": [f"c{i * i % 7}" for i in range(65)]})
    return events[draw.permutation(events.height)], table


def command(*arguments: Any) -> str:
    """What ``ctr-pe`` with these arguments prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([str(argument) for argument in arguments]) == 0
    return printed.getvalue()


def build(folder: Path) -> Dataset:
    """The data set that the models are trained on: clicks of the log against sampled items."""
    events, items = log()
    events.drop("clicked").write_parquet(folder / "events.parquet")
    items.write_parquet(folder / "items.parquet")
    files = ("--interactions", folder / "events.parquet", "--items", folder / "items.parquet")
    command("data", "build", *files, "--protocol", "din", "--max-len", LONGEST, "--out", folder / "clicks")
    return open_dataset(str(folder / "clicks"))


def build_impressions(folder: Path) -> Dataset:
    """Another one of the same log: every event is a row, and there is a history of what was not clicked."""
    events, items = log()
    events.write_csv(folder / "shown.csv")
    items.write_csv(folder / "items.csv")
    files = ("--interactions", folder / "shown.csv", "--items", folder / "items.csv", "--label", "clicked")
    command(
        *("data", "build", *files, "--protocol", "impressions", "--negatives", "--max-len", LONGEST),
        *("--valid-fraction", 0.2, "--test-fraction", 0.2, "--out", folder / "shown"),
    )
    return open_dataset(str(folder / "shown"))


def built_in(name: str, root: Path) -> Dataset:
    """A built-in data set at full size: ``ctr-pe recommend``, which trains nothing, generates what is not there."""
    command("recommend", "--dataset", name, "--data-root", root)
    return open_dataset(str(root / name))


def hashes(dataset: Dataset) -> dict[str, Any]:
    """Per split the number of rows, and per column a hash of its values, whatever type and file hold them: of numbers,
    and of lists their items and their lengths."""
    found: dict[str, Any] = {}
    for split in SPLITS:
        rows = pl.read_parquet(dataset.split(split))
        columns: dict[str, dict[str, str]] = {}
        for column in sorted(rows.columns):
            values = rows[column]
            if isinstance(values.dtype, pl.List):
                lengths = values.list.len()
                items = pl.Series(values.to_arrow().flatten())
                columns[column] = {"items": digest(items), "lengths": digest(lengths)}
            else:
                columns[column] = {"values": digest(values)}
        found[split] = {"rows": rows.height, "columns": columns}
    return found


def digest(values: pl.Series) -> str:
    """sha256 of whole numbers as little-endian int64, of others as float64."""
    kind = "<f8" if values.dtype.is_float() else "<i8"
    return hashlib.sha256(values.to_numpy().astype(kind).tobytes()).hexdigest()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Sums in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(dataset: Dataset, model_name: str, encoding: str, folder: Path) -> dict[str, Any]:
    """One cell: the loss of every training step; after the last one metrics on validation and test rows, and scores."""
    with one_thread():
        options = {**MODELS[model_name], **ENCODINGS[encoding], **AUXILIARY.get((model_name, encoding), {})}
        torch.manual_seed(SEED)
        feature_map = dataset.feature_map(PARAMS["embedding_dim"])
        given = {**PARAMS, **options, "position_encoding": encoding, "model_root": str(folder)}
        model = getattr(model_zoo, model_name)(feature_map, **given)
        torch.manual_seed(SEED + 1)
        batches = BatchLoader(feature_map, dataset.split("train"), batch_size=BATCH, shuffle=True, seed=SEED)
        model.train()
        losses = [model.train_step(batch).item() for _ in range(EPOCHS) for batch in batches]
        model.eval()
        metrics: dict[str, Any] = {}
        for split in ("valid", "test"):
            rows = pl.read_parquet(dataset.split(split), columns=["label", "user_id"])
            some = BatchLoader(feature_map, dataset.split(split), split=split, batch_size=BATCH)
            with torch.inference_mode():
                scores = torch.cat([model.forward(batch)["y_pred"].view(-1).double() for batch in some])
            metrics[split] = evaluate(rows["label"].to_numpy(), scores.numpy(), rows["user_id"].to_numpy())
            metrics[f"{split} scores"] = scores.tolist()
    return {"losses": losses, **metrics}


def about(revision: str) -> dict[str, str]:
    """What the values were made with."""
    versions = {name: version(name) for name in ("torch", "fuxictr", "numpy", "polars", "pyarrow")}
    return {"revision": revision, **versions, "cpu": torch.backends.cpu.get_cpu_capability(), "vendor": vendor()}


def vendor() -> str:
    """Who made the processor, whose libraries add up in orders of their own; empty where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("vendor_id"):
                return line.partition(":")[2].strip()
    return ""
