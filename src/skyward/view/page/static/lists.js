"use strict";
// The lists below the picture: calls, output, events; and the details of a call.

const PAGE = 200, MOST = 1000;
const pages = { calls: [], output: [], events: [] };

function ending(call) {
  const name = call.outcome === "ok" ? "done" : call.outcome === "running" && over() ? "not ended" : call.outcome;
  return call.attempt ? `${name} (attempt ${call.attempt + 1})` : name;
}

function share(call) {
  if (!call.progress || call.outcome !== "running") return "";
  const [step, total] = call.progress;
  return total ? `, ${short(step)} of ${short(total)} (${Math.min(100, Math.round(step / total * 100))} %)` : `, step ${short(step)}`;
}

function callRow(call) {
  const row = make("tr", "", "pick"), name = make("td"), group = call.broadcast;
  name.append(make("code", `${call.name}(${call.arguments})`));
  if (group) name.append(make("span", ` to ${group.ranks} ranks`, "faint"));
  if (call.why) name.append(document.createElement("br"), make("span", call.why, "error"));
  const where = group ? (group.nodes[0] === group.nodes[1] ? group.nodes[0] : `${group.nodes[0]} to ${group.nodes[1]}`) : call.node < 0 ? "" : call.node;
  const runs = group ? group.ended === null : call.seconds === null, began = group ? group.began : call.began;
  const took = make("td", runs ? elapsed(began) : group ? duration(group.ended - group.began) : duration(call.seconds));
  if (runs) row.elapsed = () => write(took, elapsed(began));
  const how = !group ? ending(call) + share(call) : group.failed ? `${group.failed} of ${group.ranks} failed` : group.running ? `${over() ? "not ended" : "running"}${share(call)}` : ending(call);
  row.append(name, make("td", where), make("td", clock(began)), make("td", call.waited >= 0.001 ? duration(call.waited) : ""), took, make("td", how, group && group.failed ? "failed" : call.outcome));
  row.tabIndex = 0;
  row.addEventListener("click", () => { if (!String(getSelection())) showCall(call.id); });
  row.addEventListener("keydown", (event) => { if (event.key === "Enter") showCall(call.id); });
  return row;
}

function outputLine(line) {
  const row = make("div", "", line.stream === "stderr" ? "stderr" : "");
  row.append(make("b", `${clock(line.time)} node ${line.node}  `), document.createTextNode(line.text));
  if (line.call) { row.title = "click for its call"; row.addEventListener("click", () => { if (!String(getSelection())) showCall(line.call); }); }
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

// whether somebody reads something that is not the newest: then nothing moves under their eyes
function reads(kind) {
  const box = $(kind).closest(".scroll");
  if (!pages[kind].length) return false;
  return kind === "output" ? box.scrollHeight - box.scrollTop - box.clientHeight > 40 : box.scrollTop > 40;
}

async function showList(kind, older = false) {
  const known = pages[kind], words = { ...kinds[kind].query(), limit: PAGE }, away = reads(kind);
  $(`${kind}-newest`).hidden = !away;
  if (away && !older) return;
  if (older && known.length) words.before = known[known.length - 1].number;
  const found = await ask(kind, words);
  if (!older && reads(kind)) return;
  pages[kind] = older ? [...known, ...found].slice(-MOST) : found;
  fill(kind, older);
  $(`${kind}-more`).hidden = found.length < PAGE;
}

function fill(kind, older) {
  const list = $(kind), box = list.closest(".scroll"), below = box.scrollHeight - box.scrollTop, rows = pages[kind];
  update(list, kind === "output" ? rows.slice().reverse() : rows, (row) => row.number, kinds[kind].row);
  for (const row of list.children) if (row.elapsed) row.elapsed();
  if (!rows.length) list.replaceChildren(make(kind === "output" ? "div" : "tr", filtered(kind) ? "nothing found" : "nothing so far", "faint"));
  if (kind === "output") box.scrollTop = older ? box.scrollHeight - below : box.scrollHeight;
}

function filtered(kind) { return Object.values(kinds[kind].query()).some(Boolean); }

function newest(kind) {
  const box = $(kind).closest(".scroll");
  pages[kind] = [];
  box.scrollTop = kind === "output" ? box.scrollHeight : 0;
  showList(kind).catch((error) => problem(error.message));
}

function facts(pairs) {
  const list = make("dl");
  list.append(...pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined).map(([name, value]) => {
    const row = make("div");
    row.append(make("dt", name), make("dd", String(value)));
    return row;
  }));
  return list;
}

function linked(calls, label) {
  const list = make("ul");
  for (const call of calls) {
    const entry = make("li"), open = make("button", label(call), "link");
    open.addEventListener("click", () => showCall(call.id));
    entry.append(open, make("span", ` ${ending(call)}${call.seconds === null ? share(call) : `, ${duration(call.seconds)}`}`, call.outcome));
    list.append(entry);
  }
  return list;
}

async function showCall(id, again = false) {
  const call = await ask("call", { id });
  if (!call || (again && (!state.details || state.details.id !== id))) return;
  const text = JSON.stringify(call), panel = $("details");
  if (again && state.details.text === text && call.outcome === "running" && !over()) { write(state.details.took, elapsed(call.began)); return; }
  const old = panel.querySelector("pre.output"), atEnd = !old || old.scrollHeight - old.scrollTop - old.clientHeight < 40, was = old ? old.scrollTop : 0;
  const title = make("h2"), close = make("button", "Close"), at = panel.scrollTop;
  title.append(make("span", call.name), close);
  close.addEventListener("click", closeCall);
  const told = [["outcome", ending(call) + share(call)], ["node", call.node < 0 ? "" : call.node], ["rank", call.rank], ["began", clock(call.began)],
    ["waited", call.waited >= 0.001 ? duration(call.waited) : ""], ["took", call.seconds === null ? elapsed(call.began) : duration(call.seconds)], ["id", call.id]], known = facts(told);
  const took = [...known.children].find((row) => row.firstChild.textContent === "took");
  state.details = { id, text, running: call.outcome === "running" && !over(), took: took ? took.lastChild : make("dd") };
  panel.replaceChildren(title, known, make("h3", "Arguments"), make("pre", call.arguments || "none"));
  if (call.error) panel.append(make("h3", "Error"), make("pre", call.error, "error"));
  if (call.earlier.length) panel.append(make("h3", "Earlier attempts"), facts(call.earlier.map((each) => [`attempt ${each.attempt + 1}`, `node ${each.node}: ${each.outcome} after ${duration(each.seconds)}`])));
  const lines = call.output.map((line) => line.text).join("\n"), shown = make("pre", lines || "none", "output");
  panel.append(make("h3", "Output"), shown);
  if (lines) {
    const search = make("button", "Search its output");
    search.addEventListener("click", () => { state.call = call.id; $("output-call").textContent = `only ${call.name}, call ${call.id}`; $("output-call").hidden = false; closeCall(); openTab("output"); });
    panel.append(search);
  }
  if (call.ranks.length) panel.append(make("h3", `Broadcast to ${call.ranks.length} ranks`), linked(call.ranks, (each) => `rank ${each.rank === null ? each.node : each.rank} on node ${each.node}`));
  panel.hidden = false;
  if (again) { panel.scrollTop = at; shown.scrollTop = atEnd ? shown.scrollHeight : was; } else { panel.scrollTop = 0; close.focus(); }
}

function closeCall() { $("details").hidden = true; state.details = null; }
