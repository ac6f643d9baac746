"""One experiment of a FuxiCTR config: ``python model_zoo/run_expid.py --config config --expid DIN_synthetic --gpu -1``.

What FuxiCTR's own script does, on FuxiCTR's config files, with its traps closed: numbers such as 1e-3 are numbers, keys
that nothing reads are refused, and data are never taken for built because something lies in their place.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from ctr_pe import legacy
from ctr_pe.allocator import keep_memory
from ctr_pe.config import load_yaml, parse_overrides
from ctr_pe.data.built_in import BUILT_IN, generate_built_in
from ctr_pe.data.dataset import CONFIG, REPORT, Dataset, data_root, open_dataset
from ctr_pe.errors import UserError, nearest
from ctr_pe.fields import field_groups, group_params

SPLITS = ("train", "valid", "test")


def main(argv: Sequence[str] | None = None) -> int:
    """The command of FuxiCTR's ``run_expid.py``, with ``--set``; exit code 2 for a user's mistake, in one line."""
    parser = argparse.ArgumentParser(description="Train and evaluate one experiment of a FuxiCTR config.")
    parser.add_argument("--config", default=None, help="directory with model_config and dataset_config (default: "
                        "./config if there is one, else what is installed)")  # fmt: skip
    parser.add_argument("--expid", required=True, help="the experiment, a section of the model config")
    parser.add_argument("--gpu", type=int, default=-1, help="GPU to train on, -1 for the CPU (default: -1)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="a parameter that replaces the config's; may be given several times")  # fmt: skip
    args = parser.parse_args(argv)
    keep_memory()
    try:
        params = load_params(args.config, args.expid, parse_overrides(args.set))
        valid, test = run({**params, "gpu": args.gpu})
        command = " ".join(sys.argv if argv is None else ["run_expid.py", *argv])
        _append_result(Path(args.config or "config"), command, params, valid, test)
    except UserError as error:
        print(f"run_expid: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("run_expid: interrupted", file=sys.stderr)
        return 130
    return 0


def load_params(config: str | Path | None, expid: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Parameters of an experiment: Base, then its section, then its data set's, then ``overrides``.

    Args:
        config: FuxiCTR's config directory, or one YAML file; None for ./config or else the installed one.
        expid: a section of ``model_config.yaml`` or ``model_config/*.yaml``.
        overrides: a ``dataset_id`` among them chooses the data set; with overrides the checkpoint has a name of its
            own, so that experiments side by side do not share it.

    Raises:
        UserError: no such config, experiment or data set.
    """
    overrides = dict(overrides or {})
    params, file = model_section(config, expid)
    dataset_id = str(overrides.get("dataset_id", params.get("dataset_id")))
    params |= {**dataset_section(config, dataset_id, {**params, **overrides}), "dataset_id": dataset_id}
    params |= overrides
    if legacy.is_legacy(params):
        params, line = legacy.translate(params)
        logging.getLogger(__name__).warning("%s: %s: %s", file, expid, line)
    if "model" not in params:
        raise UserError(f"{file}: {expid}: 'model' is missing")
    return {"seed": 0, "model_id": f"{expid}_{_digest(overrides)}" if overrides else expid} | params


def model_section(config: str | Path | None, expid: str) -> tuple[dict[str, Any], Path]:
    """Base and the section ``expid`` of the model config, and the file it is in."""
    found = config_files(config, "model_config")
    for file, sections in found.items():
        if expid in sections:
            base = sections.get("Base") or next((other["Base"] for other in found.values() if "Base" in other), {})
            return {**base, **sections[expid]}, file
    if not found:
        raise UserError(f"{config_folder(config)}: no model_config.yaml and no model_config/*.yaml")
    names = [name for sections in found.values() for name in sections if name != "Base"]
    raise UserError(f"{config_folder(config)}: no experiment '{expid}': {nearest(expid, names)}")


