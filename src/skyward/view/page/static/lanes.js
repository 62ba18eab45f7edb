"use strict";
// Calls over time, on a canvas as large as what is in sight: drawn from the last answer at once, then from the next one.

const LABEL = 62, ROW = 13, GAP = 5, AXIS = 20, QUEUE = 30;

function head() { return AXIS + (state.lanes && state.lanes.waiting.some((point) => point[1] > 0) ? QUEUE : 0); }

// where each lane begins, and how high all of them are
function places(lanes) {
  const tops = [];
  let top = 4;
  for (const lane of lanes) { tops.push(top); top += lane.rows * ROW + GAP; }
  return { tops, height: top };
}

function lanesInSight() {
  const box = $("lanes-box"), lanes = state.lanes ? state.lanes.lanes : [];
  if (!lanes.length) return { first: 0, last: 30 };
  const { tops } = places(lanes), low = box.scrollTop - box.clientHeight / 2, high = box.scrollTop + box.clientHeight * 1.5;
  const first = tops.findIndex((top, index) => top + lanes[index].rows * ROW >= low), after = tops.findIndex((top) => top > high);
  return { first: Math.max(0, first), last: after < 0 ? lanes.length : after };
}

function showLanes(answer) { state.lanes = answer; drawLanes(); }

function drawLanes() {
  const answer = state.lanes, canvas = $("lanes"), box = $("lanes-box");
  if (!answer || !state.summary) return;
  const style = getComputedStyle(document.documentElement), colour = {};
  for (const name of ["faint", "line", "ok", "running", "bad", "gone", "on", "band", "card", "warn"]) colour[name] = style.getPropertyValue(`--${name}`).trim();
  const { tops, height } = places(answer.lanes), above = head(), width = Math.max(box.clientWidth, 60);
  const tall = Math.min(above + height, parseFloat(getComputedStyle(box).maxHeight) || 384), scale = Math.min(window.devicePixelRatio || 1, 2);
  $("lanes-space").style.height = `${above + height}px`;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(tall * scale)) {
    canvas.width = Math.round(width * scale); canvas.height = Math.round(tall * scale);
    canvas.style.width = `${width}px`; canvas.style.height = `${tall}px`;
  }
  const draw = canvas.getContext("2d"), shift = above - box.scrollTop;
  draw.setTransform(scale, 0, 0, scale, 0, 0);
  draw.clearRect(0, 0, width, tall);
  draw.font = "11px system-ui, sans-serif";
  draw.textBaseline = "middle";
  const room = Math.max(width - LABEL, 10), span = state.end - state.start, x = (time) => LABEL + (time + answer.start - state.start) / span * room;
  drawAxis(draw, colour, tall, room, span);
  draw.save();
  draw.beginPath(); draw.rect(0, above, width, tall - above); draw.clip();
  state.hits = [];
  state.bands = [];
  const place = new Map(answer.lanes.map((lane, index) => [lane.node, index]));
  for (const each of answer.broadcasts) {
    const from = place.get(each.nodes[0]), to = place.get(each.nodes[1]), left = Math.max(x(each.began), LABEL), right = Math.min(x(each.ended), width);
    if (from === undefined || to === undefined || right <= left) continue;
    const top = shift + tops[from] - 2, bottom = shift + tops[to] + answer.lanes[to].rows * ROW + 1;
    draw.fillStyle = colour.band; draw.fillRect(left, top, right - left, bottom - top);
    state.bands.push([left, top, right, bottom, each]);
  }
  answer.lanes.forEach((lane, index) => {
    const top = shift + tops[index];
    if (top > tall || top + lane.rows * ROW < above) return;
    draw.fillStyle = colour.faint;
    draw.fillText(`node ${lane.node}`, 6, top + Math.min(lane.rows * ROW, 30) / 2);
    for (const [row, start, end, count, outcome, name, id, failed] of answer.blocks[lane.node] || []) {
      const left = Math.max(x(start), LABEL), right = Math.min(x(end), width), y = top + row * ROW;
      if (right < LABEL || left > width) continue;
      const shown = Math.max(right - left, 1.5);
      const some = failed > 0 && failed < count, wide = shown > 4 ? shown - 0.7 : shown;
      draw.fillStyle = outcome === "ok" || some ? colour.ok : outcome === "running" ? (over() ? colour.gone : colour.running) : failed ? colour.bad : colour.gone;
      draw.fillRect(left, y, wide, ROW - 2);
      if (some) { draw.fillStyle = colour.bad; draw.fillRect(left, y + ROW - 5, wide, 3); }
      if (shown > 34) { draw.fillStyle = colour.on; draw.fillText(fitted(count > 1 ? `${count} × ${name}` : name, shown - 6), left + 3, y + ROW / 2 - 0.5); }
      state.hits.push([left, y, left + shown, y + ROW - 2, { start, end, count, outcome, name, id, failed, node: lane.node }]);
    }
  });
  draw.restore();
}

function fitted(text, room) { const most = Math.floor(room / 6); return text.length <= most ? text : `${text.slice(0, Math.max(1, most - 1))}…`; }

