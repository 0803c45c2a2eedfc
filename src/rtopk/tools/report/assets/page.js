// Draws the model inside the page with plotly.js; without this script the tables stand.
"use strict";
(() => {
  let model = JSON.parse(document.getElementById("model").textContent);
  const Plotly = window.Plotly;
  if (!Plotly) return;
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const STROKES = ["none", "5 3", "2 2", "6 2 2 2"];
  const chosen = { hidden: new Set(), x: "round", y: "score" };
  const AXES = {
    x: { round: "round", bytes: "bytes sent per node", seconds: "seconds" },
    y: { score: "score", loss: "loss", train_loss: "training loss" },
  };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const place = (slot) => (slot < model.markers.length ? slot : 1 + ((slot - 1) % (model.markers.length - 1)));  // palette.slot
  const colour = (slot) => css(`--s${place(slot)}`);
  const faint = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");
  const compact = window.matchMedia("(max-width: 40rem)");

  function layout(x, y, more) {
    const axis = { color: css("--ink"), gridcolor: css("--line"), zeroline: false, automargin: true };
    return {
      xaxis: { ...axis, title: { text: x } }, yaxis: { ...axis, title: { text: y } },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
      font: { color: css("--ink"), family: getComputedStyle(document.body).fontFamily, size: 13 },
      hoverlabel: { bgcolor: css("--back"), bordercolor: css("--ink"), font: { color: css("--ink") }, namelength: -1 },
      margin: { l: 60, r: 12, t: 28, b: 48 }, dragmode: compact.matches ? "pan" : "zoom", uirevision: `${x} ${y}`,
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--dim"), activecolor: css("--ink") }, ...more,
    };
  }
  const log = (base, way) => { base[way] = { ...base[way], type: "log", exponentformat: "power", nticks: 6 }; return base; };
  const shown = (panel) => panel.series.filter((one) => !chosen.hidden.has(one.label));
  const line = (one, width = 2) => ({ color: colour(one.slot), dash: DASHES[one.dash % 4], width });
  const marker = (one, size) => ({
    color: one.dash ? css("--back") : colour(one.slot), symbol: model.markers[place(one.slot)], size,
    line: { color: colour(one.slot), width: 2 },
  });
  const withHalf = (mean, half) => (half === null ? "" : ` ± ${half.toPrecision(3)}`);

  const plots = {
    headline(panel) {
      const traces = shown(panel).flatMap((one) => [
        { x: one.x.bytes, y: one.y.score, mode: "lines", line: { ...line(one, 1.2) }, opacity: 0.4, hoverinfo: "skip", name: one.label },
        { x: [one.sent], y: [one.score[0]], customdata: [one.sent], mode: "markers", marker: marker(one, 11), name: one.label,
          error_y: { type: "data", array: [one.score[1] ?? 0], color: colour(one.slot), thickness: 1.8, width: 6 },
          hovertemplate: `<b>${one.label}</b><br>${panel.metric} %{y:.2f}${withHalf(one.score[0], one.score[1])}`
            + `<br>%{customdata:,.0f} bytes sent<br>seeds: ${one.score[2]}<extra></extra>` },
      ]);
      const base = log(layout("bytes sent per node, whole run", panel.metric, {}), "xaxis");
      if (panel.range) base.yaxis.range = panel.range;
      return [traces, base];
    },
    curve(panel) {
      const name = chosen.y === "score" ? panel.metric : AXES.y[chosen.y];
      const traces = shown(panel).filter((one) => one.y[chosen.y]).flatMap((one) => {
        const x = one.x[chosen.x], y = one.y[chosen.y], half = one.half[chosen.y], found = [];
        if (half.some((h) => h)) {
          const [least, most] = panel.metric === "accuracy" && chosen.y === "score" ? [0, 100] : [-Infinity, Infinity];
          const edge = (sign) => y.map((v, i) => Math.min(most, Math.max(least, v + sign * (half[i] ?? 0))));
          const up = edge(1), down = edge(-1);
          found.push({ x: [...x, ...[...x].reverse()], y: [...up, ...down.reverse()], fill: "toself", mode: "lines",
            line: { width: 0 }, fillcolor: faint(colour(one.slot), 0.14), hoverinfo: "skip", name: one.label });
        }
        found.push({ x, y, mode: "lines+markers", line: line(one), marker: { ...marker(one, 5), line: { color: colour(one.slot), width: 1 } },
          name: one.label, customdata: half.map((h, i) => withHalf(y[i], h)),
          hovertemplate: `<b>${one.label}</b><br>${name} %{y:.4~g}%{customdata}<br>${AXES.x[chosen.x]} %{x:,.4~s}<extra></extra>` });
        return found;
      });
      const base = layout(AXES.x[chosen.x], name, {});
      return [traces, chosen.x === "bytes" ? log(base, "xaxis") : base];
    },
    ledger(panel) {
      const traces = shown(panel).flatMap((one) => [["sent", 1, 2.2], ["received", 0.55, 1.3]].map(([way, opacity, width]) => ({
        x: one.x.round, y: one[`${way}_per_round`], mode: way === "sent" ? "lines" : "lines+markers", line: line(one, width), opacity,
        marker: { symbol: "circle-open", size: 4, color: colour(one.slot) }, name: `${one.label}, ${way}`,
        hovertemplate: `<b>${one.label}, ${way}</b><br>%{y:,.0f} bytes a round<br>round %{x}<extra></extra>`,
      })));
      return [traces, log(layout("round", "bytes a round", {}), "yaxis")];
    },
    residual: (panel) => simple(panel, "residual", "norm of the residual"),
    density(panel) {
      const [traces, base] = simple(panel, "density", "density");
      return [traces, log(base, "yaxis")];
    },
    time(panel) {
      const series = shown(panel).filter((one) => Object.keys(one.spent).length);
      const stages = series.length ? Object.keys(series[0].spent) : [];
      const labels = series.map((one) => one.label.replace(/, /g, ",<br>")).reverse();
      const traces = stages.map((stage, i) => ({
        type: "bar", orientation: "h", y: labels, x: series.map((one) => one.spent[stage]).reverse(), name: stage,
        marker: { color: colour([1, 3, 2, 5][i]), pattern: { shape: ["", "/", ".", "x"][i], fgcolor: css("--back"), fillmode: "overlay", size: 6, solidity: 0.2 } },
        hovertemplate: `%{y}<br><b>${stage}</b> %{x:.3~g} ms<extra></extra>`,
      }));
      const base = layout("milliseconds", "", { barmode: "stack", showlegend: true, legend: { orientation: "h", traceorder: "normal", yref: "container", y: 0, yanchor: "bottom" } });
      base.margin.b = 84;
      return [traces, base];
    },
  };
  function simple(panel, name, title) {
    const traces = shown(panel).map((one) => ({
      x: one.x.round, y: one[name], mode: "lines", line: line(one), name: one.label,
      hovertemplate: `<b>${one.label}</b><br>${title} %{y:.4~g}<br>round %{x}<extra></extra>`,
    }));
    return [traces, layout("round", title, {})];
  }
  function chart(spec) {
    const traces = spec.series.map((one, i) => ({
      x: spec.kind === "bars" ? one.x.map((place) => String(place).replace(/, /g, "<br>")) : one.x, y: one.y, name: one.label, ...(spec.kind === "bars"
        ? { type: "bar", marker: { color: colour(one.slot ?? i) } }
        : { mode: "lines+markers", line: { color: colour(one.slot ?? i), dash: DASHES[i % 4] }, marker: { symbol: model.markers[i % 8], size: 8 } }),
      hovertemplate: `<b>${one.label}</b><br>%{x}<br>${spec.y} %{y:.4~g}<extra></extra>`,
    }));
    const legend = { orientation: "h", yref: "container", y: 0, yanchor: "bottom" };
    let base = layout(spec.x, spec.y, { showlegend: true, legend });
    base.margin.b = 96;
    if (spec.kind === "bars") base.xaxis.type = "category";
    else if (spec.log_x) base = log(base, "xaxis");
    return [traces, spec.log_y ? log(base, "yaxis") : base];
  }

  function draw(figure) {
    const [traces, base] = figure.dataset.chart !== undefined
      ? chart(model.charts[+figure.dataset.chart])
      : plots[figure.dataset.plot](model.panels[+figure.dataset.panel]);
    return Plotly.react(figure.querySelector(".plot"), traces, base,
      { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d", "sendChartToCloud"] });
  }
  function drawAll(which = "figure") {
    const figures = [...document.querySelectorAll(which)];
    for (const figure of figures) figure.classList.add("drawn");  // all have their places before one is drawn
    return Promise.all(figures.map(draw));
  }

  function key(one) {  // the line and the marker of a series, as in the plots
    const stroke = `stroke="${colour(one.slot)}" stroke-width="2"`;
    return `<svg width="26" height="12" aria-hidden="true"><path d="M0 6H26" ${stroke} stroke-dasharray="${STROKES[one.dash % 4]}"/>`
      + `<circle cx="13" cy="6" r="3.5" ${stroke} fill="${one.dash ? css("--back") : colour(one.slot)}"/></svg>`;
  }
  function fieldset(title, inputs) {
    const set = document.createElement("fieldset");
    const legend = document.createElement("legend");
    legend.textContent = title;
    set.append(legend, ...inputs);
    return set;
  }
  function input(type, name, value, text, checked, onChange, before = "") {
    const label = document.createElement("label");
    const box = Object.assign(document.createElement("input"), { type, name, value, checked });
    box.addEventListener("change", onChange);
    const symbol = document.createElement("span");
    symbol.innerHTML = before;
    label.append(box, " ", symbol, " ", text);
    return label;
  }
  function controls() {
    const place = document.getElementById("controls");
    if (!place || !model.panels.some((panel) => panel.series.length)) return;
    const labels = new Map(model.panels.flatMap((panel) => panel.series).map((one) => [one.label, one]));
    const active = document.activeElement, kept = place.contains(active) ? [active.name, active.value] : null;
    place.replaceChildren(
      fieldset("Methods", [...labels].map(([label, one]) => input("checkbox", "method", label, label, !chosen.hidden.has(label), (event) => {
        event.target.checked ? chosen.hidden.delete(label) : chosen.hidden.add(label);
        drawAll("figure[data-plot]");
      }, key(one)))),
      ...["x", "y"].map((way) => fieldset(way === "x" ? "Curves by" : "Show", Object.entries(AXES[way])
        .filter(([name]) => way === "x" || model.panels.some((panel) => panel.series.some((one) => one.y[name])))
        .map(([name, text]) => input("radio", `axis-${way}`, name, name === "score" ? model.panels.find((p) => p.metric).metric : text, chosen[way] === name, () => {
          chosen[way] = name;
          drawAll('figure[data-plot="curve"]');
        })))),
    );
    place.hidden = false;
    if (kept) [...place.querySelectorAll("input")].find((box) => box.name === kept[0] && box.value === kept[1])?.focus();
  }

  let version = null;
  async function poll() {
    const status = document.getElementById("status");
    try {
      const answer = await fetch(`live.json?seen=${version ?? ""}`, { cache: "no-store" });
      const news = answer.status === 204 ? null : await answer.json();
      if (news && news.error) throw new Error(news.error);
      if (news) {
        if (news.frame !== model.frame) return location.reload();
        version = news.version;
        model = { ...model, ...news.model };
        for (const part of document.querySelectorAll("[data-part]")) {
          const html = news.parts[part.dataset.part];
          if (html !== undefined && part.dataset.seen !== html) {
            part.innerHTML = html;
            part.dataset.seen = html;
          }
        }
        await drawAll();
      }
      status.textContent = news?.going === 0 || status.dataset.done ? (status.dataset.done = "All runs are at their end.") : `Live, looked at ${new Date().toLocaleTimeString()}.`;
      if (news && news.going) delete status.dataset.done;
    } catch (error) {
      status.textContent = error instanceof TypeError ? "The server has stopped; this is the last state." : `Cannot read the run: ${error.message}`;
    }
    setTimeout(poll, 1500);
  }

  controls();
  drawAll().then(() => { document.documentElement.dataset.ready = "yes"; });
  for (const query of [window.matchMedia("(prefers-color-scheme: dark)"), compact])
    query.addEventListener("change", () => { controls(); drawAll(); });
  if (model.live) poll();
})();
