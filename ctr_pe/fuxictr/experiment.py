"""One experiment of a FuxiCTR config: ``python model_zoo/run_expid.py --config config --expid DIN_synthetic --gpu -1``.

Does what FuxiCTR's own script does, on the same files, but reads 1e-3 as a number, refuses unknown keys, and never uses
an incomplete data set.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctr_pe.config.field_groups import field_groups
from ctr_pe.config.yaml import load_yaml, overridden
from ctr_pe.data.dataset import CONFIG, SPLITS, open_dataset
from ctr_pe.data.root import REPORT, data_root
from ctr_pe.data.synthetic.built_in import BUILT_IN, generate_built_in
from ctr_pe.fuxictr.feature_specs import FEATURES, read_feature_map
from ctr_pe.fuxictr.library import log_to_file
from ctr_pe.fuxictr.older_keys import translate
from ctr_pe.utils import distributed, loggers
from ctr_pe.utils.errors import UserError, nearest, quoted

if TYPE_CHECKING:
    from ctr_pe.training import DataSource


def load_params(config: str | Path | None, expid: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Parameters of an experiment: Base, then its section, then its data set's, then ``overrides``.

    ``config``: FuxiCTR's config directory, or one YAML file; None for ./config or else the installed one. ``expid``: a
    section of ``model_config.yaml`` or ``model_config/*.yaml``. ``overrides`` may choose another ``dataset_id``, and
    name the checkpoint, so that experiments that run at the same time do not share it. Raises UserError if there is no
    such config, experiment or data set.
    """
    overrides = dict(overrides or {})
    params, file = model_section(config, expid)
    if not {**params, **overrides}.get("dataset_id"):
        raise UserError(f"{file}: {expid}: 'dataset_id' is missing")
    dataset_id = str({**params, **overrides}["dataset_id"])
    own = dataset_section(config, dataset_id, {**params, **overrides})
    params = overridden({**params, **own, "dataset_id": dataset_id}, overrides)
    params, line = translate(params)
    if line:
        logging.getLogger(__name__).warning("%s: %s: %s", file, expid, line)
    if "model" not in params:
        raise UserError(f"{file}: {expid}: 'model' is missing")
    text = json.dumps(overrides, sort_keys=True, default=str)
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    model_id = overrides.get(
        "model_id", f"{expid}_{digest}" if overrides else expid
    )  # never a section's, as in FuxiCTR
    return {"seed": 0} | params | {"model_id": model_id}


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
    raise UserError(f"{config_folder(config)}: no experiment {quoted(expid)}: {nearest(expid, names)}")


