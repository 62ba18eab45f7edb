"use strict";
// The page of a pool: asks the server for what is visible, and puts every text into the page as text, never as HTML.

const $ = (id) => document.getElementById(id);
const COLOURS = ["#2f6fde", "#d9822b", "#3f9d63", "#b64fc8", "#cf3a3a", "#1f9aa8", "#8a7a2b", "#7a6ff0"];
const FAILED = new Set(["error", "crashed", "timeout", "lost", "failed"]);
const state = { summary: null, tab: "calls", start: 0, end: 0, follow: true, whole: true, call: "", hits: [], drag: null };

const given = document.body.dataset.key;
let key = given || "";
try {
  if (given) { sessionStorage.setItem("skyward-key", given); } else { key = sessionStorage.getItem("skyward-key") || ""; }
} catch { /* a frame without storage: a reload needs a new address */ }
if (given) history.replaceState(null, "", location.pathname);

async function ask(path, query = {}) {
  const words = new URLSearchParams({ ...query, key });
  const answer = await fetch(`data/${path}?${words}`);
  if (!answer.ok) throw new Error((await answer.text()).trim() || `status ${answer.status}`);
  return answer.json();
}

function problem(text) { $("problem").textContent = text; $("problem").hidden = !text; }

function make(kind, text = "", css = "") {
  const made = document.createElement(kind);
  if (text !== "") made.textContent = text;
  if (css) made.className = css;
  return made;
}

function drawing(kind, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60);
  return hours ? `${hours} h ${String(minutes).padStart(2, "0")} min` : `${minutes} min ${String(whole % 60).padStart(2, "0")} s`;
}

function bytes(count) {
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (count < 1000 || unit === "TB") return `${count < 10 && unit !== "B" ? count.toFixed(1) : Math.round(count)} ${unit}`;
    count /= 1000;
  }
}

const clock = (time) => new Date(time * 1000).toLocaleTimeString([], { hour12: false });
const dollars = (value) => value === null ? "not known" : `$${value < 1 ? value.toFixed(3) : value.toFixed(2)}`;
const number = (value) => value.toLocaleString("en-US");

// the top

function showSummary(summary) {
  const first = state.summary === null;
  state.summary = summary;
  document.title = `${summary.pool} · Skyward`;
  $("pool").textContent = summary.pool;
  $("state").textContent = summary.state;
  $("state").className = `badge ${summary.state}`;
  const figures = [["nodes", `${summary.up} of ${summary.nodes} up`], ["provider", summary.provider],
    ["running", number(summary.running)], ["done", number(summary.done)], ["failed", number(summary.failed)],
    ["calls/s", summary.rate.toFixed(summary.rate < 10 ? 1 : 0)], ["time", duration(summary.now - summary.began)]];
  if (summary.cost !== null) figures.push(["cost so far", `${dollars(summary.cost)} (${dollars(summary.hourly)}/h)`]);
  $("figures").replaceChildren(...figures.map(([name, value]) => {
    const row = make("div");
    row.append(make("dt", name), make("dd", value, name === "failed" && summary.failed ? "bad" : ""));
    return row;
  }));
  $("groups").replaceChildren(...summary.groups.filter((g) => !g.over || summary.state === "open").slice(-3).map((g) => {
    const row = make("div", "", "group"), bar = make("progress");
    if (g.total !== null) { bar.max = g.total; bar.value = g.done + g.failed; }
    const complete = g.total !== null && g.done + g.failed >= g.total;
    const left = complete ? "done" : g.over ? "stopped" : g.left === null ? "" : `${duration(g.left)} left`;
    const of = g.total === null ? "done" : `of ${number(g.total)}${g.failed ? `, ${number(g.failed)} failed` : ""}`;
    row.append(make("span", g.name), bar, make("span", `${number(g.done)} ${of}  ${g.rate < 10 ? g.rate.toFixed(1) : number(Math.round(g.rate))}/s  ${left}`));
    return row;
  }));
  if (first) { fillNodes(summary.nodes); }
  if (state.follow) {
    const width = state.whole ? summary.now - summary.began : state.end - state.start;
    state.end = Math.max(summary.now, summary.began + 0.5);
    state.start = state.end - Math.max(width, 0.5);
  }
}

