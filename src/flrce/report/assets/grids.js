// Charts of one run's clients: relationship map, selections, labels and costs.

const names = (run) => data.rosters[run.clients];
const labelsOf = (run) => data.partitions[run.partition];

// Indices of the clients in the chosen order.
function ordered(run) {
  const all = names(run).map((_, i) => i), how = chosen("order"), labels = labelsOf(run);
  if (how === "cluster") return run.order.filter((k) => k < all.length);
  if (how === "label" && labels.length) {
    const main = all.map((k) => (labels[k] ? labels[k].indexOf(Math.max(...labels[k])) : 1e9));
    return all.sort((a, b) => main[a] - main[b] || a - b);
  }
  return how === "label" ? all : all.sort((a, b) => names(run)[a].localeCompare(names(run)[b], "en", { numeric: true }));
}

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const mix = (from, to, share) => `rgb(${from.map((v, i) => Math.round(v + (to[i] - v) * share)).join(",")})`;

// A grid of coloured cells as one image, crisp at twice the size of its place.
function cells(frame, columns, rows, paint) {
  const { left, right, top, bottom } = frame;
  const canvas = Object.assign(document.createElement("canvas"), { width: Math.ceil(2 * (right - left)), height: Math.ceil(2 * (bottom - top)) });
  const brush = canvas.getContext("2d"), wide = canvas.width / columns, high = canvas.height / rows;
  for (let j = 0; j < rows; j++) for (let i = 0; i < columns; i++) {
    const from = Math.round(i * wide), down = Math.round(j * high);
    brush.fillStyle = paint(i, j);
    brush.fillRect(from, down, Math.round((i + 1) * wide) - from, Math.round((j + 1) * high) - down);
  }
  node(frame.svg, "image", { href: canvas.toDataURL(), x: left, y: top, width: right - left, height: bottom - top, preserveAspectRatio: "none" });
  node(frame.svg, "rect", { x: left, y: top, width: right - left, height: bottom - top, fill: "none", stroke: frame.grid });
}

// Reading a grid by pointer and keys; text(i, j) describes a cell.
function reading(frame, columns, rows, text) {
  const wide = (frame.right - frame.left) / columns, high = (frame.bottom - frame.top) / rows;
  return {
    cols: columns, rows,
    locate: (x, y) => {
      const i = Math.floor((x - frame.left) / wide), j = Math.floor((y - frame.top) / high);
      return i >= 0 && j >= 0 && i < columns && j < rows ? [i, j] : null;
    },
    cell: (i, j) => ({
      x: frame.left + (i + 0.5) * wide, y: frame.top + (j + 0.5) * high, text: text(i, j),
      box: { x: frame.left + i * wide - 0.5, y: frame.top + j * high - 0.5, width: wide + 1, height: high + 1 },
    }),
  };
}

// Reading a row of n bars; text(i) describes a bar.
function readingBars(frame, n, text) {
  const slot = (frame.right - frame.left) / n;
  return {
    cols: n,
    locate: (x) => (x < frame.left || x >= frame.right ? null : [Math.min(n - 1, Math.floor((x - frame.left) / slot)), 0]),
    cell: (i) => ({ x: frame.left + (i + 0.4) * slot, y: frame.top, text: text(i) }),
  };
}

// Client names along the left edge, as many as fit.
function rowNames(frame, list) {
  const high = (frame.bottom - frame.top) / list.length, every = Math.ceil(11 / high);
  shorten(list, 7).forEach((name, j) => {
    if (j % every === 0) words(frame, frame.left - 6, frame.top + (j + 0.5) * high + 3.5, name, { "text-anchor": "end", "font-size": 10, fill: frame.muted });
  });
}