def dataset_section(config: str | Path | None, dataset_id: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``dataset_id`` of the dataset config, or of the config beside a built data set of this name."""
    found = config_files(config, "dataset_config")
    for sections in found.values():
        if dataset_id in sections:
            return dict(sections[dataset_id])
    root = data_root(Path(params["data_root"]) if params.get("data_root") else None)
    built = root / dataset_id / CONFIG
    if built.is_file():
        return {"data_root": str(root), **next(iter(load_yaml(built).values()))}
    names = [name for of in found.values() for name, section in of.items() if name != "Base" and "model" not in section]
    near = nearest(dataset_id, names) if names else "no section describes a data set"
    raise UserError(
        f"data set '{dataset_id}' is neither in a dataset config of {config_folder(config)} nor in {root}: {near}"
    )


def config_folder(config: str | Path | None) -> Path:
    """The directory, or the file, that configs are read from."""
    if config is not None:
        return Path(config)
    return Path("config") if Path("config").is_dir() else Path(str(files("ctr_pe.configs")))


def config_files(config: str | Path | None, kind: str) -> dict[Path, dict[str, dict[str, Any]]]:
    """The sections of each YAML file of one kind: a directory's ``<kind>.yaml``, or else ``<kind>/*.yaml``."""
    folder, configs = config_folder(config), {}
    if not folder.exists():
        raise UserError(f"{folder}: no such config")
    single = folder if folder.is_file() else folder / f"{kind}.yaml"
    for file in [single] if single.is_file() else sorted((folder / kind).glob("*.yaml")):
        sections = load_yaml(file)
        if not isinstance(sections, dict):
            raise UserError(f"{file}: not a mapping of sections")
        configs[file] = {str(name): section for name, section in sections.items() if isinstance(section, dict)}
    return configs


def open_source(params: Mapping[str, Any]) -> DataSource:
    """The data set of an experiment: of this package, built by FuxiCTR, or CSV or parquet files with ``feature_cols``,
    which are built first.

    Raises UserError if it is missing or half-built, or its feature map has another name.
    """
    from ctr_pe.training import DataSource

    root = Path(params.get("data_root") or data_root())
    folder = root / str(params["dataset_id"])
    given = {split: str(params[f"{split}_data"]) for split in SPLITS if params.get(f"{split}_data")}
    built = Path(given["train"]).parent if "train" in given else folder
    is_built = (built / REPORT).is_file() or (folder / FEATURES).is_file()
    raw_parquet = params.get("data_format") == "parquet" and params.get("feature_cols") and not is_built
    if params.get("data_format") == "csv" or raw_parquet:
        from ctr_pe.fuxictr.csv import build_csv

        return DataSource.of(build_csv(params, field_groups(params)))
    if (built / REPORT).is_file():
        return DataSource.of(open_dataset(str(built.resolve())))
    if built.name in BUILT_IN and not built.exists():
        return DataSource.of(generate_built_in(built))
    feature_map = folder / FEATURES
    if not feature_map.is_file():
        open_dataset(str(params["dataset_id"]), root)  # raises an error with the command that builds it
        raise UserError(f"{feature_map}: missing")
    named = read_feature_map(feature_map).dataset_id
    if named != params["dataset_id"]:
        raise UserError(f"{feature_map}: of data set '{named}', not '{params['dataset_id']}'")
    for split in SPLITS:
        if split not in given and split != "test":
            raise UserError(f"{split}_data is missing in the dataset config of '{named}'")
        if split in given and not Path(given[split]).exists():
            raise UserError(f"{split}_data: {given[split]}: no such file: the data set is half-built, remove {folder}")
    return DataSource(folder, str(named), given)


def run(
    params: Mapping[str, Any], keep: Callable[..., None] | None = None
) -> tuple[dict[str, float], dict[str, float]]:
    """Train, and evaluate the best epoch: metrics on valid and on test ({} without test rows), those of
    ``ctr-pe benchmark`` with the same seed and parameters.

    The log goes to the terminal and to ``<model_root>/<dataset_id>/<model_id>.log``, beside the checkpoint. ``keep``:
    called with the folder beside the checkpoint, ``<model_id>``, and what ``Run.keep`` gets, to write the model there.
    If this process is killed, the same experiment goes on from its last epoch, whose state is in
    ``<model_id>-<code>.unfinished`` until the end. Raises UserError for invalid data or parameters.
    """
    from ctr_pe.models.sections import check_arguments, model_class
    from ctr_pe.study.runner import made_by
    from ctr_pe.study.store import hash_of
    from ctr_pe.training import Run, train

    cls = model_class(params["model"])
    params = {"model_root": "./checkpoints", **params}
    check_arguments(cls, params)  # before the log's file, which they name
    if distributed.is_first():
        log_to_file(params)
    logging.info("Params: %s", json.dumps({key: str(value) for key, value in params.items()}, indent=4))
    params["track"] = loggers.below(Path(params["model_root"]), loggers.check(params.get("track")))
    source, pe = distributed.broadcast(lambda: open_source(params)), params.get("position_encoding", "none")
    seed = int(params.get("seed", 0))
    folder = Path(params["model_root"]) / source.dataset_id / str(params.get("model_id", cls.__name__))
    state = folder.with_name(f"{folder.name}-{hash_of(made_by())}.unfinished")
    how: dict[str, Any] = {"gpu": params.get("gpu", -1), "threads": 0, "resume": state}
    outcome = train(Run(cls, source, pe, seed, params=params, keep=partial(keep, folder) if keep else None, **how))
    if distributed.is_first():
        state.unlink(missing_ok=True)
    logging.info("validation: %s", _in_words(outcome.valid))
    logging.info("test: %s", _in_words(outcome.metrics))
    return dict(outcome.valid), outcome.metrics


def append_result(
    config: Path, command: str, params: Mapping[str, Any], valid: Mapping[str, float], test: Mapping[str, float]
) -> None:
    """A line in ``<config's name>.csv`` of the working directory, in FuxiCTR's form."""
    line = (
        f" {datetime.now():%Y%m%d-%H%M%S},[command] python {command},[exp_id] {params['model_id']},"
        f"[dataset_id] {params['dataset_id']},[train] N.A.,[val] {_in_words(valid)},[test] {_in_words(test)}\n"
    )
    with open(config.name.replace(".yaml", "") + ".csv", "a+", encoding="utf-8") as file:
        file.write(line)  # one write: parallel runs append to the same file


def _in_words(metrics: Mapping[str, float]) -> str:
    return " - ".join(f"{name}: {value:.6f}" for name, value in metrics.items())