function fillNodes(count) {
  for (const id of ["calls-node", "output-node"]) {
    for (let node = $(id).options.length - 1; node < count; node++) {
      const option = make("option", `node ${node}`);
      option.value = String(node);
      $(id).append(option);
    }
  }
}

// nodes

function curve(points, top, low = 0) {
  const svg = drawing("svg", { class: "line", viewBox: "0 0 100 22", preserveAspectRatio: "none" });
  if (points.length > 1) {
    const [start, end] = [points[0][0], points[points.length - 1][0]], span = Math.max(end - start, 1e-9);
    const step = points.map(([at, value]) =>
      `${((at - start) / span * 100).toFixed(2)},${(21 - (value - low) / Math.max(top - low, 1e-9) * 20).toFixed(2)}`);
    svg.append(drawing("path", { d: `M${step.join("L")}` }));
  }
  return svg;
}

function figure(name, points, text, top) {
  const row = make("div", "", "curve");
  row.append(make("span", `${name} ${points.length ? text(points[points.length - 1][1]) : ""}`));
  row.append(curve(points, Math.max(top, ...points.map((point) => point[1]))));
  return row;
}

function showNodes(nodes) {
  fillNodes(nodes.length);
  $("nodes").replaceChildren(...nodes.map((node) => {
    const card = make("div", "", "node"), title = make("h3");
    title.append(make("span", `node ${node.node}`), make("span", node.state, node.state));
    const counts = `${node.running} running, ${number(node.done)} done${node.failed ? `, ${number(node.failed)} failed` : ""}`;
    card.append(title, make("small", counts));
    if (node.cpu.length) card.append(figure("CPU", node.cpu, (v) => `${Math.round(v)} %`, 100));
    if (node.memory.length) card.append(figure("memory", node.memory, bytes, 1));
    for (const gpu of node.gpus) {
      card.append(figure(`GPU ${gpu.index}`, gpu.use, (v) => `${Math.round(v)} %`, 100));
      card.append(figure("", gpu.memory, bytes, 1));
    }
    return card;
  }));
}

// calls over time

const LABEL = 62, ROW = 13, GAP = 5;

function showLanes(lanes) {
  const canvas = $("lanes"), style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(name).trim();
  const width = canvas.parentElement.clientWidth - 2;
  const height = lanes.reduce((sum, lane) => sum + lane.rows * ROW + GAP, 24);
  const scale = Math.min(window.devicePixelRatio || 1, 2);
  const tall = Math.min(height, 16000);
  canvas.style.width = `${width}px`; canvas.style.height = `${tall}px`;
  canvas.width = width * scale; canvas.height = tall * scale;
  const draw = canvas.getContext("2d");
  draw.scale(scale, scale);
  draw.font = "11px system-ui, sans-serif";
  draw.textBaseline = "middle";
  const room = Math.max(width - LABEL, 10), span = state.end - state.start, x = (time) => LABEL + (time - state.start) / span * room;
  draw.fillStyle = colour("--faint");
  const step = ticks(span, room);
  for (let at = Math.ceil((state.start - state.summary.began) / step) * step; at <= state.end - state.summary.began; at += step) {
    const where = x(at + state.summary.began);
    if (where < LABEL) continue;
    draw.fillStyle = colour("--line"); draw.fillRect(where, 18, 1, tall);
    draw.fillStyle = colour("--faint"); draw.fillText(at === 0 ? "0" : duration(at), where + 3, 9);
  }
  state.hits = [];
  let top = 22;
  for (const lane of lanes) {
    draw.fillStyle = colour("--faint");
    draw.fillText(`node ${lane.node}`, 6, top + Math.min(lane.rows * ROW, 30) / 2);
    for (const [row, start, end, count, outcome, name, id] of lane.blocks) {
      const left = Math.max(x(start), LABEL), right = Math.min(x(end), width), y = top + row * ROW;
      if (right < LABEL || left > width) continue;
      const shown = Math.max(right - left, 1.2);
      draw.fillStyle = colour(outcome === "ok" ? "--ok" : outcome === "running" ? "--running" : FAILED.has(outcome) ? "--bad" : "--gone");
      draw.fillRect(left, y, shown, ROW - 2);
      if (shown > 34 && count === 1) {
        draw.save(); draw.beginPath(); draw.rect(left, y, shown - 3, ROW); draw.clip();
        draw.fillStyle = colour("--on"); draw.fillText(name, left + 3, y + ROW / 2 - 0.5); draw.restore();
      }
      state.hits.push([left, y, left + shown, y + ROW - 2, { start, end, count, outcome, name, id, node: lane.node }]);
    }
    top += lane.rows * ROW + GAP;
  }
}

