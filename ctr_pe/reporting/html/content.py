"""The page: for each table of a store its figures as plain numbers, and sentences for what is missing."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic_core import to_json

import ctr_pe
from ctr_pe.evaluation.metrics import METRICS
from ctr_pe.evaluation.paired import Difference, mean_sd
from ctr_pe.reporting.figures.runs import benchmark_command
from ctr_pe.reporting.html import Options
from ctr_pe.reporting.html.charts import by_length, calibration, curves, speed
from ctr_pe.reporting.html.explorer import explorer
from ctr_pe.reporting.html.rendering import render, write
from ctr_pe.study import next_item
from ctr_pe.study.benchmark import find_dataset, keep_rows, protocol_of
from ctr_pe.study.differences import BASELINES, Setting, settings
from ctr_pe.study.rendering import Table
from ctr_pe.study.store import RunKey, Store
from ctr_pe.study.tables import make_tables, measured
from ctr_pe.utils.errors import UserError, counted, progress

LEVEL = 0.05
COLOURS = {"none": "#6b7280", "naive": "#0072b2", "rope": "#009e73", "cope": "#b5489a", "cape": "#d55e00"}
OTHERS = (
    *("#8c6d00", "#56a3d9", "#7b3fbf", "#c2185b", "#3d7a1f", "#a0522d", "#00838f", "#5c6bc0", "#e07b91", "#9e9d24"),
    *("#455a64", "#bf360c", "#1b5e20", "#4a148c", "#01579b", "#827717", "#880e4f", "#004d40", "#6d4c41", "#b39b00"),
    "#ef9a00",
)


def report(options: Options) -> Path:
    """Write the page; where it is.

    Raises:
        UserError: Plotly or Jinja2 is not installed, there are no results, or the page cannot be written.
    """
    try:
        import jinja2  # noqa: F401
        import plotly  # noqa: F401
    except ImportError:
        raise UserError("ctr-pe report needs Plotly and Jinja2: pip install 'ctr_pe[report]'") from None
    out = options.out or options.results / "report.html"
    write(page(content(options)), out)
    return out


def page(content: Mapping[str, Any]) -> str:
    """HTML. The numbers are JSON in ``<script id="content">``."""
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    # What is marked as HTML is JSON without "<", or a file of plotly's.
    numbers, plotly = Markup(as_json(content)), Markup(get_plotlyjs())  # nosec B704
    return render("page", title=content["title"], numbers=numbers, plotly=plotly)


def as_json(content: Any) -> str:
    """JSON that may stand in a script element: without ``<``, and with null for what is not finite."""
    text = to_json(content, inf_nan_mode="null").decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def content(options: Options) -> dict[str, Any]:
    """All numbers of the page.

    Raises:
        UserError: no results in the folder.
    """
    store = stored_results(options.results)
    tables = [_table(options, store, setting) for setting in settings(store) if setting.runs]
    encodings = dict.fromkeys(pe for table in tables for pe in table["encodings"])
    return {
        "title": f"Position encodings: {options.results.resolve().name}",
        "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by ctr_pe {ctr_pe.__version__}",
        "command": _command(options),
        "colours": colours(list(encodings)),
        "tables": tables,
    }


def stored_results(folder: Path) -> Store:
    """The store of a benchmark. Raises UserError if the folder has no results."""
    store = Store(folder)
    if not store.read():
        command = shlex.join(["ctr-pe", "benchmark", "--keep-weights", "--out", str(folder)])
        raise UserError(f"{folder}: no results of a benchmark: `{command}` makes them")
    return store


def _command(options: Options) -> str:
    given: dict[str, Any] = {"--out": options.out, "--weights": options.weights, "--data-root": options.data_root}
    given["--users"] = options.users if options.users != Options.users else None
    words = [word for option, value in given.items() if value is not None for word in (option, str(value))]
    return shlex.join(["ctr-pe", "report", str(options.results), *words])


def colours(encodings: Sequence[str]) -> dict[str, str]:
    """One colour per encoding, the same in every part of the page."""
    others = [pe for pe in encodings if pe not in COLOURS]
    return {pe: COLOURS.get(pe) or OTHERS[others.index(pe) % len(OTHERS)] for pe in encodings}


def _table(options: Options, store: Store, setting: Setting) -> dict[str, Any]:
    progress(setting.title)
    key = setting.key
    no_data = _keep_rows(options, store, key)
    ranked = next_item.of_next_items(setting.results)
    main = _ranking_table(options, store, setting) if ranked else make_tables(setting)[0]
    metrics = next_item.metrics_of(setting.results) if ranked else list(METRICS)
    statistics = next_item.RankStatistics(store, key.data_hash) if ranked else None
    differences = {base: setting.differences(base, statistics, metrics) for base in BASELINES}
    of_rows = next((name for name in metrics if not name.startswith("COV")), None)
    rows = store.about(key.data_hash)
    missing = _missing(store, setting)
    if ranked:
        missing.pop("calibration", None)
    if of_rows is None:
        missing["lengths"] = "No metric was measured that a row has a value of."
    if not any(differences.values()):
        command = benchmark_command(setting.results).replace("--pe ", "--pe none,", 1)
        why = "There are no differences: `none` has not been run, or there is nothing else."
        missing["differences"] = f"{why} `{command}` runs it."
    if "lengths" not in rows and "lengths" not in missing:
        why = "The lengths of the histories are not stored, and the data set that has them cannot be read"
        missing["lengths"] = f"{why}: {no_data}."
    if "description" not in rows:
        why = "What columns the data have is not stored, and the data set that has them cannot be read"
        missing["data"] = f"{why}: {no_data}."
    return {
        "title": main.title if ranked else setting.title,
        "task": "next-item" if ranked else "click",
        "metrics": metrics,
        "base": next((name for name in BASELINES if name in setting.runs), "none") if ranked else "none",
        "notes": main.notes,
        "summary": summary(setting, metrics[0] if metrics else "", differences),
        "model": key.model,
        "dataset": key.dataset,
        "encodings": list(setting.runs),
        "rows": [
            {**{name: line[name] for name in line if name.startswith(tuple(metrics)) or name == "seeds"}, "pe": pe}
            for pe, line in zip(setting.runs, main.lines, strict=False)  # then those whose runs have all failed
        ],
        "differences": {
            base: {pe: {metric: one._asdict() for metric, one in of.items()} for pe, of in found.items()}
            for base, found in differences.items()
            if found
        },
        "curves": curves(setting),
        "calibration": None if ranked or "calibration" in missing else calibration(store, setting),
        "lengths": None if "lengths" in missing else by_length(store, setting, str(of_rows)),
        "speed": speed(setting, rows.get("splits")),
        "data": json.loads(str(rows["description"])) if "description" in rows else None,
        "explorer": None if ranked else explorer(options, store, setting),
        "missing": missing,
        "environment": _environment(setting),
        "params": {name: str(value) for name, value in setting.results[0].params.items()},
        "command": benchmark_command(setting.results, "--out", str(options.results), root=options.data_root),
    }


def _ranking_table(options: Options, store: Store, setting: Setting) -> Table:
    """With the protocol of the data set and the published figures, where it can be read."""
    key = setting.key
    try:
        protocol = protocol_of(find_dataset(key.dataset, options.data_root, key.protocol))
    except UserError:
        protocol = ""
    return next_item.setting_table(store, key.setting, setting.runs, setting.failed, protocol)


def _keep_rows(options: Options, store: Store, key: RunKey) -> str:
    """Add what a store of an older version lacks about its test rows; why that is not possible, or nothing."""
    if store.about(key.data_hash).keys() >= {"lengths", "description"}:
        return ""
    try:
        dataset = find_dataset(key.dataset, options.data_root, key.protocol)
    except UserError as error:
        return str(error)
    if dataset.data_hash != key.data_hash:
        return f"{dataset.path} is not the data that the runs were trained on"
    keep_rows(store, dataset)
    return ""


def summary(
    setting: Setting, metric: str, differences: Mapping[str, Mapping[str, Mapping[str, Difference]]]
) -> list[str]:
    """The table in plain sentences, by its first metric; ``differences``: baseline -> encoding -> metric."""
    means = {pe: mean_sd(measured(runs, metric))[0] for pe, runs in setting.runs.items()}
    means = {pe: mean for pe, mean in means.items() if not math.isnan(mean)}
    if not means:
        return []
    best = max(means, key=lambda pe: means[pe])
    seeds, what = counted(len(setting.runs[best]), "seed"), " (AUC within users)" * (metric == "gAUC")
    lines = [f"The highest mean {metric}{what} is that of {best}: {means[best]:.4f} over {seeds}."]
    found = {pe: of[metric] for pe, of in differences.get("none", {}).items() if not math.isnan(of[metric].low)}
    interval = "The 95 % interval of the difference to none, for other users and newly trained runs,"
    for what, sign in ("above", 1), ("below", -1):
        if of := [f"{pe} ({one.value:+.4f})" for pe, one in found.items() if min(sign * one.low, sign * one.high) > 0]:
            lines.append(f"{interval} lies {what} zero for {_listed(of)}.")
    if open_ := {pe: one for pe, one in found.items() if one.low <= 0 <= one.high}:
        them = "it" if len(open_) == 1 else "them"
        lines.append(f"{interval} includes zero for {_listed(list(open_))}: these runs do not tell {them} from none.")
        most = max(one.detectable for one in open_.values())
        least = max(one.least_detectable for one in open_.values())
        lines.append(
            f"They would have shown a true difference of {most:.4f} in four of five cases (p < {LEVEL}); with any "
            f"number of seeds these users would show one of about {least:.4f}."
        )
    if len(found) > 1:
        small = [pe for pe, one in found.items() if one.p_holm < LEVEL] or ["none of them"]
        lines.append(f"Corrected for {counted(len(found), 'comparison')}, p is below {LEVEL} for {_listed(small)}.")
    return [line.replace("(-", "(−") for line in lines]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _missing(store: Store, setting: Setting) -> dict[str, str]:
    """Part of the page -> the sentence that stands there where runs were stored without what it shows."""
    results = setting.results
    command = benchmark_command(results, "--out", "NEW_FOLDER")
    found = {}
    if lacking := sum(not result.history for result in results):
        found["curves"] = (
            f"{counted(lacking, 'run')} of {len(results)} were stored by a version that did not keep the history "
            f"of the epochs. `{command}` trains them again, with it."
        )
    test = store.rows(setting.key.data_hash)
    scores = [store.scores(result.key) for result in results]
    if lacking := sum(test is None or one is None or len(one) != len(test[0]) for one in scores):
        sentence = f"The test scores of {counted(lacking, 'run')} are not in scores/. `{command}` makes them again."
        found |= {"calibration": sentence, "lengths": sentence}
    return found


def _environment(setting: Setting) -> dict[str, str]:
    """Several values where runs differ."""
    results = setting.results

    def each(values: Sequence[object]) -> str:
        return ", ".join(dict.fromkeys(map(str, values)))

    names = dict.fromkeys(name for result in results for name in result.versions)
    finished = [result.finished for result in results]
    return {
        **{name: each([result.versions[name] for result in results if name in result.versions]) for name in names},
        "revision of ctr_pe": each([result.revision or "not known" for result in results]),
        "device": each([result.device for result in results]),
        "processor": each([result.processor or "not recorded" for result in results]),
        "threads per run": each([result.threads for result in results]),
        "seeds": each(sorted({result.seed for result in results})),
        "protocol": setting.key.protocol,
        "hash of the hyper-parameters": setting.key.config_hash,
        "hash of the data": setting.key.data_hash,
        "runs finished": " to ".join(dict.fromkeys([min(finished), max(finished)])),
    }
