"use strict";
// Charts: scales, axes, reading of values by pointer and keyboard, and export. A chart is a function draw(frame) that
// paints into frame.svg and returns { label, cell, locate, cols, rows, csv }: cell(i, j) describes a cell of its grid,
// locate(x, y) finds the cell under a pointer, csv() lists the data. Names are inserted as text, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const NS = "http://www.w3.org/2000/svg";
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
const charts = [];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const seriesColour = (i) => colour(`s${i % 8}`);
const dash = (i) => DASHES[Math.floor(i / 8) % DASHES.length];

function node(parent, name, attributes = {}, text = null) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) if (value !== "" && value != null) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}

function tag(parent, name, properties = {}, text = null) {
  const made = Object.assign(document.createElement(name), properties);
  if (text !== null) made.textContent = text;
  parent.appendChild(made);
  return made;
}

const short = (text, most = 14) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

// Names of at most so many letters that can be told apart: their beginnings, else what follows the beginning that
// all share, else their ends.
function shorten(names, most) {
  const all = [...new Set(names)], first = all[0] || "";
  let shared = first.length;
  while (!all.every((name) => name.startsWith(first.slice(0, shared)))) shared -= 1;
  const rest = (name) => short(shared > 1 ? `…${name.slice(shared)}` : name, most);
  const ways = [(name) => short(name, most), rest, (name) => (name.length > most ? `…${name.slice(1 - most)}` : name)];
  const way = ways.find((make) => new Set(all.map(make)).size === all.length) || ways[0];
  return names.map(way);
}

function number(value, digits = 3) {
  if (value == null) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(digits - 1);
  return String(Number(value.toPrecision(Math.max(digits, Math.ceil(Math.log10(size + 1e-12))))));
}

function ticks(low, high, most, whole = false) {
  const span = high - low || 1;
  const rough = whole ? Math.max(span / Math.max(most, 1), 1) : span / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = (whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).map((x) => x * power).find((x) => x >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-6; i++) found.push(i * step);
  return found;
}

const linear = (from, to, start, end) => (x) => start + ((x - from) / (to - from || 1)) * (end - start);

function words(frame, x, y, text, more = {}) {
  return node(frame.svg, "text", { x, y, fill: frame.ink, "font-size": 12, "text-anchor": "middle", ...more }, text);
}

// Axes with a light grid; xs and ys are { low, high, name, ticks?, text? }. Returns the two scales.
function axes(frame, xs, ys) {
  const { left, right, top, bottom } = frame;
  const x = linear(xs.low, xs.high, left, right), y = linear(ys.low, ys.high, bottom, top);
  const text = (axis, value) => (axis.text ? axis.text(value) : number(value));
  for (const v of ys.ticks || ticks(ys.low, ys.high, (bottom - top) / 48)) {
    node(frame.svg, "line", { x1: left, x2: right, y1: y(v), y2: y(v), stroke: frame.grid });
    words(frame, left - 8, y(v) + 4, text(ys, v), { "text-anchor": "end", fill: frame.muted });
  }
  for (const v of xs.ticks || ticks(xs.low, xs.high, (right - left) / 80, xs.name === "round")) {
    words(frame, x(v), bottom + 18, text(xs, v), { fill: frame.muted });
  }
  node(frame.svg, "line", { x1: left, x2: right, y1: bottom, y2: bottom, stroke: frame.line });
  words(frame, (left + right) / 2, bottom + 36, xs.name, { fill: frame.muted });
  if (ys.name) words(frame, left, top - 10, ys.name, { "text-anchor": "start", fill: frame.muted });
  return [x, y];
}