function ticks(span, room) {
  const least = span / (room / 90);
  for (const step of [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400]) {
    if (step >= least) return step;
  }
  return 604800;
}

function hit(event) {
  const box = $("lanes").getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  for (let index = state.hits.length - 1; index >= 0; index--) {
    const [left, top, right, bottom, about] = state.hits[index];
    if (x >= left - 2 && x <= right + 2 && y >= top && y <= bottom) return about;
  }
  return null;
}

function following(on) { state.follow = on; $("follow").setAttribute("aria-pressed", String(on)); }

function watchLanes() {
  const canvas = $("lanes");
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = canvas.getBoundingClientRect(), share = Math.min(Math.max((event.clientX - box.left - LABEL) / (box.width - LABEL), 0), 1);
    const at = state.start + share * (state.end - state.start), factor = Math.exp(Math.sign(event.deltaY) * 0.25);
    zoom(at, factor, share);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => { state.drag = { x: event.clientX, start: state.start, end: state.end, moved: false }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    const drag = state.drag;
    if (drag) {
      const room = canvas.clientWidth - LABEL, shift = (drag.x - event.clientX) / room * (drag.end - drag.start);
      if (Math.abs(event.clientX - drag.x) > 3) drag.moved = true;
      if (drag.moved) { following(false); state.whole = false; state.start = drag.start + shift; state.end = drag.end + shift; soon(); }
      return;
    }
    const about = hit(event), tip = $("tip");
    tip.hidden = !about;
    if (about) {
      tip.textContent = about.count > 1 ? `${number(about.count)} calls of ${about.name}, ${duration(about.end - about.start)} in all` : `${about.name} on node ${about.node}: ${about.outcome}, ${duration(about.end - about.start)}`;
      tip.style.left = `${Math.min(event.clientX + 12, innerWidth - 220)}px`; tip.style.top = `${event.clientY + 14}px`;
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    const moved = state.drag && state.drag.moved, about = moved ? null : hit(event);
    state.drag = null;
    if (about && about.id) { showCall(about.id); } else if (about) { zoom((about.start + about.end) / 2, 0.2, 0.5); }
  });
  canvas.addEventListener("pointerleave", () => { $("tip").hidden = true; });
  canvas.addEventListener("keydown", (event) => {
    const span = state.end - state.start;
    if (event.key === "+" || event.key === "-") { zoom((state.start + state.end) / 2, event.key === "+" ? 0.7 : 1.4, 0.5); }
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const shift = span / 5 * (event.key === "ArrowLeft" ? -1 : 1);
      following(false); state.whole = false; state.start += shift; state.end += shift; soon();
    }
  });
  $("follow").addEventListener("click", () => { following(!state.follow); soon(); });
  $("all").addEventListener("click", () => { following(true); state.whole = true; if (state.summary) showSummary(state.summary); soon(); });
}

function zoom(at, factor, share) {
  const span = Math.min(Math.max((state.end - state.start) * factor, 0.0005), 1e7);
  state.whole = false; following(false);
  state.start = at - share * span; state.end = state.start + span;
  soon();
}