function columnNames(frame, list, name) {
  const wide = (frame.right - frame.left) / list.length, every = Math.ceil(34 / wide);
  shorten(list, 7).forEach((text, i) => { if (i % every === 0) words(frame, frame.left + (i + 0.5) * wide, frame.bottom + 14, text, { "font-size": 10, fill: frame.muted }); });
  words(frame, (frame.left + frame.right) / 2, frame.bottom + 32, name, { fill: frame.muted });
}

// Omega after the first `steps` recorded rounds, as an M x M array of int8.
function mapAfter(run, steps) {
  const M = run.M, map = new Int8Array(M * M);
  for (let s = 0; s < steps; s++) {
    const bytes = Uint8Array.from(atob(run.relations.rows[s]), (c) => c.charCodeAt(0)), k = run.relations.k[s], stride = bytes.length / k.length;
    k.forEach((row, i) => map.set(new Int8Array(bytes.buffer, i * stride, stride), row * M));
  }
  return map;
}

function scaleBar(frame, stops, low, high, name) {
  const width = Math.min(150, (frame.right - frame.left) / 2), x = frame.right - width, y = frame.top - 20;
  stops.forEach((paint, i) => node(frame.svg, "rect", { x: x + (i * width) / stops.length, y, width: width / stops.length + 0.6, height: 8, fill: paint }));
  words(frame, x - 6, y + 8, low, { "text-anchor": "end", "font-size": 10, fill: frame.muted });
  words(frame, frame.right, y - 4, high, { "text-anchor": "end", "font-size": 10, fill: frame.muted });
  words(frame, frame.left, y + 8, name, { "text-anchor": "start", "font-size": 10, fill: frame.muted });
}

function drawRelations(frame) {
  const run = now(), order = ordered(run), M = order.length, step = Number(byId("slider").value);
  const map = mapAfter(run, step + 1), fresh = new Set(run.relations.k[step]), list = order.map((k) => names(run)[k]);
  const minus = rgb(colour("minus")), zero = rgb(colour("zero")), plus = rgb(colour("plus"));
  const paint = (v) => mix(zero, v < 0 ? minus : plus, Math.sqrt(Math.abs(v)));
  const value = (j, i) => map[order[j] * run.M + order[i]] / 127;
  cells(frame, M, M, (i, j) => paint(value(j, i)));
  rowNames(frame, list);
  columnNames(frame, list, "agrees with");
  const high = (frame.bottom - frame.top) / M;
  order.forEach((k, j) => { if (fresh.has(k)) node(frame.svg, "rect", { x: frame.right + 3, y: frame.top + j * high, width: 5, height: Math.max(high - 0.5, 1), fill: colour("exploit"), class: "fresh" }); });
  scaleBar(frame, [-1, -0.6, -0.3, -0.1, 0, 0.1, 0.3, 0.6, 1].map(paint), "−1", "+1", `round ${run.relations.t[step]}`);
  return {
    ...reading(frame, M, M, (i, j) => (i === j ? `${list[j]}: itself` : `${list[j]} with ${list[i]}\nΩ = ${value(j, i).toFixed(2)}${fresh.has(order[j]) ? "\nupdated in this round" : ""}`)),
    label: `${M} by ${M} clients after round ${run.relations.t[step]}; ${fresh.size} rows were updated.`,
    csv: () => [["client", ...list], ...list.map((name, j) => [name, ...list.map((_, i) => Number(value(j, i).toFixed(3)))])],
  };
}