def dataset_section(config: str | Path | None, dataset_id: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``dataset_id`` of the dataset config, or what lies beside a built data set of this name."""
    found = config_files(config, "dataset_config")
    for sections in found.values():
        if dataset_id in sections:
            return dict(sections[dataset_id])
    root = data_root(Path(params["data_root"]) if params.get("data_root") else None)
    beside = root / dataset_id / CONFIG
    if beside.is_file():
        return {"data_root": str(root), **next(iter(load_yaml(beside).values()))}
    names = [name for sections in found.values() for name in sections]
    raise UserError(
        f"data set '{dataset_id}' is neither in a dataset config of {config_folder(config)} nor in {root}: "
        f"{nearest(dataset_id, names)}"
    )


def config_folder(config: str | Path | None) -> Path:
    """The directory, or the file, that configs are read from."""
    if config is not None:
        return Path(config)
    return Path("config") if Path("config").is_dir() else Path(str(files("ctr_pe.configs")))


def config_files(config: str | Path | None, kind: str) -> dict[Path, dict[str, dict[str, Any]]]:
    """The sections of each YAML file of one kind: a directory's ``<kind>.yaml``, or else ``<kind>/*.yaml``."""
    folder = config_folder(config)
    if not folder.exists():
        raise UserError(f"{folder}: no such config")
    if folder.is_file():
        found = [folder]
    elif (folder / f"{kind}.yaml").is_file():
        found = [folder / f"{kind}.yaml"]
    else:
        found = sorted((folder / kind).glob("*.yaml"))
    return {file: _mappings(file) for file in found}


def _mappings(file: Path) -> dict[str, dict[str, Any]]:
    sections = load_yaml(file)
    if not isinstance(sections, dict):
        raise UserError(f"{file}: not a mapping of sections")
    return {str(name): section for name, section in sections.items() if isinstance(section, dict)}


@dataclass(frozen=True)
class Source:
    """Where an experiment's rows are: split to file or directory; ``dataset`` if it is one of ours."""

    folder: Path
    dataset_id: str
    files: dict[str, str]
    dataset: Dataset | None = None


def open_source(params: Mapping[str, Any]) -> Source:
    """The data set of an experiment: one of ours, one that FuxiCTR has built, or CSV files, which are built first.

    Raises:
        UserError: it is missing, half-built, or of another name than its feature map says.
    """
    if params.get("data_format") == "csv":
        from ctr_pe.data.sources.fuxictr_csv import build_csv

        return _own(build_csv(params, field_groups(params)))
    root = Path(params.get("data_root") or data_root())
    folder = root / str(params["dataset_id"])
    given = {split: str(params[f"{split}_data"]) for split in SPLITS if params.get(f"{split}_data")}
    beside = Path(given["train"]).parent if "train" in given else folder
    if (beside / REPORT).is_file():
        return _own(open_dataset(str(beside.resolve())))
    if beside.name in BUILT_IN and not beside.exists():
        return _own(generate_built_in(beside))
    feature_map = folder / "feature_map.json"
    if not feature_map.is_file():
        open_dataset(str(params["dataset_id"]), root)  # says how to build it
        raise UserError(f"{feature_map}: missing")
    named = json.loads(feature_map.read_text(encoding="utf-8")).get("dataset_id")
    if named != params["dataset_id"]:
        raise UserError(f"{feature_map}: of data set '{named}', not '{params['dataset_id']}'")
    for split in ("train", "valid"):
        if split not in given:
            raise UserError(f"{split}_data is missing in the dataset config of '{params['dataset_id']}'")
    for split, file in given.items():
        if not Path(file).exists():
            raise UserError(f"{split}_data: {file}: no such file: the data set is half-built, remove {folder}")
    return Source(folder, str(named), given)


def _own(dataset: Dataset) -> Source:
    return Source(
        dataset.path, dataset.dataset_id, {split: str(dataset.split(split)) for split in dataset.rows}, dataset
    )


def load_feature_map(source: Source, params: Mapping[str, Any]) -> Any:
    """FuxiCTR's feature map with the group id, the features in use and the changes of the config.

    Raises:
        UserError: one of them names a feature that is not there.
    """
    from fuxictr.features import FeatureMap

    names = [name for spec in _features(source.folder) for name in spec]
    specs = params.get("feature_specs") or []
    changed = [name for spec in specs for name in (spec["name"] if isinstance(spec["name"], list) else [spec["name"]])]
    group_id = params.get("group_id") or (source.dataset.group_id if source.dataset else None)
    for key, given in {
        "group_id": [group_id] if group_id else [],
        "use_features": params.get("use_features") or [],
        "feature_specs": changed,
    }.items():
        for name in given:
            if name not in names:
                raise UserError(f"{key}: no feature '{name}' in {source.folder}: {nearest(name, names)}")
    feature_map = FeatureMap(source.dataset_id, str(source.folder))
    feature_map.load(str(source.folder / "feature_map.json"), {**params, "group_id": group_id})
    return feature_map


def _features(folder: Path) -> list[dict[str, Any]]:
    features: list[dict[str, Any]] = json.loads((folder / "feature_map.json").read_text(encoding="utf-8"))["features"]
    return features


def model_params(params: Mapping[str, Any], dataset: Dataset | None) -> dict[str, Any]:
    """What the model's constructor gets: the data set's field groups where the config names none."""
    params = dict(params)
    if dataset is not None and not field_groups(params):
        fields = group_params(dataset.groups)
        params |= {**fields, "age_field": params.get("age_field") or fields["age_field"]}
    return params


def run(params: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Train, and evaluate the best epoch: metrics on valid, and on test (empty if there are no test rows).

    The log goes to the terminal and to ``<model_root>/<dataset_id>/<model_id>.log``, beside the checkpoint. With the
    same seed and parameters the results are those of ``ctr-pe benchmark``.

    Raises:
        UserError: what data and parameters may have wrong.
    """
    import numpy as np
    import torch
    from fuxictr.pytorch.dataloaders import RankDataLoader
    from fuxictr.utils import set_logger

    from ctr_pe.data.loader import BatchLoader
    from ctr_pe.training import model_class

    cls = model_class(params["model"])
    set_logger(dict(params))
    logging.info("Params: %s", json.dumps({key: str(value) for key, value in params.items()}, indent=4))
    if params["gpu"] >= 0 and not torch.cuda.is_available():
        logging.warning("--gpu %s: no GPU is there, the CPU is used", params["gpu"])
    source = open_source(params)
    feature_map = load_feature_map(source, params)
    seed = int(params["seed"])
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  FuxiCTR's pretrained embeddings draw from it
    model = cls(feature_map, **model_params(params, source.dataset))
    model.count_parameters()
    loading = {key: params[key] for key in ("batch_size", "shuffle", "num_workers") if key in params} | {"seed": seed}
    loading |= {f"{split}_data": file for split, file in source.files.items()}
    if params.get("data_format", "parquet") == "npz" and source.dataset is None:
        loading |= {"data_format": "npz"}
    else:
        loading |= {"data_loader": BatchLoader}
    train_rows, valid_rows = RankDataLoader(feature_map, stage="train", **loading)
    torch.manual_seed(seed + 1)  # dropout has a stream of its own, the same for every encoding
    clipping = {key: params[key] for key in ("max_gradient_norm",) if key in params}
    model.fit(train_rows, epochs=int(params.get("epochs", 1)), validation_data=valid_rows, **clipping)
    logging.info("****** Validation evaluation ******")
    valid = model.evaluate(valid_rows)
    del train_rows, valid_rows
    if "test" not in source.files:
        return valid, {}
    logging.info("******** Test evaluation ********")
    return valid, model.evaluate(RankDataLoader(feature_map, stage="test", **loading))


def _append_result(
    config: Path, command: str, params: Mapping[str, Any], valid: Mapping[str, float], test: Mapping[str, float]
) -> None:
    """A line in ``<config's name>.csv`` of the working directory, in FuxiCTR's form."""
    metrics = [" - ".join(f"{name}: {value:.6f}" for name, value in found.items()) for found in (valid, test)]
    line = (
        f" {datetime.now():%Y%m%d-%H%M%S},[command] python {command},[exp_id] {params['model_id']},"
        f"[dataset_id] {params['dataset_id']},[train] N.A.,[val] {metrics[0]},[test] {metrics[1]}\n"
    )
    with open(config.name.replace(".yaml", "") + ".csv", "a+", encoding="utf-8") as file:
        file.write(line)  # one write: runs side by side append to the same file


def _digest(overrides: Mapping[str, Any]) -> str:
    text = json.dumps(dict(overrides), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


__all__ = ["Source", "load_feature_map", "load_params", "main", "model_params", "open_source", "run"]