// tabs

const pages = { calls: [], output: [], events: [] };

function callRow(call) {
  const row = make("tr", "", "pick"), name = make("td");
  name.append(make("code", `${call.name}(${call.arguments})`));
  if (call.why) name.append(document.createElement("br"), make("span", call.why, "error"));
  const outcome = call.attempt ? `${call.outcome} (attempt ${call.attempt + 1})` : call.outcome;
  row.append(name, make("td", call.node < 0 ? "" : call.node), make("td", clock(call.began)), make("td", duration(call.seconds)), make("td", outcome === "ok" ? "done" : outcome, call.outcome));
  row.tabIndex = 0;
  row.addEventListener("click", () => showCall(call.id));
  row.addEventListener("keydown", (event) => { if (event.key === "Enter") showCall(call.id); });
  return row;
}

function outputLine(line) {
  const row = make("div", "", line.stream);
  row.append(make("b", `${clock(line.time)} node ${line.node}  `), document.createTextNode(line.text));
  return row;
}

function eventRow(event) {
  const row = make("tr");
  row.append(make("td", clock(event.time)), make("td", event.node === null ? "" : `node ${event.node}`, "faint"), make("td", event.text, event.kind));
  return row;
}

const kinds = {
  calls: { row: callRow, query: () => ({ text: $("calls-text").value, node: $("calls-node").value, outcome: $("calls-outcome").value }) },
  output: { row: outputLine, query: () => ({ text: $("output-text").value, node: $("output-node").value, call: state.call }) },
  events: { row: eventRow, query: () => ({}) },
};

async function showList(kind, older = false) {
  const { row, query } = kinds[kind], known = pages[kind], words = { ...query(), limit: 200 };
  if (older && known.length) words.before = known[known.length - 1].number;
  const found = await ask(kind, words);
  pages[kind] = older ? [...known, ...found] : found;
  const list = $(kind), at = list.closest(".scroll").scrollTop;
  if (!older && at > 40) return; // somebody reads further down: nothing moves under their eyes
  if (!older) list.replaceChildren();
  list.append(...found.map(row));
  if (!pages[kind].length) list.replaceChildren(make(kind === "output" ? "div" : "tr", "nothing so far", "faint"));
  $(`${kind}-more`).hidden = found.length < 200;
}

async function showMetrics() {
  const found = await ask("metrics"), names = [...new Set(found.map((series) => series.name))];
  if (!names.length) { $("metrics").replaceChildren(make("p", "Nothing so far. A body reports with sky.progress(step, total, loss=0.3).", "faint")); return; }
  $("metrics").replaceChildren(...names.map((name) => {
    const card = make("div", "", "metric"), series = found.filter((each) => each.name === name && each.points.length), title = make("h3");
    const points = series.flatMap((each) => each.points);
    const [left, right] = [Math.min(...points.map((p) => p[0])), Math.max(...points.map((p) => p[0]))];
    const [low, high] = [Math.min(...points.map((p) => p[1])), Math.max(...points.map((p) => p[1]))];
    const svg = drawing("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none" });
    series.forEach((each, index) => {
      const step = each.points.map(([at, value]) => `${((at - left) / Math.max(right - left, 1e-9) * 100).toFixed(2)},${(97 - (value - low) / Math.max(high - low, 1e-9) * 94).toFixed(2)}`);
      svg.append(drawing("path", { d: `M${step.join("L")}${step.length === 1 ? "h1" : ""}`, stroke: COLOURS[index % COLOURS.length] }));
    });
    title.append(make("span", name), make("span", `${low.toPrecision(4)} to ${high.toPrecision(4)}`, "faint"));
    card.append(title, svg, make("span", series.length > 1 ? `${series.length} calls, step ${left} to ${right}` : `step ${left} to ${right}`, "faint"));
    return card;
  }));
}

