"use strict";
// Nodes: a card each; the figures of those that are in sight are asked for.

const cards = new Map();

function curve(css) {
  const svg = drawing("svg", { class: `line ${css}`, viewBox: "0 0 100 22", preserveAspectRatio: "none", "aria-hidden": "true" });
  svg.append(drawing("path", {}));
  return svg;
}

function trace(path, points, top) {
  if (points.length < 2) { path.setAttribute("d", ""); return; }
  const [start, end] = [points[0][0], points[points.length - 1][0]], span = Math.max(end - start, 1e-9);
  const step = points.map(([at, value]) => `${((at - start) / span * 100).toFixed(1)},${(21 - value / Math.max(top, 1e-9) * 20).toFixed(1)}`);
  path.setAttribute("d", `M${step.join("L")}`);
}

function figure(card, name, points, text, top, title) {
  let row = card.figures.get(name);
  if (!row) {
    row = make("div", "", "curve");
    row.title = title;
    row.append(make("span"), curve(/mem/.test(name) ? "memory" : "use"));
    card.figures.set(name, row);
    card.element.append(row);
  }
  write(row.firstChild, `${name} ${points.length ? text(points[points.length - 1][1]) : ""}`);
  trace(row.lastChild.firstChild, points, Math.max(top, 1.25 * Math.max(...points.map((point) => point[1]))));
}

function card(node) {
  let known = cards.get(node.node);
  if (known) return known;
  known = { element: make("div", "", "node"), title: make("h3"), counts: make("small"), state: make("span"), figures: new Map() };
  known.title.append(make("span", `node ${node.node}`), known.state);
  known.element.append(known.title, known.counts);
  cards.set(node.node, known);
  $("nodes").append(known.element);
  return known;
}

function showNodes(nodes) {
  fillNodes(nodes.length);
  for (const node of nodes) {
    const known = card(node), failed = node.failed ? `, ${number(node.failed)} failed` : "";
    write(known.state, node.state);
    known.state.className = node.state;
    write(known.counts, `${over() ? "" : `${node.running} running, `}${number(node.done)} ok${failed}`);
    if (!node.cpu) continue;
    if (node.cpu.length) figure(known, "CPU", node.cpu, (v) => `${Math.round(v)} %`, 100, "CPU of the node's processes, in per cent of one core");
    if (node.memory.length) figure(known, "memory", node.memory, bytes, 1, "memory of the node's processes");
    for (const gpu of node.gpus) {
      if (gpu.use.length) figure(known, `GPU ${gpu.index}`, gpu.use, (v) => `${Math.round(v)} %`, 100, `${gpu.name}: time in which it had something to do`);
      if (gpu.memory.length) figure(known, `GPU ${gpu.index} mem.`, gpu.memory, bytes, gpu.total || 1, `${gpu.name}: memory in use${gpu.total ? ` of ${bytes(gpu.total)}` : ""}`);
    }
  }
}

// which cards are in sight, by their places
function nodesInSight() {
  const box = $("nodes"), shown = [...box.children], top = box.scrollTop - 60, bottom = box.scrollTop + box.clientHeight + 60;
  const first = shown.findIndex((each) => each.offsetTop - box.offsetTop + each.offsetHeight >= top);
  const after = shown.findIndex((each) => each.offsetTop - box.offsetTop > bottom);
  const from = Math.max(0, first), to = after < 0 ? Math.max(shown.length, 24) : after;
  return { first: from, last: Math.min(to, from + 48) };
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
