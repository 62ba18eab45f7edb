"use strict";
// The page of a pool: what stands at its top, its tabs, and how it stays up to date.

function showSummary(summary) {
  const first = state.summary === null;
  document.body.classList.remove("stale");
  state.summary = summary;
  document.title = `${summary.pool} · Skyward`;
  write($("pool"), summary.pool);
  write($("state"), summary.state);
  $("state").className = `badge ${summary.state}`;
  const ended = over();
  const figures = [["nodes", ended ? number(summary.nodes) : `${summary.up} of ${summary.nodes} up`], ["provider", summary.provider]];
  if (!ended) figures.push(["running", number(summary.running)], ["waiting", number(summary.waiting)]);
  figures.push(["done", number(summary.done)], ["failed", number(summary.failed)]);
  if (summary.cancelled) figures.push(["cancelled", number(summary.cancelled)]);
  if (!ended) figures.push(["calls/s", summary.rate.toFixed(summary.rate < 10 ? 1 : 0)]);
  figures.push(["time", duration(Math.max(0, summary.now - summary.began))]);
  if (summary.unpriced) { figures.push(["cost so far", "not known"]); } else if (summary.cost !== null) {
    figures.push([ended ? "cost" : "cost so far", dollars(summary.cost)]);
    if (!ended) figures.push(["at this rate", `${dollars(summary.hourly)} an hour`]);
  }
  update($("figures"), figures, ([name]) => name, ([name, value]) => {
    const row = make("div");
    row.append(make("dt", name), make("dd", value, name === "failed" && summary.failed ? "bad" : ""));
    return row;
  });
  const note = summary.read < 1 ? `Reading the history: ${Math.round(summary.read * 100)} %.` : summary.state === "killed"
    ? "The program of this pool has ended without closing it. This is its last state."
    : summary.skipped ? `The history of this pool is full: ${number(summary.skipped)} events are counted, but not shown.` : "";
  write($("note"), note);
  $("note").hidden = !note;
  $("groups").replaceChildren(...summary.groups.filter((g) => !g.over || summary.state === "open").slice(-3).map((g) => {
    const row = make("div", "", "group"), bar = make("progress");
    if (g.total !== null) { bar.max = g.total; bar.value = g.done + g.failed; }
    const complete = g.total !== null && g.done + g.failed >= g.total, failed = g.failed ? ` (${number(g.failed)} failed)` : "";
    const left = complete ? "done" : g.over ? "stopped" : g.left === null ? "" : `${duration(g.left)} left`;
    const of = g.total === null ? "done" : `of ${number(g.total)}`;
    row.append(make("span", g.name), bar, make("span", [`${number(g.done + g.failed)} ${of}${failed}`, `${g.rate < 10 ? g.rate.toFixed(1) : number(Math.round(g.rate))}/s`, left].filter(Boolean).join(" · ")));
    return row;
  }));
  if (first) fillNodes(summary.nodes);
  if (state.follow) {
    const width = state.whole ? summary.now - summary.began : state.end - state.start;
    state.end = Math.max(summary.now, summary.began + 0.5);
    state.start = state.end - Math.max(width, 0.5);
  }
}

function openTab(name) {
  state.tab = name;
  for (const tab of document.querySelectorAll("[role=tab]")) tab.setAttribute("aria-selected", String(tab.dataset.tab === name));
  for (const section of document.querySelectorAll(".tab")) section.hidden = section.id !== `tab-${name}`;
  if (pages[name]) { pages[name] = []; $(name).replaceChildren(); }
  soon();
}

// one look at a time, never two at once

let busy = false, again = false, planned = 0;

function soon() { if (!planned) planned = requestAnimationFrame(() => { planned = 0; drawLanes(); look(); }); }

