"use strict";
// What bodies report: one card for each name, with a curve for each call. The curve under the pointer is named.

const FEW = 8;
const metricsShown = { large: new Set(), all: new Set(), highest: new Set(), pointed: null };

function labels(series) {
  const several = (of) => new Set(series.map(of)).size, parts = [];
  const brief = (text) => text.replace(/\d*\.\d{5,}(e[+-]?\d+)?/gi, (digits) => short(Number(digits)));
  if (several((s) => s.arguments) > 1) parts.push((s) => `(${brief(s.arguments)})`);
  if (several((s) => s.arguments) < series.length) {
    if (several((s) => s.rank) > 1) parts.push((s) => `rank ${s.rank}`);
    else if (several((s) => s.node) > 1) parts.push((s) => `node ${s.node}`);
  }
  return series.map((s) => parts.length ? parts.map((part) => part(s)).join(" ") : s.function || `node ${s.node}`);
}

function toggle(text, known, name, more = {}) {
  const button = make("button", text, "link");
  button.setAttribute("aria-pressed", String(known.has(name)));
  if (more.label) button.setAttribute("aria-label", more.label);
  button.addEventListener("click", () => { if (!known.delete(name)) known.add(name); for (const card of $("metrics").children) card.row = ""; showMetrics().catch((error) => problem(error.message)); });
  return button;
}

const lastOf = (each) => each.points[each.points.length - 1][1];

function metricCard([name, series]) {
  const card = make("div", "", "metric"), points = series.flatMap((each) => each.points), by = series[0].by, id = `${by} ${name}`;
  const range = (place) => points.reduce(([low, high], point) => [Math.min(low, point[place]), Math.max(high, point[place])], [Infinity, -Infinity]);
  const [left, right] = range(0), [low, high] = by === "time" ? [0, 100] : range(1), unit = by === "time" ? " %" : "";
  const across = (at) => by === "time" ? duration(Math.max(0, at)) : `step ${short(at)}`, named = labels(series);
  const svg = drawing("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": name });
  const x = (at) => (at - left) / Math.max(right - left, 1e-9) * 100, y = (value) => 97 - (value - low) / Math.max(high - low, 1e-9) * 94;
  for (const at of [25, 50, 75]) svg.append(drawing("path", { d: `M0,${at}H100`, class: "grid" }));
  const paths = series.map((each, index) => {
    const step = each.points.map(([at, value]) => `${x(at).toFixed(2)},${y(value).toFixed(2)}`);
    const path = drawing("path", { d: `M${step.join("L")}${step.length === 1 ? "h1.5" : ""}`, stroke: COLOURS[index % COLOURS.length] });
    svg.append(path);
    return path;
  });
  const title = make("h3"), now = make("b", "", "now"), lasts = series.map(lastOf);
  const values = lasts.length === 1 ? `last ${short(lasts[0])}${unit}` : `${number(series.length)}${series[0].of > series.length ? ` of ${number(series[0].of)}` : ""} curves, last ${short(Math.min(...lasts))} to ${short(Math.max(...lasts))}${unit}`;
  const large = metricsShown.large.has(id), grow = toggle(large ? "smaller" : "larger", metricsShown.large, id, { label: `Show ${name} ${large ? "smaller" : "larger"}` });
  title.append(make("span", by === "time" ? "progress of calls over time" : name), grow, now);
  if (large) card.classList.add("large");
  const plot = make("div", "", "plot"), scale = make("div", "", "scale"), below = make("div", "", "below"), read = make("p", "", "read");
  scale.append(make("span", `${short(high)}${unit}`), make("span", `${short(low)}${unit}`));
  below.append(make("span", across(left)), make("span", right > left ? across(right) : ""));
  // the curve that is nearest to the pointer, in pixels
  function nearest(at, px, py, box) {
    let best = null;
    series.forEach((each, index) => {
      const { points: own } = each;
      let place = own.findIndex((point) => point[0] >= at);
      if (place < 0) place = own.length - 1;
      const [a, b] = [own[Math.max(0, place - 1)], own[place]], share = b[0] > a[0] ? Math.min(Math.max((at - a[0]) / (b[0] - a[0]), 0), 1) : 1;
      const spot = [a[0] + share * (b[0] - a[0]), a[1] + share * (b[1] - a[1])];
      const away = Math.hypot(x(spot[0]) / 100 * box.width - px, y(spot[1]) / 100 * box.height - py);
      if (!best || away < best.away) best = { away, index, point: Math.abs(at - a[0]) < Math.abs(at - b[0]) ? a : b };
    });
    return best;
  }
  function mark(index, point = null) {
    const each = series[index];
    paths.forEach((path, other) => path.classList.toggle("dim", series.length > 1 && other !== index));
    svg.append(paths[index]);
    now.textContent = `last ${short(lasts[index])}${unit}`;
    read.textContent = `${each.function ? `${each.function}(${each.arguments})` : named[index]} on node ${each.node}${point ? `, ${across(point[0])}: ${short(point[1])}${unit}` : ""}`;
  }
  function clear() { for (const path of paths) path.classList.remove("dim"); now.textContent = values; read.textContent = ""; }
  function point(event) {
    const box = svg.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    const best = nearest(left + px / box.width * (right - left), px, py, box);
    mark(best.index, best.point);
    return series[best.index];
  }
  svg.addEventListener("pointermove", (event) => { metricsShown.pointed = [id, { clientX: event.clientX, clientY: event.clientY }]; point(event); });
  svg.addEventListener("pointerleave", () => { metricsShown.pointed = null; clear(); });
  svg.addEventListener("click", (event) => { const each = point(event); if (each.call) showCall(each.call); });
  plot.append(scale, svg);
  const legend = make("div", "", "keys"), all = metricsShown.all.has(id), highest = metricsShown.highest.has(id);
  const ranked = series.map((_, index) => index).sort((a, b) => highest ? lasts[b] - lasts[a] : lasts[a] - lasts[b]);
  ranked.slice(0, all ? series.length : FEW).forEach((index) => {
    const each = series[index], entry = make("button", named[index]);
    entry.prepend(drawing("svg", { viewBox: "0 0 8 8", class: "dot" }));
    entry.firstChild.append(drawing("circle", { cx: 4, cy: 4, r: 4, fill: COLOURS[index % COLOURS.length] }));
    entry.append(make("b", ` ${short(lasts[index])}${unit}`));
    entry.addEventListener("pointerenter", () => mark(index));
    entry.addEventListener("pointerleave", clear);
    if (each.call) entry.addEventListener("click", () => showCall(each.call));
    legend.append(entry);
  });
  if (series.length > 1) legend.append(toggle(highest ? "lowest first" : "highest first", metricsShown.highest, id));
  if (series.length > FEW) legend.append(toggle(all ? "fewer" : `and ${series.length - FEW} more`, metricsShown.all, id));
  clear();
  card.append(title, plot, below, read, legend);
  card.point = point;
  return card;
}

async function showMetrics() {
  const found = (await ask("metrics")).filter((each) => each.points.length), byName = new Map();
  for (const each of found) {
    const name = `${each.by} ${each.name}`;
    if (!byName.has(name)) byName.set(name, [each.name, []]);
    byName.get(name)[1].push(each);
  }
  $("no-metrics").hidden = byName.size > 0;
  update($("metrics"), [...byName.values()], ([name, series]) => `${series[0].by} ${name}`, metricCard);
  const [id, event] = metricsShown.pointed || [];
  const under = id && [...$("metrics").children].find((card) => card.dataset.row === id);
  if (under) under.point(event); // it may be a new card
}
