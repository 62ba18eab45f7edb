"use strict";
// What bodies report: one card for each name, with a curve for each call.

function labels(series) {
  const several = (of) => new Set(series.map(of)).size > 1, parts = [];
  if (several((s) => s.arguments)) parts.push((s) => `(${s.arguments})`);
  if (several((s) => s.rank)) parts.push((s) => `rank ${s.rank}`);
  else if (several((s) => s.node)) parts.push((s) => `node ${s.node}`);
  return series.map((s) => parts.length ? parts.map((part) => part(s)).join(" ") : s.function || `node ${s.node}`);
}

function metricCard([name, series]) {
  const card = make("div", "", "metric"), points = series.flatMap((each) => each.points), by = series[0].by;
  const range = (place) => points.reduce(([low, high], point) => [Math.min(low, point[place]), Math.max(high, point[place])], [Infinity, -Infinity]);
  const [left, right] = range(0), [low, high] = by === "time" ? [0, 100] : range(1), unit = by === "time" ? " %" : "";
  const across = (at) => by === "time" ? duration(Math.max(0, at)) : `step ${short(at)}`, named = labels(series);
  const svg = drawing("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": name });
  const x = (at) => (at - left) / Math.max(right - left, 1e-9) * 100, y = (value) => 97 - (value - low) / Math.max(high - low, 1e-9) * 94;
  for (const at of [25, 50, 75]) svg.append(drawing("path", { d: `M0,${at}H100`, class: "grid" }));
  series.forEach((each, index) => {
    const step = each.points.map(([at, value]) => `${x(at).toFixed(2)},${y(value).toFixed(2)}`);
    svg.append(drawing("path", { d: `M${step.join("L")}${step.length === 1 ? "h1.5" : ""}`, stroke: COLOURS[index % COLOURS.length] }));
  });
  const plot = make("div", "", "plot"), scale = make("div", "", "scale"), below = make("div", "", "below"), read = make("span", "", "read");
  scale.append(make("span", `${short(high)}${unit}`), make("span", `${short(low)}${unit}`));
  below.append(make("span", across(left)), read, make("span", right > left ? across(right) : ""));
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), at = left + (event.clientX - box.left) / box.width * (right - left);
    const near = series.slice(0, 3).map((each, index) => {
      const best = each.points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a);
      return `${series.length > 1 ? `${named[index]}: ` : ""}${short(best[1])}${unit}`;
    });
    read.textContent = `${across(at)}: ${near.join(", ")}`;
  });
  svg.addEventListener("pointerleave", () => { read.textContent = ""; });
  plot.append(scale, svg);
  const legend = make("div", "", "keys");
  series.slice(0, 8).forEach((each, index) => {
    const entry = make("button", named[index]), last = each.points[each.points.length - 1];
    entry.prepend(drawing("svg", { viewBox: "0 0 8 8", class: "dot" }));
    entry.firstChild.append(drawing("circle", { cx: 4, cy: 4, r: 4, fill: COLOURS[index % COLOURS.length] }));
    entry.append(make("b", ` ${short(last[1])}${unit}`));
    if (each.call) entry.addEventListener("click", () => showCall(each.call));
    legend.append(entry);
  });
  if (series.length > 8) legend.append(make("span", `and ${series.length - 8} more`, "faint"));
  card.append(make("h3", by === "time" ? "progress of calls over time" : name), plot, below, legend);
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
}