// A row of keys inside the picture: [name, colour, dash or "box"].
function keys(frame, entries, y) {
  let x = frame.left;
  for (const [name, paint, style] of entries) {
    const width = 34 + 6.6 * short(name, 40).length;
    if (x + width > frame.right + 30 && x > frame.left) { x = frame.left; y += 18; }
    const boxed = style === "box" || style === "pale";
    if (boxed) node(frame.svg, "rect", { x, y: y - 9, width: 11, height: 11, rx: 2, fill: paint, opacity: style === "pale" ? 0.4 : "" });
    else if (style === "ring") node(frame.svg, "circle", { cx: x + 6, cy: y - 4, r: 4, fill: frame.paper, stroke: paint, "stroke-width": 1.8 });
    else if (style === "dot") node(frame.svg, "circle", { cx: x + 6, cy: y - 4, r: 4.5, fill: paint });
    else node(frame.svg, "line", { x1: x, x2: x + 18, y1: y - 4, y2: y - 4, stroke: paint, "stroke-width": 2.5, "stroke-dasharray": style });
    words(frame, x + (boxed || style === "ring" || style === "dot" ? 17 : 24), y, short(name, 40), { "text-anchor": "start" });
    x += width;
  }
}

function blank(width, height, margins) {
  const svg = node(null, "svg", { xmlns: NS, viewBox: `0 0 ${width} ${height}`, width, height, "font-family": "system-ui, 'DejaVu Sans', sans-serif" });
  const frame = { svg, width, height, ink: colour("ink"), muted: colour("muted"), grid: colour("grid"), line: colour("line"), paper: colour("paper") };
  node(svg, "rect", { width, height, fill: frame.paper });
  return Object.assign(frame, { left: margins.left, right: width - margins.right, top: margins.top, bottom: height - margins.bottom });
}

class Chart {
  // draw(frame) as above; height(width) in pixels; empty() explains why there is nothing to draw, or ""; an optional
  // chart is then hidden.
  constructor(id, { draw, height = () => 320, margins = {}, empty = () => "", legend = null, optional = false }) {
    Object.assign(this, { id, draw, height, empty, legend, optional, at: [0, 0], width: 0 });
    this.margins = { left: 52, right: 18, top: 30, bottom: 46, ...margins };
    this.figure = byId(id);
    this.title = this.figure.querySelector("figcaption").textContent;
    this.canvas = tag(this.figure, "div", { className: "canvas" });
    this.tools = tag(this.figure, "div", { className: "tools" });
    for (const kind of ["SVG", "PNG", "CSV"]) {
      const button = tag(this.tools, "button", { type: "button", onclick: () => this.save(kind) }, kind);
      button.setAttribute("aria-label", `Download ${this.title} as ${kind}`);
    }
    this.listen();
    new ResizeObserver(() => { if (this.canvas.clientWidth !== this.width) this.render(); }).observe(this.canvas);
    charts.push(this);
  }

  listen() {
    this.canvas.addEventListener("pointermove", (e) => this.point(e));
    this.canvas.addEventListener("pointerdown", (e) => this.point(e));
    this.canvas.addEventListener("pointerleave", () => this.hide());
    this.canvas.addEventListener("focusout", () => this.hide());
    this.canvas.addEventListener("keydown", (e) => this.key(e));
  }

  render() {
    const why = this.empty(), held = this.canvas.contains(document.activeElement);
    this.figure.hidden = this.optional && Boolean(why);
    this.width = this.canvas.clientWidth;
    this.tools.hidden = Boolean(why);
    this.hide();
    if (why || !this.width) {
      this.canvas.replaceChildren();
      if (why) tag(this.canvas, "p", { className: "empty" }, why);
      return;
    }
    const frame = blank(this.width, this.height(this.width), this.margins);
    this.drawn = this.draw(frame);
    this.cursor = node(frame.svg, "g", { "pointer-events": "none" });
    this.frame = frame;
    frame.svg.setAttribute("role", "group");
    frame.svg.setAttribute("aria-roledescription", "chart");
    frame.svg.setAttribute("aria-label", `${this.title}. ${this.drawn.label} Arrow keys read the values.`);
    frame.svg.setAttribute("tabindex", "0");
    this.canvas.replaceChildren(frame.svg);
    if (held) frame.svg.focus();
  }