function drawAxis(draw, colour, tall, room, span) {
  const step = ticks(span, room), began = state.summary.began;
  for (let at = Math.ceil((state.start - began) / step) * step; at <= state.end - began; at += step) {
    const where = LABEL + (at + began - state.start) / span * room;
    if (where < LABEL) continue;
    draw.fillStyle = colour.line; draw.fillRect(where, AXIS - 4, 1, tall);
    draw.fillStyle = colour.faint; draw.fillText(Math.abs(at) < step / 2 ? "0" : duration(at), where + 3, 9);
  }
  const waiting = state.lanes.waiting, most = Math.max(0, ...waiting.map((point) => point[1]));
  if (!most) return;
  draw.fillStyle = colour.faint;
  draw.fillText("waiting", 6, AXIS + 12);
  draw.fillText(number(most), 6, AXIS + 23);
  draw.fillStyle = colour.warn; draw.globalAlpha = 0.55;
  const x = (time) => Math.min(Math.max(LABEL + (time + state.lanes.start - state.start) / span * room, LABEL), LABEL + room);
  waiting.forEach(([at, count], index) => {
    const left = x(at), right = index + 1 < waiting.length ? x(waiting[index + 1][0]) : x(state.summary.now - state.lanes.start), high = count / most * (QUEUE - 6);
    if (count && right > left) draw.fillRect(left, AXIS + QUEUE - 4 - high, right - left, high);
  });
  draw.globalAlpha = 1;
}

function ticks(span, room) {
  const least = span / (room / 90);
  for (const step of [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400]) {
    if (step >= least) return step;
  }
  return 604800;
}

function within(list, event, near) {
  const box = $("lanes").getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  if (y < head()) return null;
  for (let index = list.length - 1; index >= 0; index--) {
    const [left, top, right, bottom, about] = list[index];
    if (x >= left - near && x <= right + near && y >= top && y <= bottom) return about;
  }
  return null;
}

function following(on) { state.follow = on; $("follow").setAttribute("aria-pressed", String(on)); }

function move(start, end) { following(false); state.whole = false; state.start = start; state.end = end; soon(); }

function zoom(factor, share = 0.5) {
  const old = state.end - state.start, span = Math.min(Math.max(old * factor, 0.0005), 1e7), start = state.start + share * (old - span);
  move(start, start + span);
}

function tell(event) {
  const about = within(state.hits, event, 2), band = about ? null : within(state.bands, event, 0), tip = $("tip");
  tip.hidden = !about && !band;
  if (about) tip.textContent = about.count > 1
    ? `${number(about.count)} calls of ${about.name}${about.failed ? `, ${about.failed} failed` : ""}, ${duration(about.end - about.start)} in all: click to zoom in`
    : `${about.name} on node ${about.node}: ${about.outcome === "ok" ? "done" : about.outcome}, ${duration(about.end - about.start)}`;
  if (band) tip.textContent = `broadcast of ${band.name} to ${band.ranks} ranks: ${duration(band.ended - band.began)}${band.running ? `, ${band.running} still run` : ""}${band.failed ? `, ${band.failed} failed` : ""}`;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - 260))}px`; tip.style.top = `${event.clientY + 14}px`;
}

function watchLanes() {
  const canvas = $("lanes"), box = $("lanes-box");
  canvas.addEventListener("wheel", (event) => {
    const area = canvas.getBoundingClientRect(), share = Math.min(Math.max((event.clientX - area.left - LABEL) / (area.width - LABEL), 0), 1);
    if (event.ctrlKey || event.metaKey) { event.preventDefault(); zoom(Math.exp(Math.sign(event.deltaY) * 0.25), share); return; }
    const aside = event.shiftKey ? event.deltaY : Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : 0;
    if (aside) { event.preventDefault(); const shift = aside / area.width * (state.end - state.start); move(state.start + shift, state.end + shift); }
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => { state.drag = { x: event.clientX, start: state.start, end: state.end, moved: false }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    const drag = state.drag;
    if (!drag) { tell(event); return; }
    const shift = (drag.x - event.clientX) / (canvas.clientWidth - LABEL) * (drag.end - drag.start);
    if (Math.abs(event.clientX - drag.x) > 3) drag.moved = true;
    if (drag.moved) move(drag.start + shift, drag.end + shift);
  });
  canvas.addEventListener("pointerup", (event) => {
    const moved = state.drag && state.drag.moved, about = moved ? null : within(state.hits, event, 2), band = moved || about ? null : within(state.bands, event, 0);
    state.drag = null;
    if (about && about.id) { showCall(about.id); } else if (band) { showCall(band.id); } else if (about) {
      const middle = state.lanes.start + (about.start + about.end) / 2, span = Math.max((about.end - about.start) * 1.5, 0.0005);
      move(middle - span / 2, middle + span / 2);
    }
  });
  canvas.addEventListener("pointercancel", () => { state.drag = null; });
  canvas.addEventListener("pointerleave", () => { $("tip").hidden = true; });
  canvas.addEventListener("keydown", (event) => {
    const shift = (state.end - state.start) / 5 * (event.key === "ArrowLeft" ? -1 : 1);
    if (event.key === "+" || event.key === "-") zoom(event.key === "+" ? 0.7 : 1.4);
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") move(state.start + shift, state.end + shift);
  });
  box.addEventListener("scroll", () => { $("tip").hidden = true; soon(); });
  $("nearer").addEventListener("click", () => zoom(0.5));
  $("farther").addEventListener("click", () => zoom(2));
  $("follow").addEventListener("click", () => { following(!state.follow); soon(); });
  $("all").addEventListener("click", () => { following(true); state.whole = true; if (state.summary) showSummary(state.summary); soon(); });
}
