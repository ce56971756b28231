"use strict";
const D = JSON.parse(document.getElementById("data").textContent);
const off = new Set();
const NS = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);
const unit = Object.fromEntries(D.tasks.map((t) => [t.name, t]));

function el(name, attributes, text) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
function svg(name, attributes, text) {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
function color(method) {
  const i = D.methods.findIndex((m) => m.name === method);
  return i < 8 ? `var(--s${i})` : `hsl(${(i * 47) % 360} 55% 50%)`;
}
function short(x) {
  if (x === 0) return "0";
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(x) >= size) return `${+(x / size).toPrecision(3)}${letter}`;
  return `${+x.toPrecision(3)}`;
}
function shown(interval, task) {
  if (interval.mean === null) return "--";
  const t = unit[task], f = (x) => (x / t.unit).toFixed(t.digits);
  if (interval.n === 2 && interval.low !== null) {
    const low = f(interval.low), high = f(interval.high);
    return low === high ? low : `${low} to ${high}`;
  }
  return interval.half === null ? f(interval.mean) : `${f(interval.mean)} \u00b1 ${f(interval.half)}`;
}
function spread(interval, task) {
  // what is drawn: the interval; of two seeds both values; never beyond what the metric can be
  const half = interval.half || 0, range = unit[task].range;
  const ends = interval.n === 2 ? [interval.low, interval.high] : [interval.mean - half, interval.mean + half];
  return range ? ends.map((v) => Math.min(Math.max(v, range[0]), range[1])) : ends;
}
function table(node, heads, rows) {
  node.replaceChildren();
  const head = el("tr");
  heads.forEach((text, i) => {
    const cell = el("th", { scope: "col", tabindex: "0" }, text);
    const sort = () => {
      const body = node.querySelector("tbody");
      const down = cell.getAttribute("aria-sort") === "ascending";
      node.querySelectorAll("th[aria-sort]").forEach((c) => c.removeAttribute("aria-sort"));
      cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.children[i].textContent, number = (row) => parseFloat(key(row));
      const sorted = [...body.children].sort((a, b) =>
        (isNaN(number(a)) || isNaN(number(b)) ? key(a).localeCompare(key(b)) : number(a) - number(b)) * (down ? -1 : 1));
      body.replaceChildren(...sorted);
    };
    cell.addEventListener("click", sort);
    cell.addEventListener("keydown", (e) => { if (e.key === "Enter") sort(); });
    head.append(cell);
  });
  const top = el("thead"), body = el("tbody");
  top.append(head);
  for (const row of rows) {
    const line = el("tr");
    row.forEach((text, i) => line.append(i ? el("td", {}, text) : el("th", { scope: "row" }, text)));
    body.append(line);
  }
  node.append(top, body);
}
function current() {
  return D.boards.find((b) => b.axis === $("axis").value && String(b.share) === $("share").value);
}
function rows(board) {
  return board.standings.map((s) => [s.method, s.rank.toFixed(2), s.low === null ? "--" : `${s.low.toFixed(2)} to ${s.high.toFixed(2)}`,
    s.first === null ? "--" : `${(100 * s.first).toFixed(0)} %`, ...D.tasks.map((t) => s.scores[t.name] ? shown(s.scores[t.name], t.name) : "--")]);
}
function heads() {
  return ["Method", "Rank", "95 %", "Leads", ...D.tasks.map((t) => `${t.name}: ${t.heading}${t.lower ? " (less is better)" : ""}`)];
}
function lead() {
  const board = current();
  if (!board) return;
  table($("board"), heads(), rows(board));
  const tied = board.critical !== null && board.standings[board.standings.length - 1].rank - board.standings[0].rank < board.critical;
  $("near").textContent = board.critical === null ? "" : tied ?
    `No method can be told from any other here: all ranks differ by less than ${board.critical.toFixed(2)}, which is what chance brings (Nemenyi, 5 %). ${D.advice}` :
    `Ranks closer than ${board.critical.toFixed(2)} are what chance brings (Nemenyi, 5 %).`;
  ranks(board);
}
function saved() {
  const axis = $("axis").value, percent = (x) => x === null ? "--" : `${(100 * x).toFixed(0)} %`;
  $("saving").textContent = `What each method spends to get where ${D.reference} ends on average, as a share of its ${axis}: mean over tasks and seeds; runs that never get there count with all that they spent.`;
  table($("reached"), ["Method", `Share of ${axis}`, "95 %", "Runs that get there", "Ends worse on"], D.reached[axis].map((r) => [
    r.method, percent(r.share), r.low === null ? "--" : `${percent(r.low)} to ${percent(r.high)}`, `${r.reached} of ${r.runs}`, r.below.join(", ") || "--"]));
}
function ranks(board) {
  const n = board.standings.length, W = Math.min(720, Math.max(360, $("ranks").clientWidth || 720)), left = W < 600 ? 150 : 190, H = 30 + 20 * n;
  const x = (r) => left + (W - left - 20) * (r - 1) / Math.max(n - 1, 1);
  const box = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "mean ranks" });
  for (let r = 1; r <= n; r += Math.ceil(n / 10)) {
    box.append(svg("line", { x1: x(r), x2: x(r), y1: 20, y2: H, class: "tick" }));
    box.append(svg("text", { x: x(r), y: 12, "text-anchor": "middle" }, r));
  }
  if (board.critical !== null) {
    const a = x(board.standings[0].rank), b = Math.min(x(board.standings[0].rank + board.critical), W - 10);
    box.append(svg("rect", { x: a, y: 20, width: Math.max(b - a, 0), height: H - 20, fill: "var(--panel)" }));
  }
  board.standings.forEach((s, i) => {
    const y = 32 + 20 * i;
    box.append(svg("text", { x: left - 10, y: y + 4, "text-anchor": "end" }, s.method));
    if (s.low !== null) box.append(svg("line", { x1: x(s.low), x2: x(s.high), y1: y, y2: y, stroke: color(s.method), "stroke-width": 2 }));
    box.append(svg("circle", { cx: x(s.rank), cy: y, r: 4.5, fill: color(s.method) }));
  });
  $("ranks").replaceChildren(box);
}
function scale(low, high, from, to) {
  const span = high - low || 1;
  return (v) => from + (to - from) * (v - low) / span;
}
function padded(values, by) {
  const low = Math.min(...values), high = Math.max(...values), pad = by * (high - low || Math.abs(high) || 1);
  return [low - pad, high + pad];
}
function frame(title, xs, ys, task, axis, by) {
  const W = 430, H = 260, L = 52, B = 34, T = 10, R = 12;
  xs = padded(xs, by); ys = padded(ys, by);
  const t = unit[task];
  if (t.range) ys = [Math.max(ys[0], t.range[0]), Math.min(ys[1], t.range[1])];
  xs = [Math.max(xs[0], 0), xs[1]];
  const box = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title });
  const x = scale(Math.min(...xs), Math.max(...xs), L, W - R), y = scale(Math.min(...ys), Math.max(...ys), H - B, T);
  for (let i = 0; i <= 4; i++) {
    const v = Math.min(...ys) + (Math.max(...ys) - Math.min(...ys)) * i / 4, u = Math.min(...xs) + (Math.max(...xs) - Math.min(...xs)) * i / 4;
    box.append(svg("line", { x1: L, x2: W - R, y1: y(v), y2: y(v), class: "tick" }));
    box.append(svg("text", { x: L - 6, y: y(v) + 4, "text-anchor": "end" }, (v / t.unit).toFixed(t.digits)));
    box.append(svg("text", { x: x(u), y: H - B + 16, "text-anchor": "middle" }, short(u)));
  }
  box.append(svg("text", { x: (L + W - R) / 2, y: H - 4, "text-anchor": "middle" }, axis));
  const figure = el("figure", { class: "chart" });
  figure.append(el("figcaption", {}, title), box);
  return { figure, box, x, y };
}
function charts() {
  const axis = $("axis").value;
  const fronts = [], curves = [];
  for (const t of D.tasks) {
    const points = D.fronts[axis].filter((p) => p.task === t.name && !off.has(p.method) && p.value.mean !== null);
    if (points.length) {
      const f = frame(`${t.name}: ${t.heading} against ${axis}`, points.map((p) => p.cost.mean), points.flatMap((p) => spread(p.value, t.name)), t.name, axis, 0.06);
      for (const p of points) {
        const on = p.front >= 0.5;
        const dot = svg("circle", { cx: f.x(p.cost.mean), cy: f.y(p.value.mean), r: on ? 6 : 4.5, fill: on ? color(p.method) : "none", stroke: color(p.method), "stroke-width": 2 });
        dot.append(svg("title", {}, `${p.method}: ${shown(p.value, t.name)}, ${short(p.cost.mean)} ${axis}, on the front in ${(100 * p.front).toFixed(0)} %`));
        const x = f.x(p.cost.mean), [low, high] = spread(p.value, t.name);
        f.box.append(svg("line", { x1: x, x2: x, y1: f.y(low), y2: f.y(high), stroke: color(p.method), opacity: 0.4 }));
        f.box.append(dot);
      }
      fronts.push(f.figure);
    }
    const lines = Object.entries(D.curves[t.name]).filter(([m, c]) => !off.has(m) && c[axis][0].length);
    if (lines.length) {
      const f = frame(`${t.name}`, lines.flatMap(([, c]) => c[axis][0]), lines.flatMap(([, c]) => c[axis][1]), t.name, axis, 0);
      for (const [m, c] of lines) {
        const path = c[axis][0].map((v, i) => `${i ? "L" : "M"}${f.x(v).toFixed(1)} ${f.y(c[axis][1][i]).toFixed(1)}`).join("");
        const line = svg("path", { d: path, fill: "none", stroke: color(m), "stroke-width": 1.8 });
        line.append(svg("title", {}, m));
        f.box.append(line);
      }
      curves.push(f.figure);
    }
  }
  $("fronts").replaceChildren(...fronts);
  $("curves").replaceChildren(...curves);
}
function legend() {
  $("legend").replaceChildren(...D.methods.map((m) => {
    const button = el("button", { type: "button", "aria-pressed": String(!off.has(m.name)) });
    const dot = el("i");
    dot.style.background = color(m.name);
    button.append(dot, el("span", {}, m.name));
    button.addEventListener("click", () => {
      if (off.has(m.name)) off.delete(m.name); else off.add(m.name);
      button.setAttribute("aria-pressed", String(!off.has(m.name)));
      charts();
    });
    return button;
  }));
  for (const word of ["all", "none"]) {
    const button = el("button", { type: "button", class: "every" }, word);
    button.addEventListener("click", () => {
      off.clear();
      if (word === "none") D.methods.forEach((m) => off.add(m.name));
      legend();
      charts();
    });
    $("legend").append(button);
  }
}
function download(name, text) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: name });
  link.click();
}
function quoted(text) {
  const safe = /^[=+@-]/.test(text) && isNaN(text) ? `'${text}` : text;
  return /[",\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
function fill() {
  for (const axis of D.axes) $("axis").append(el("option", { value: axis }, axis));
  $("axis").value = "joules";
  for (const share of [...new Set(D.boards.map((b) => b.share))]) $("share").append(el("option", { value: String(share) }, `${100 * share} %`));
  $("axis").addEventListener("change", () => { lead(); saved(); charts(); });
  saved();
  const unrun = Object.entries(D.left_out).flatMap(([m, tasks]) => Object.entries(tasks).map(([t, why]) => [m, t, why]));
  unrun.push(...D.failed.map(([label, why]) => [label, "failed", why]));
  $("unrun").hidden = !unrun.length;
  table($("missing"), ["Method", "Task", "Why not"], unrun);
  $("share").addEventListener("change", lead);
  $("csv").addEventListener("click", () => download(`arena-${$("axis").value}.csv`,
    [heads(), ...rows(current())].map((row) => row.map((cell) => quoted(String(cell))).join(",")).join("\n")));
  $("theme").addEventListener("click", () => {
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  });
  const without = Object.entries(D.without);
  $("changing").hidden = !without.length;
  const places = Array.from({ length: Math.min(5, Math.max(0, ...without.map(([, order]) => order.length))) }, (_, i) => i);
  table($("without"), ["Without", ...places.map((i) => `${i + 1}`)], without.map(([task, order]) => [task, ...places.map((i) => order[i] || "")]));
  $("pairing").textContent = `What each method gains over ${D.reference} on the same seeds at equal joules: means with 95 % intervals, above 0 where it is better. Of so many intervals, one in twenty misses.`;
  table($("paired"), ["Method", "Better on", "Worse on", ...D.tasks.map((t) => t.name)], D.paired.map((p) => [
    p.method, p.better.join(", ") || "--", p.worse.join(", ") || "--",
    ...D.tasks.map((t) => p.gains[t.name] ? shown(p.gains[t.name], t.name) : "--")]));
  $("rule").textContent = D.about.rule;
  table($("tasks"), D.about.heads, D.about.tasks);
  $("stopping").hidden = !D.stops.length;
  table($("stops"), ["Task", "Rule", "Ends", "Round", "Joules saved", "Metric given"], D.stops.map((s) => [
    s.task, s.rule, `${s.stopped} of ${s.runs}`, s.round.mean === null ? "--" : s.round.mean.toFixed(0),
    s.saved.mean === null ? "--" : `${(100 * s.saved.mean).toFixed(0)} %`, shown(s.given, s.task)]));
  $("cards").replaceChildren(...D.methods.map((m) => {
    const card = el("article"), more = el("details");
    more.append(el("summary", {}, "settings"), el("pre", {}, m.recipe));
    card.append(el("h3", {}, m.name), el("p", {}, m.summary || "A recipe of this plan's own."), more);
    return card;
  }));
}
fill(); legend(); lead(); charts();
document.documentElement.dataset.ready = "true";