  point(event) {
    if (!this.drawn || !this.frame) return;
    const box = this.frame.svg.getBoundingClientRect();
    const found = this.drawn.locate(((event.clientX - box.left) * this.frame.width) / box.width, ((event.clientY - box.top) * this.frame.height) / box.height);
    if (found) this.show(found, false); else this.hide();
  }

  key(event) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-1e9, 0], End: [1e9, 0] }[event.key];
    if (event.key === "Escape") this.hide();
    if (!step || !this.drawn) return;
    event.preventDefault();
    const clamp = (v, n) => Math.max(0, Math.min(v, n - 1));
    this.show([clamp(this.at[0] + step[0], this.drawn.cols), clamp(this.at[1] + step[1], this.drawn.rows || 1)], true);
  }

  show(at, spoken) {
    this.at = at;
    const cell = this.drawn.cell(...at), tip = byId("tip"), box = this.frame.svg.getBoundingClientRect();
    const scale = box.width / this.frame.width, { left, right, top, bottom } = this.frame;
    this.cursor.replaceChildren();
    if (cell.box) node(this.cursor, "rect", { ...cell.box, fill: "none", stroke: this.frame.ink, "stroke-width": 1.5 });
    else node(this.cursor, "line", { x1: cell.x, x2: cell.x, y1: top, y2: bottom, stroke: this.frame.muted, "stroke-dasharray": "3 3" });
    for (const dot of cell.dots || []) node(this.cursor, "circle", { cx: dot.x, cy: dot.y, r: 4, fill: dot.paint });
    tip.textContent = cell.text;
    tip.hidden = false;
    const x = box.left + cell.x * scale, y = box.top + (cell.y ?? top) * scale;
    tip.style.left = `${Math.max(4, Math.min(x + 14 + tip.offsetWidth > innerWidth ? x - 14 - tip.offsetWidth : x + 14, innerWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.max(4, Math.min(y + 10, innerHeight - tip.offsetHeight - 4))}px`;
    if (spoken) byId("spoken").textContent = cell.text;
  }

  hide() {
    if (this.cursor) this.cursor.replaceChildren();
    byId("tip").hidden = true;
  }

  picture() {
    const entries = this.legend ? this.legend() : [];
    const extra = 34 + (entries.length ? 24 * Math.ceil(entries.length / 3) : 0);
    const width = 900, margins = { ...this.margins, top: this.margins.top + extra };
    const frame = blank(width, this.height(width) + extra, margins);
    this.draw(frame);
    words(frame, frame.left, 24, this.title, { "text-anchor": "start", "font-size": 16, "font-weight": 600 });
    keys(frame, entries, 48);
    return frame;
  }

  save(kind) {
    if (kind === "CSV") return download(`${this.id}.csv`, new Blob([csv(this.drawn.csv())], { type: "text/csv" }));
    const { svg, width, height } = this.picture();
    const blob = new Blob([new XMLSerializer().serializeToString(svg)], { type: "image/svg+xml" });
    if (kind === "SVG") return download(`${this.id}.svg`, blob);
    const image = new Image(), url = URL.createObjectURL(blob);
    image.onload = () => {
      const canvas = Object.assign(document.createElement("canvas"), { width: 2 * width, height: 2 * height });
      canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
      URL.revokeObjectURL(url);
      canvas.toBlob((png) => download(`${this.id}.png`, png));
    };
    image.src = url;
  }
}

// A cell that a spreadsheet would take for a formula is marked as text.
function csv(rows) {
  const cell = (value) => {
    if (value == null) return "";
    let text = String(value);
    if (typeof value === "string" && /^[=+\-@\t\r]/.test(text) && isNaN(Number(text))) text = `'${text}`;
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

function download(name, blob) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