function drawSelections(frame) {
  const run = now(), order = ordered(run), list = order.map((k) => names(run)[k]), M = list.length, T = run.t.length;
  const place = new Map(order.map((k, j) => [k, j])), wide = (frame.right - frame.left) / T, high = (frame.bottom - frame.top) / M;
  const marks = { explore: "", exploit: "", wasted: "" };
  run.chosen.forEach((list, i) => list.forEach((k) => {
    const kind = run.rejected[i].includes(k) ? "wasted" : run.exploit[i] ? "exploit" : "explore";
    const gap = Math.min(1, wide / 6);
    marks[kind] += `M${(frame.left + i * wide).toFixed(2)} ${(frame.top + place.get(k) * high).toFixed(2)}h${(wide - gap).toFixed(2)}v${Math.max(high - Math.min(1, high / 6), 0.8).toFixed(2)}h${(gap - wide).toFixed(2)}z`;
  }));
  node(frame.svg, "rect", { x: frame.left, y: frame.top, width: frame.right - frame.left, height: frame.bottom - frame.top, fill: colour("panel"), stroke: frame.grid });
  for (const [kind, d] of Object.entries(marks)) if (d) node(frame.svg, "path", { d, fill: colour(kind), class: kind });
  rowNames(frame, list);
  columnNames(frame, run.t.map(String), "round");
  const head = run.phases ? [["explore", colour("explore"), "box"], ["exploit", colour("exploit"), "box"]] : [["chosen", colour("explore"), "box"]];
  if (marks.wasted) head.push(["rejected", colour("wasted"), "box"]);
  keys(frame, head, frame.top - 12);
  const state = (i, k) => (!run.chosen[i].includes(k) ? "not chosen" : run.rejected[i].includes(k) ? "chosen, rejected" : ["chosen", phaseOf(run, i)].filter(Boolean).join(", "));
  const times = order.map((k) => run.chosen.filter((c) => c.includes(k)).length);
  return {
    ...reading(frame, T, M, (i, j) => `${list[j]}, round ${run.t[i]}\n${state(i, order[j])}\nchosen ${times[j]} times in total`),
    label: run.phases ? `${run.exploit.filter(Boolean).length} of ${T} rounds exploit.` : `${T} rounds.`,
    csv: () => [["round", "outcome", "exploit", "client", "rejected"], ...run.t.flatMap((t, i) => run.chosen[i].map((k) => [t, run.outcome[i], run.exploit[i], names(run)[k], run.rejected[i].includes(k) ? 1 : 0]))],
  };
}

function drawPartition(frame) {
  const run = now(), labels = labelsOf(run), order = ordered(run).filter((k) => labels[k]), list = order.map((k) => names(run)[k]);
  const classes = run.classes, most = Math.max(...labels.flat(), 1), zero = rgb(colour("zero")), full = rgb(colour("full"));
  const paint = (n) => mix(zero, full, Math.sqrt(n / most));
  cells(frame, classes.length, order.length, (i, j) => paint(labels[order[j]][i]));
  rowNames(frame, list);
  columnNames(frame, classes, "label");
  scaleBar(frame, [0, 0.04, 0.15, 0.3, 0.5, 0.75, 1].map((s) => paint(s * most)), "0", `${most} samples`, "");
  const total = (k) => labels[k].reduce((a, b) => a + b, 0);
  return {
    ...reading(frame, classes.length, order.length, (i, j) => `${list[j]}, label ${classes[i]}\n${labels[order[j]][i]} of ${total(order[j])} samples`),
    label: `${order.length} clients, ${classes.length} labels.`,
    csv: () => [["client", ...classes], ...order.map((k, j) => [list[j], ...labels[k]])],
  };
}

