"use strict";
// What all parts of the page share. Every text is put into the page as text, never as HTML.

const $ = (id) => document.getElementById(id);
const COLOURS = ["#2f6fde", "#d9822b", "#3f9d63", "#b64fc8", "#cf3a3a", "#1f9aa8", "#8a7a2b", "#7a6ff0"];
const state = {
  summary: null, tab: "calls", start: 0, end: 0, follow: true, whole: true, call: "", details: null,
  lanes: null, hits: [], bands: [], drag: null, since: 600,
};

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

function write(element, text) { if (element.textContent !== text) element.textContent = text; }

// Brings the children of an element up to date: what is unchanged stays, with what somebody has selected there.
function update(list, rows, keyOf, makeRow) {
  const known = new Map([...list.children].map((child) => [child.dataset.row, child])), wanted = new Set();
  for (const row of rows) wanted.add(String(keyOf(row)));
  for (const [name, child] of known) if (!wanted.has(name)) child.remove();
  let next = list.firstElementChild;
  for (const row of rows) {
    const name = String(keyOf(row)), text = JSON.stringify(row), old = known.get(name);
    if (old && old.row === text) {
      if (old === next) { next = next.nextElementSibling; } else { list.insertBefore(old, next); }
      continue;
    }
    const made = makeRow(row);
    made.dataset.row = name;
    made.row = text;
    const focused = old && old === document.activeElement;
    if (old && old === next) { next = next.nextElementSibling; old.replaceWith(made); } else { if (old) old.remove(); list.insertBefore(made, next); }
    if (focused) made.focus({ preventScroll: true });
  }
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

// how long something has run that began then, until it has ended
const elapsed = (began) => over() || !state.summary ? "" : duration(Math.max(0, state.summary.now - began));
const clock = (time) => new Date(time * 1000).toLocaleTimeString([], { hour12: false });
const dollars = (value) => value === null ? "not known" : `$${value < 1 ? value.toFixed(3) : value.toFixed(2)}`;
const number = (value) => value.toLocaleString("en-US");
const short = (value) => value === 0 ? "0" : Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
const over = () => state.summary !== null && (state.summary.state === "closed" || state.summary.state === "killed");