async function look(last = false) {
  if (busy) { again = true; return; }
  if (!state.summary || (document.hidden && !last)) return;
  busy = true;
  try {
    const width = Math.max($("lanes-box").clientWidth - LABEL, 100), since = state.since ? Math.max(0, state.summary.now - state.since) : 0;
    const [lanes, nodes] = await Promise.all([
      ask("lanes", { start: state.start, end: state.end, width, ...lanesInSight() }),
      ask("nodes", { since, ...nodesInSight() }),
    ]);
    showLanes(lanes);
    showNodes(nodes);
    await (state.tab === "metrics" ? showMetrics() : showList(state.tab));
    if (state.details && state.details.running) await showCall(state.details.id, true);
  } catch (error) {
    if (!(error instanceof TypeError)) problem(error.message); // a TypeError is a request that found nobody: `live` says so
  } finally {
    busy = false;
    if (again) { again = false; soon(); }
  }
}

// what is new comes as server-sent events; a page that nobody sees hears of the end only

const SILENCE = 25000;
let source = null, ended = false, heard = 0, seen = -1, retry = 0;

function live() {
  clearTimeout(retry);
  if (source) source.close();
  if (ended || (document.hidden && over())) { source = null; return; }
  source = new EventSource(`data/live?${new URLSearchParams(document.hidden ? { key, quiet: "" } : { key })}`);
  heard = Date.now();
  source.onmessage = (event) => {
    heard = Date.now();
    problem("");
    const summary = JSON.parse(event.data);
    showSummary(summary);
    const changed = summary.revision !== seen || summary.running;
    seen = summary.revision;
    if (over()) { if (changed) lastLook(); } else if (changed) { look(); }
  };
  source.addEventListener("end", () => {
    source.close();
    ended = true;
    problem(`The program that showed this page has ended. What you see is the last state. ${command()}`);
  });
  source.onerror = () => { if (!ended) lost(); };
}

const command = () => `\`sky view${state.summary ? ` ${state.summary.pool}` : ""}\` shows the whole run.`;

// the pool was closed: the program may end any moment, and waits shortly until this page has everything
async function lastLook() {
  while (busy) await new Promise((resolve) => setTimeout(resolve, 10));
  await look(true);
  ask("shown").catch(() => {});
}

function lost() {
  if (source) source.close();
  if (over()) {
    ended = true;
    problem(`The program has ended. ${command()}`);
    return;
  }
  document.body.classList.add("stale");
  write($("state"), "no answer");
  $("state").className = "badge";
  problem(`The program that shows this page does not answer. If it has ended, ${command()} Trying again.`);
  clearTimeout(retry);
  retry = setTimeout(() => {
    ask("summary").then((summary) => { showSummary(summary); live(); }).catch((error) => {
      if (error instanceof TypeError) { lost(); } else { problem(error.message); } // it answers, and says no
    });
  }, 2000);
}

setInterval(() => { if (source && !ended && !document.hidden && Date.now() - heard > SILENCE) lost(); }, 5000); // after a sleep

for (const tab of document.querySelectorAll("[role=tab]")) tab.addEventListener("click", () => { state.call = ""; $("output-call").hidden = true; openTab(tab.dataset.tab); });
for (const id of ["calls-text", "calls-outcome", "calls-node", "output-text", "output-node"]) {
  $(id).addEventListener("input", () => { pages[id.split("-")[0]] = []; soon(); });
}
for (const kind of ["calls", "output", "events"]) {
  $(`${kind}-more`).addEventListener("click", () => showList(kind, true).catch((error) => problem(error.message)));
  $(`${kind}-newest`).addEventListener("click", () => newest(kind));
}
document.addEventListener("keydown", (event) => { if (event.key === "Escape") closeCall(); });
document.addEventListener("visibilitychange", () => { if (key && state.summary) live(); soon(); });
$("since").addEventListener("input", () => { state.since = Number($("since").value); soon(); });
$("nodes").addEventListener("scroll", soon);
addEventListener("resize", soon);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", soon);
watchLanes();
if (key) {
  ask("summary").then((summary) => { showSummary(summary); live(); look(); }).catch((error) => problem(error.message));
} else {
  problem("This tab has no key. Open the address that pool.view() or `sky view` prints.");
}