function drawCosts(frame) {
  const run = now(), what = chosen("cost"), { per, name } = unitFor(what, run), useful = run.costs[what], wasted = run.costs[`${what}_wasted`];
  const order = useful.map((_, k) => k).sort((a, b) => useful[b] + wasted[b] - useful[a] - wasted[a] || a - b);
  const n = order.length, slot = (frame.right - frame.left) / n, list = order.map((k) => names(run)[k]);
  const most = Math.max(...order.map((k) => useful[k] + wasted[k])) / per || 1;
  const [, y] = axes(frame, { low: 0, high: n, ticks: [], name: "" }, { low: 0, high: most, name });
  order.forEach((k, i) => {
    const x = frame.left + i * slot, width = Math.max(slot * 0.8, 0.7), a = y(useful[k] / per), b = y((useful[k] + wasted[k]) / per);
    node(frame.svg, "rect", { x, y: a, width, height: frame.bottom - a, fill: colour("useful"), class: "useful" });
    if (wasted[k]) node(frame.svg, "rect", { x, y: b, width, height: a - b, fill: colour("wasted"), class: "wasted" });
  });
  columnNames(frame, list, "clients, highest cost first");
  keys({ ...frame, left: frame.left + 110 }, [["useful", colour("useful"), "box"], ["wasted", colour("wasted"), "box"]], frame.top - 10);
  return {
    ...readingBars(frame, n, (i) => `${list[i]}\nuseful ${number(useful[order[i]] / per)} ${name}\nwasted ${number(wasted[order[i]] / per)} ${name}\nchosen ${run.costs.n[order[i]]} times`),
    label: `Highest: ${list[0]} with ${number((useful[order[0]] + wasted[order[0]]) / per)} ${name}.`,
    csv: () => clientTable(run),
  };
}

// Bars of the primary metric: read(run) gives [values, names, the axis' name, whether the worst come first].
const drawServed = (read) => (frame) => {
  const [values, list, name, sorted] = read(now()), known = values.map((v, k) => k).filter((k) => values[k] != null);
  const { name: head, per, lower } = now().served, share = per !== 1, sign = lower ? -1 : 1;
  const order = sorted ? known.sort((a, b) => sign * (values[a] - values[b]) || a - b) : known, n = order.length, slot = (frame.right - frame.left) / n;
  const shown = (v) => (share ? `${(v / per).toFixed(1)} %` : number(v, 4)), all = order.map((k) => values[k]);
  const mean = all.reduce((sum, v) => sum + v, 0) / n, low = Math.min(0, ...all) / per, high = share ? 100 : 1.1 * Math.max(...all, 1e-12);
  const [, y] = axes(frame, { low: 0, high: n, ticks: [], name: "" }, { low, high, name: head.toLowerCase() === "accuracy %" ? "accuracy %" : head });
  order.forEach((k, i) => node(frame.svg, "rect", { x: frame.left + i * slot, y: Math.min(y(values[k] / per), y(0)), width: Math.max(slot * 0.8, 0.7), height: Math.abs(y(0) - y(values[k] / per)), fill: colour("s0"), class: "served" }));
  node(frame.svg, "line", { x1: frame.left, x2: frame.right, y1: y(mean / per), y2: y(mean / per), stroke: frame.ink, "stroke-dasharray": "4 3" });
  keys({ ...frame, left: frame.left + 90 }, [[`mean ${shown(mean)}`, frame.ink, "4 3"]], frame.top - 10);
  columnNames(frame, order.map((k) => String(list[k])), name);
  return {
    ...readingBars(frame, n, (i) => `${list[order[i]]}\n${shown(values[order[i]])}`),
    label: `From ${shown(Math.min(...all))} to ${shown(Math.max(...all))}.`,
    csv: () => [[name.split(",")[0], head.replace(" %", "").toLowerCase()], ...order.map((k) => [list[k], values[k]])],
  };
};

// The unit for one client's costs, which is smaller than that of the whole run.
function unitFor(what, run) {
  const most = Math.max(...run.costs[what].map((v, k) => v + run.costs[`${what}_wasted`][k]));
  const [per, name] = data.scales[what].find(([s]) => most >= s) || data.scales[what].at(-1);
  return { per, name };
}

const clientCosts = [...document.querySelectorAll('input[name="cost"]')].map((input) => input.value);
const clientTable = (run) => [["client", "rounds", ...clientCosts.flatMap((cost) => [`${cost} useful`, `${cost} wasted`])],
  ...names(run).map((name, k) => [name, run.costs.n[k], ...clientCosts.flatMap((cost) => [run.costs[cost][k], run.costs[`${cost}_wasted`][k]])])];