async function showCall(id) {
  const call = await ask("call", { id }), panel = $("details");
  if (!call) return;
  const title = make("h2"), close = make("button", "Close");
  title.append(make("span", call.name), close);
  close.addEventListener("click", () => { panel.hidden = true; });
  const facts = make("dl"), told = [["outcome", call.outcome], ["node", call.node], ["rank", call.rank === null ? "" : call.rank], ["began", clock(call.began)], ["took", duration(call.seconds)], ["attempt", call.attempt + 1], ["id", call.id]];
  facts.append(...told.map(([name, value]) => { const row = make("div"); row.append(make("dt", name), make("dd", String(value))); return row; }));
  panel.replaceChildren(title, facts, make("h3", "Arguments"), make("pre", call.arguments || "none"));
  if (call.error) panel.append(make("h3", "Error"), make("pre", call.error, "error"));
  const lines = call.output.slice().reverse().map((line) => line.text).reverse().join("\n");
  panel.append(make("h3", "Output"), make("pre", lines || "none"));
  const search = make("button", "Search its output");
  search.addEventListener("click", () => { state.call = call.id; $("output-call").textContent = `only call ${call.id}`; $("output-call").hidden = false; panel.hidden = true; openTab("output"); });
  panel.append(search);
  panel.hidden = false;
  close.focus();
}

function openTab(name) {
  state.tab = name;
  for (const tab of document.querySelectorAll("[role=tab]")) tab.setAttribute("aria-selected", String(tab.dataset.tab === name));
  for (const section of document.querySelectorAll(".tab")) section.hidden = section.id !== `tab-${name}`;
  soon();
}

// one look at a time, never two at once

let busy = false, again = false, planned = 0;

function soon() { if (!planned) planned = requestAnimationFrame(() => { planned = 0; look(); }); }

async function look() {
  if (busy) { again = true; return; }
  if (!state.summary || document.hidden) return;
  busy = true;
  try {
    const width = Math.max($("lanes").parentElement.clientWidth, 100);
    const [lanes, nodes] = await Promise.all([
      ask("lanes", { start: state.start, end: state.end, width }),
      ask("nodes", { since: Math.max(0, state.summary.now - 600) }),
    ]);
    showLanes(lanes);
    showNodes(nodes);
    await (state.tab === "metrics" ? showMetrics() : showList(state.tab));
  } catch (error) {
    problem(error.message);
  } finally {
    busy = false;
    if (again) { again = false; soon(); }
  }
}

function live() {
  const source = new EventSource(`data/live?${new URLSearchParams({ key })}`);
  let seen = -1;
  source.onmessage = (event) => {
    problem("");
    const summary = JSON.parse(event.data);
    showSummary(summary);
    if (summary.revision !== seen || summary.running) { seen = summary.revision; look(); }
  };
  source.addEventListener("end", () => { source.close(); problem("The program that showed this page has ended it. What you see is its last state; `sky view` shows it again."); });
  source.onerror = () => { if (source.readyState !== EventSource.OPEN) problem("The program that shows this page does not answer. It has ended, or the connection is broken; it is tried again."); };
}

for (const tab of document.querySelectorAll("[role=tab]")) tab.addEventListener("click", () => { state.call = ""; $("output-call").hidden = true; openTab(tab.dataset.tab); });
for (const id of ["calls-text", "calls-outcome", "calls-node", "output-text", "output-node"]) {
  $(id).addEventListener("input", () => { $(id.split("-")[0]).closest(".scroll").scrollTop = 0; soon(); });
}
for (const kind of ["calls", "output", "events"]) $(`${kind}-more`).addEventListener("click", () => showList(kind, true));
document.addEventListener("keydown", (event) => { if (event.key === "Escape") $("details").hidden = true; });
document.addEventListener("visibilitychange", soon);
addEventListener("resize", soon);
watchLanes();
if (key) {
  ask("summary").then((summary) => { showSummary(summary); live(); look(); }).catch((error) => problem(error.message));
} else {
  problem("This tab has no key. Open the address that pool.view() or `sky view` prints.");
}
