"use strict";
(() => {
  const content = JSON.parse(document.getElementById("content").textContent);
  const at = (id) => document.getElementById(id);
  const colour = (pe) => content.colours[pe] || "#333333";
  const DASH = "–";
  let table = content.tables[0];
  const chosen = { metric: table.metrics[0], baseline: "none", curve: table.metrics[0], x: "epochs", hidden: new Set(), user: 0, unit: 0, shown: null, row: null };

  // Elements. Text from data is only ever set as text.
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "own") made.style.setProperty("--own", value);
      else if (name === "width") made.style.width = value;
      else if (name === "click") made.addEventListener("click", value);
      else if (value !== false && value !== null) made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }

  function fill(id, ...children) {
    at(id).replaceChildren(...children);
  }

  function rowsOf(header, rows) {
    const head = element("thead", {}, element("tr", {}, ...header.map((text) => element("th", { scope: "col" }, text))));
    const body = rows.map((cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell))));
    return [head, element("tbody", {}, ...body)];
  }

  const dot = (pe) => element("span", { class: "dot", own: colour(pe) }, pe);
  const isNumber = (value) => value !== null && value !== undefined;
  const number = (value, digits = 4) => (value === null || value === undefined ? DASH : value.toFixed(digits).replace("-", "−"));
  const signed = (value, digits = 4) => (value === null || value === undefined ? DASH : (value < 0 ? "" : "+") + number(value, digits));
  const pValue = (value) => (value !== null && value < 0.0005 ? "<0.001" : number(value, 3));
  const whole = (value) => (value === null || value === undefined ? DASH : Math.round(value).toLocaleString("en-US"));
  const spread = (mean, sd) => number(mean) + (mean === null || sd === null || sd === undefined ? "" : ` ± ${number(sd)}`);
  const interval = (one) => signed(one.value) + (one.low === null ? "" : ` [${signed(one.low)}, ${signed(one.high)}]`);

  // A sentence in which `…` is a command.
  function sentence(text, kind = "p", own = "") {
    const parts = text.split("`").map((part, index) => (index % 2 ? element("code", {}, part) : part));
    return element(kind, own ? { class: own } : {}, ...parts);
  }

  function choice(id, values, current, pick) {
    fill(id, ...(values.length < 2 ? [] : values.map(([value, label]) =>
      element("button", { type: "button", "aria-pressed": String(value === current), "data-value": value, click: () => pick(value) }, label))));
  }

  // Figures.
  const narrow = () => window.matchMedia("(max-width: 760px)").matches;
  const drawn = new Map();
  function plot(id, traces, layout) {
    const base = {
      font: { family: "system-ui, -apple-system, Segoe UI, Roboto, Liberation Sans, sans-serif", size: narrow() ? 12 : 13, color: "#1c2430" },
      margin: { l: narrow() ? 48 : 60, r: 14, t: 12, b: 46 },
      paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff", showlegend: false, hovermode: "closest",
      hoverlabel: { align: "left" }, dragmode: false,
    };
    const axis = { gridcolor: "#e8ecf0", zeroline: false, automargin: true, fixedrange: true, linecolor: "#c3ccd6", ticks: "" };
    const titled = (own) => ({ ...axis, ...own, title: { font: { size: narrow() ? 12 : 13 }, standoff: 8, ...(own || {}).title } });
    const both = { ...base, ...layout, xaxis: titled(layout.xaxis), yaxis: titled(layout.yaxis) };
    Plotly.react(id, traces, both, { displayModeBar: false, responsive: true, displaylogo: false });
    drawn.set(id, true);
  }

  function clear(id, text) {
    if (drawn.delete(id)) Plotly.purge(id);
    fill(id, ...(text ? [sentence(text, "p", "missing")] : []));
    at(id).removeAttribute("style");
  }

  // Differences.
  function differences() {
    const bases = Object.keys(table.differences);
    if (!bases.includes(chosen.baseline)) chosen.baseline = bases[0] || "none";
    choice("metric", bases.length ? table.metrics.map((name) => [name, name]) : [], chosen.metric, (value) => { chosen.metric = value; differences(); });
    choice("baseline", bases.map((name) => [name, `minus ${name}`]), chosen.baseline, (value) => { chosen.baseline = value; differences(); });
    if (!bases.length) return clear("forest", table.missing.differences);
    const found = table.differences[chosen.baseline];
    const names = table.encodings.filter((pe) => found[pe] && found[pe][chosen.metric].value !== null);
    const traces = names.map((pe) => {
      const one = found[pe][chosen.metric];
      const bars = one.low === null ? {} : { error_x: { type: "data", symmetric: false, array: [one.high - one.value], arrayminus: [one.value - one.low], thickness: 3, width: 0, color: colour(pe) } };
      return { x: [one.value], y: [pe], type: "scatter", mode: "markers", marker: { symbol: "square", size: 11, color: colour(pe) }, hovertemplate: `${pe}: ${interval(one)}<extra></extra>`, ...bars };
    });
    const better = chosen.metric === "logloss" ? "better to the left" : "better to the right";
    const text = narrow() ? [] : names.map((pe) => ({ x: 1, xref: "paper", xanchor: "left", xshift: 8, y: pe, yref: "y", yanchor: "middle", text: interval(found[pe][chosen.metric]), showarrow: false, font: { size: 13 } }));
    const ends = names.flatMap((pe) => ["value", "low", "high"].map((end) => found[pe][chosen.metric][end])).filter((value) => value !== null).concat(0);
    const low = Math.min(...ends), width = Math.max(...ends) - low || 1e-3;
    const range = [low - 0.06 * width, low + 1.06 * width];
    plot("forest", traces, {
      height: 84 + 36 * names.length,
      xaxis: { title: { text: `${chosen.metric} − ${chosen.baseline}, 95 % interval (${better})` }, zeroline: true, zerolinecolor: "#8b95a1", zerolinewidth: 1.5, tickformat: "~g", nticks: narrow() ? 5 : 8, range },
      yaxis: { type: "category", categoryorder: "array", categoryarray: names.slice().reverse(), range: [-0.6, names.length - 0.4], showgrid: false },
      annotations: text,
      margin: { l: narrow() ? 48 : 60, r: narrow() ? 14 : 210, t: 12, b: 46 }, // the intervals are in the right margin
    });
  }

  function metrics() {
    const [lead, ...others] = table.metrics, minus = `${lead}_minus_${table.base}`;
    const compared = table.rows.some((row) => isNumber(row[minus]));
    const printed = table.task === "next-item" && table.rows.some((row) => isNumber(row[`${lead}_published`]));
    const header = ["encoding", lead, ...(compared ? [`${lead} − ${table.base}`, "95 % interval", "detectable", "p"] : []), ...(printed ? [`${lead}, published`] : []), "seeds", ...others];
    const mean = (row, name) => spread(row[`${name}_mean`], row[`${name}_sd`]);
    const rows = table.rows.map((row) => [
      dot(row.pe), mean(row, lead),
      ...(compared ? [signed(row[minus]), row[`${minus}_low`] === null ? DASH : `${signed(row[`${minus}_low`])} to ${signed(row[`${minus}_high`])}`,
        number(row[`${minus}_detectable`]), pValue(row[`${minus}_p_holm`])] : []), ...(printed ? [number(row[`${lead}_published`])] : []), whole(row.seeds),
      ...others.map((name) => mean(row, name)),
    ]);
    fill("metrics", ...rowsOf(header, rows));
    fill("notes", ...table.notes.map((note) => sentence(note, "li")));
    fill("summary", ...table.summary.map((line) => sentence(line)));
  }

  // Learning curves.
  function curves() {
    const runs = table.encodings.flatMap((pe) => (table.curves[pe] || []).map((run) => ({ pe, ...run })));
    if (!runs.length) {
      for (const id of ["curve-metric", "curve-x"]) fill(id);
      fill("curve-legend", sentence(table.missing.curves, "p", "missing"));
      clear("curve-loss");
      return clear("curve-valid");
    }
    const names = table.metrics.filter((name) => runs.some((run) => run.metrics[name]));
    const others = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].filter((name) => !names.includes(name));
    const all = [...names, ...others];
    if (!all.includes(chosen.curve)) chosen.curve = all[0];
    choice("curve-metric", all.map((name) => [name, name]), chosen.curve, (value) => { chosen.curve = value; curves(); });
    choice("curve-x", [["epochs", "by epoch"], ["seconds", "by seconds"]], chosen.x, (value) => { chosen.x = value; curves(); });
    legend("curve-legend", table.encodings, (pe) => !chosen.hidden.has(pe), (pe) => {
      if (!chosen.hidden.delete(pe)) chosen.hidden.add(pe);
      curves();
    });
    const visible = runs.filter((run) => !chosen.hidden.has(run.pe));
    const traces = (values, marked) => visible.map((run) => ({
      x: run[chosen.x], y: values(run), type: "scatter", mode: "lines+markers", line: { color: colour(run.pe), width: 1.8 },
      marker: { color: run.epochs.map((_, index) => (marked && index === run.best ? "#ffffff" : colour(run.pe))), size: run.epochs.map((_, index) => (marked && index === run.best ? 9 : 5)), line: { color: colour(run.pe), width: marked ? 2 : 0 } },
      hovertemplate: `${run.pe}, seed ${run.seed}<br>%{x:.4~g}: %{y:.4f}<extra></extra>`,
    }));
    const x = { title: { text: chosen.x === "epochs" ? "epoch" : "seconds since the start" }, ...(chosen.x === "epochs" ? { tickformat: "~g", dtick: Math.max(...visible.flatMap((run) => run.epochs), 1) <= 10 ? 1 : undefined } : { rangemode: "tozero" }) };
    plot("curve-valid", traces((run) => run.metrics[chosen.curve] || [], true), { height: 330, xaxis: x, yaxis: { title: { text: `validation ${chosen.curve}` } } });
    plot("curve-loss", traces((run) => run.loss, false), { height: 330, xaxis: x, yaxis: { title: { text: "training loss" } } });
    if (table.missing.curves) at("curve-legend").append(sentence(table.missing.curves, "p", "missing"));
  }

  function legend(id, names, pressed, toggle) {
    fill(id, ...names.map((pe) => element("button", { type: "button", own: colour(pe), "aria-pressed": String(pressed(pe)), "data-value": pe, click: () => toggle(pe) }, pe)));
  }

  // Calibration and history length.
  function calibration() {
    showSection("calibration", table.task === "click");
    if (!table.calibration) {
      fill("calibration-table");
      return clear("calibration-figure", table.missing.calibration);
    }
    const of = table.calibration.encodings;
    const ends = table.encodings.flatMap((pe) => [...of[pe].predicted, ...of[pe].observed]);
    const low = Math.max(0, Math.min(...ends) - 0.03), high = Math.min(1, Math.max(...ends) + 0.03);
    const diagonal = { x: [low, high], y: [low, high], mode: "lines", line: { color: "#9aa0a6", dash: "dot", width: 1.5 }, hoverinfo: "skip", showlegend: false };
    plot("calibration-figure", [diagonal, ...table.encodings.map((pe) => ({
      x: of[pe].predicted, y: of[pe].observed, customdata: of[pe].rows.map(whole), mode: "lines+markers", name: pe, line: { color: colour(pe), width: 1.8 }, marker: { size: 7, color: colour(pe) },
      hovertemplate: `${pe}: predicted %{x:.3f}, clicked %{y:.3f}<br>%{customdata} rows<extra></extra>`,
    }))], { height: narrow() ? 340 : 430, ...legendBelow(), xaxis: { title: { text: "mean predicted click probability" }, range: [low, high] }, yaxis: { title: { text: "share of rows clicked" }, range: [low, high] } });
    fill("calibration-table", ...rowsOf(["encoding", "distance from the diagonal"], table.encodings.map((pe) => [dot(pe), number(of[pe].error)])));
  }

  function showSection(id, shown) {
    at(id).hidden = !shown;
    document.querySelector(`nav a[href="#${id}"]`).hidden = !shown;
  }

  const legendBelow = () => ({ showlegend: true, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 13 } }, margin: { l: narrow() ? 48 : 60, r: 14, t: 44, b: 50 } });

  function lengths() {
    const found = table.lengths, metric = found ? found.metric : table.metrics[0];
    fill("lengths-title", `${metric} by length of the history`);
    fill("lengths-lead", (table.task === "click" ? "AUC within users over the test rows whose history has so many items." : `Mean ${metric} of the test rows whose history has so many items.`)
      + " Points are means over seeds, bars one standard deviation.");
    if (!found) {
      fill("lengths-table");
      return clear("lengths-figure", table.missing.lengths);
    }
    const shift = (index) => (table.encodings.length < 2 ? 0 : (index / (table.encodings.length - 1) - 0.5) * 0.3);
    plot("lengths-figure", table.encodings.map((pe, index) => ({
      x: found.bins.map((_, bin) => bin + shift(index)), y: found.encodings[pe].mean, name: pe, mode: "lines+markers", line: { color: colour(pe), width: 1.8 }, marker: { size: 7, color: colour(pe) },
      error_y: { type: "data", array: found.encodings[pe].sd.map((sd) => sd || 0), color: colour(pe), thickness: 1.3, width: 0 },
      text: found.bins.map((bin, at) => `${pe}, ${bin} items: ${spread(found.encodings[pe].mean[at], found.encodings[pe].sd[at])}`), hovertemplate: "%{text}<extra></extra>",
    })), { height: narrow() ? 330 : 390, ...legendBelow(), xaxis: { title: { text: "items in the history" }, tickvals: found.bins.map((_, bin) => bin), ticktext: found.bins, range: [-0.4, found.bins.length - 0.6], showgrid: false }, yaxis: { title: { text: metric } } });
    const last = table.encodings.map((pe) => element("span", { class: "dot", own: colour(pe) }, pe));
    fill("lengths-table", ...rowsOf(["items", "rows", "users", ...last], found.bins.map((bin, index) => [bin, whole(found.rows[index]), whole(found.users[index]), ...table.encodings.map((pe) => number(found.encodings[pe].mean[index]))])));
  }

  // Speed, data, environment.
  function speed() {
    const base = table.speed.find((row) => row.pe === "none");
    const more = (row) => (base && row !== base ? signed(row.parameters - base.parameters, 0).replace(/\B(?=(\d{3})+$)/g, ",") : DASH);
    fill("speed-table", ...rowsOf(
      ["encoding", "rows per second", "seconds per epoch", "epochs", "seconds per run", "parameters", "more than none"],
      table.speed.map((row) => [dot(row.pe), whole(row.rows_per_second), number(row.epoch_seconds, 1), number(row.epochs, 1), number(row.seconds, 1), whole(row.parameters), more(row)])));
  }

  const facts = (found) => Object.entries(found).map(([name, value]) => element("tr", {}, element("td", {}, name), element("td", {}, value)));

  function data() {
    const found = table.data || { facts: {}, columns: [] };
    fill("data-missing", ...(table.data ? [] : [sentence(table.missing.data, "p", "missing")]));
    fill("data-facts", element("tbody", {}, ...facts(found.facts)));
    fill("data-columns", ...(table.data ? rowsOf(
      ["column", "of the", "type", "read in", "ids", "without a value"],
      found.columns.map((one) => [one.name, one.of || DASH, one.type, one.in, whole(one.ids), whole(one.without)])) : []));
  }

  function environment() {
    fill("command", table.command);
    fill("report-command", content.command);
    fill("facts", element("tbody", {}, ...facts(table.environment)));
    fill("params", element("tbody", {}, ...facts(table.params)));
    fill("made", `Made ${content.made}. This file needs no network.`);
  }

  // Explorer.
  const kinds = { clicked: "Clicked item", sampled: "Item that was not clicked" };
  const what = (values) => [values[0], values.slice(1).join(" · ")]; // the item, and all else about it
  const named = (values) => table.explorer.fields.map((field, index) => `${field} ${values[index]}`).reverse().join(" · ");

  function explorer() {
    const found = table.explorer;
    showSection("explorer", found !== null);
    if (!found) return;
    at("explorer-body").hidden = Boolean(found.missing);
    fill("explorer-missing", ...[found.missing, found.note].filter(Boolean).map((text) => sentence(text, "p", "missing")));
    if (found.missing) return;
    chosen.user = Math.floor(found.users.length / 2); chosen.unit = 0; chosen.row = null;
    const first = found.encodings.filter((pe) => pe === "none" || pe === "naive" || found.contextual.includes(pe));
    chosen.shown = new Set(found.encodings.length <= 6 ? found.encodings : first.concat(found.encodings).slice(0, 4));
    const items = (history) => `${history.length} item${history.length === 1 ? "" : "s"}`;
    fill("user", ...found.users.map((one, index) => element("option", { value: index }, `${one.user}: ${items(one.clicked.history)}`)));
    fill("unit", ...found.units.map((label, index) => element("option", { value: index }, label || "target attention")));
    at("choose-unit").hidden = found.units.length < 2;
    fill("explorer-lead", `Each user's history is listed from the newest item to the oldest, for an item that was clicked and one that was not (seed ${found.seed}). `
      + (found.softmax ? "A bar is the attention weight of an item under one encoding; the weights of a history add up to 1. " : "A bar is the attention score of an item under one encoding (without softmax; pale bars are below zero). ")
      + (found.contextual.length ? `The position is how far away ${position()} places the item: unlike plain counting it depends on the target. ` : "")
      + "Items of the target's category are marked. Click a row for its numbers.");
    show();
  }

  const position = () => (table.explorer.contextual.includes("cape") ? "cape" : table.explorer.contextual[0]);

  function show() {
    const found = table.explorer, user = found.users[chosen.user];
    at("user").value = String(chosen.user);
    at("unit").value = String(chosen.unit);
    legend("explorer-legend", found.encodings, (pe) => chosen.shown.has(pe), (pe) => {
      if (!chosen.shown.delete(pe)) chosen.shown.add(pe);
      show();
    });
    const pes = found.encodings.filter((pe) => chosen.shown.has(pe));
    const values = ["clicked", "sampled"].flatMap((side) => pes.flatMap((pe) => user[side].units[chosen.unit][pe].weights)).filter((value) => value !== null);
    const most = Math.max(...values.map(Math.abs), 1e-12);
    for (const side of ["clicked", "sampled"]) fill(`side-${side}`, ...card(side, user[side], pes, most));
    detail(pes);
  }

  function card(side, one, pes, most) {
    const where = position(), unit = one.units[chosen.unit];
    const field = table.explorer.fields;
    const head = element("div", { class: "target" },
      element("div", { class: "kind" }, kinds[side]), element("div", { class: "name" }, named(one.target)),
      element("div", { class: "scores" }, "predicted:", ...pes.map((pe) => element("span", { class: "dot", own: colour(pe) }, `${pe} ${number(one.scores[pe], 3)}`))));
    const columns = [element("th", { title: "items before the target" }, "#"), element("th", { class: "what" }, field.slice().reverse().join(", ")),
      where ? element("th", { class: "place", title: `contextual position under ${where}` }, `${where} position`) : null, element("th", { class: "bars" }, table.explorer.softmax ? "attention weight" : "attention score")];
    const rows = one.history.map(([age, ...fields], index) => {
      const [name, kind] = what(fields);
      const same = field.length > 1 && fields[1] === one.target[1];
      const bars = pes.map((pe) => {
        const value = unit[pe].weights[index];
        return element("span", { class: value < 0 ? "strip below" : "strip", own: colour(pe), width: `${value === null ? 0 : (100 * Math.abs(value)) / most}%`, title: `${pe} ${number(value)}` });
      });
      const place = where ? unit[where].positions : null;
      return element("tr", { class: [same ? "same" : "", chosen.row === index ? "chosen" : ""].join(" ").trim(), "data-row": index, tabindex: "0", click: () => pick(index) },
        element("td", {}, String(index + 1)), element("td", { class: "what" }, kind ? element("b", {}, kind) : element("b", {}, name), element("span", {}, kind ? name : "")),
        where ? element("td", { class: "place" }, place ? number(place[index], 2) : DASH) : null, element("td", { class: "bars" }, ...bars));
    });
    const body = element("div", { class: "history", "data-side": side }, element("table", {}, element("thead", {}, element("tr", {}, ...columns.filter(Boolean))), element("tbody", {}, ...rows)));
    return [head, body];
  }

  function pick(index) {
    chosen.row = chosen.row === index ? null : index;
    const scrolled = ["clicked", "sampled"].map((side) => document.querySelector(`#side-${side} .history`).scrollTop);
    show();
    ["clicked", "sampled"].forEach((side, number) => { document.querySelector(`#side-${side} .history`).scrollTop = scrolled[number]; });
  }

  function ago(seconds) {
    if (seconds === null) return "";
    if (seconds === 0) return ", at the time of the request";
    const units = [["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]];
    const [name, size] = units.find(([, one]) => seconds >= one) || units[3];
    const count = Math.round(seconds / size);
    return `, ${count.toLocaleString("en-US")} ${name}${count === 1 ? "" : "s"} before the request`;
  }

  function detail(pes) {
    if (chosen.row === null) return fill("detail");
    const user = table.explorer.users[chosen.user];
    const sides = ["clicked", "sampled"].filter((side) => user[side].history[chosen.row]);
    const lead = sides.slice(0, 1).map((side) => {
      const [age, ...fields] = user[side].history[chosen.row];
      return element("p", {}, `Item ${chosen.row + 1} before the target: ${named(fields)}${ago(age)}.`);
    });
    const even = table.explorer.softmax;
    const tables = sides.map((side) => {
      const rows = pes.map((pe) => {
        const unit = user[side].units[chosen.unit][pe], weight = unit.weights[chosen.row];
        const share = even ? [weight === null ? DASH : number(weight * unit.items, 2)] : [];
        return [dot(pe), number(weight), ...share, unit.positions ? number(unit.positions[chosen.row], 2) : DASH];
      });
      const header = ["encoding", even ? "weight" : "score", ...(even ? ["× even share"] : []), "position"];
      return element("div", {}, element("h3", {}, kinds[side]), element("table", {}, ...rowsOf(header, rows)));
    });
    fill("detail", ...lead, element("div", { class: "pair" }, ...tables));
  }

  function step(by) {
    const count = table.explorer.users.length;
    chosen.user = (chosen.user + by + count) % count;
    chosen.row = null;
    show();
  }

  at("user").addEventListener("change", () => { chosen.user = Number(at("user").value); chosen.row = null; show(); });
  at("unit").addEventListener("change", () => { chosen.unit = Number(at("unit").value); show(); });
  at("previous").addEventListener("click", () => step(-1));
  at("next").addEventListener("click", () => step(1));
  at("explorer").addEventListener("keydown", (event) => {
    const row = event.target.closest("tr[data-row]");
    if (row && (event.key === "Enter" || event.key === " ")) { event.preventDefault(); row.click(); }
  });

  function all() {
    fill("subtitle", table.title);
    metrics(); differences(); curves(); calibration(); lengths(); speed(); data(); explorer(); environment();
  }

  fill("table", ...content.tables.map((one, index) => element("option", { value: index }, one.title)));
  at("choose-table").hidden = content.tables.length < 2;
  at("table").addEventListener("change", () => { table = content.tables[Number(at("table").value)]; chosen.hidden.clear(); chosen.metric = chosen.curve = table.metrics[0]; all(); });
  let small = narrow();
  window.addEventListener("resize", () => {
    if (narrow() !== small) { small = narrow(); differences(); curves(); calibration(); lengths(); }
  });
  all();
})();
