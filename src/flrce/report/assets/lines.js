// Recipes compared: accuracy with bands, and bars; and the conflicts of one run.

const hidden = new Set();
const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;
const visible = () => data.recipes.map((recipe, i) => [recipe, i]).filter(([, i]) => !hidden.has(i));
const AXIS = { ...data.axes, rounds: "round" };
const unit = (name) => data.units[name] || { per: 1, name: "" };
const axisName = (axis) => (axis === "rounds" ? "round" : `${AXIS[axis]}, ${unit(axis).name}`);
const legendOf = () => visible().map(([recipe, i]) => [recipe.label, seriesColour(i), dash(i)]);

function between(xs, ys, x) {
  if (!xs.length) return null;
  if (x <= xs[0]) return x < xs[0] ? null : ys[0];
  if (x >= xs[xs.length - 1]) return ys[ys.length - 1];
  let i = 1;
  while (xs[i] < x) i++;
  return ys[i - 1] + ((ys[i] - ys[i - 1]) * (x - xs[i - 1])) / (xs[i] - xs[i - 1] || 1);
}

const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

// One run's own points along an axis.
function courseOf(run, axis, averaged) {
  const found = [];
  run.t.forEach((t, i) => {
    const y = averaged && run.averaged[i] != null ? run.averaged[i] : run.accuracy[i];
    if (y != null) found.push([run[axis][i], y]);
  });
  return found;
}

const KINDS = { raw: "model of the round", averaged: "final model", smooth: "model of the round, running mean" };

// The y axis: from 0 (of shares to the next ten), or with "zoom in" the range of the curves themselves, none of which
// is cut; bands may be.
function range(shown) {
  const per = data.metric.per, share = per !== 1, zoomed = byId("zoom").checked;
  const seen = shown.flatMap(({ curve: [, mean, half] }) => mean.flatMap((m, j) => (zoomed ? [m] : [m - (half?.[j] || 0), m + (half?.[j] || 0)]))).map((v) => v / per);
  if (!seen.length) return [0, share ? 100 : 1];
  const low = Math.min(...seen), top = Math.max(...seen), room = 0.08 * Math.max(top - low, share ? 4 : Math.abs(top) * 1e-3 || 1);
  if (share && !zoomed) return [0, Math.min(100, Math.ceil(Math.max(top, 10) / 10) * 10)];
  return [low - room < 0 && low >= 0 ? 0 : low - room, share ? Math.min(100, top + room) : top + room];
}

let clips = 0;
function clip(frame) {
  frame.clip = `clip${clips++}`;
  node(node(frame.svg, "clipPath", { id: frame.clip }), "rect", { x: frame.left, y: frame.top, width: Math.max(frame.right - frame.left, 0), height: Math.max(frame.bottom - frame.top, 0) });
}

function stopLine(frame, at) {
  node(frame.svg, "line", { x1: at, x2: at, y1: frame.top, y2: frame.bottom, stroke: frame.ink, "stroke-width": 1.4, class: "stop" });
  words(frame, at - 6, frame.top + 10, "stop", { "text-anchor": "end" });
}

// Loss on the hold-outs and of the clients while they trained.
function drawLoss(frame) {
  const run = now(), last = Math.max(run.t.at(-1), 2), has = (list) => run.t.map((_, i) => i).filter((i) => list[i] != null);
  const series = [["on the hold-outs, last model", run.loss, colour("s0"), ""], ["while training, first epoch", run.training, colour("s1"), "2 3"]];
  const most = 1.05 * Math.max(...run.loss, ...run.training, 0.01);
  const [x, y] = axes(frame, { low: 0, high: last, name: "round" }, { low: 0, high: most });
  for (const [, list, paint, style] of series) node(frame.svg, "path", { d: path(has(list).map((i) => [x(run.t[i]), y(list[i])])), fill: "none", stroke: paint, "stroke-width": 2, "stroke-dasharray": style });
  keys(frame, series.map(([name, , paint, style]) => [name, paint, style]), frame.top - 32);
  return {
    cols: run.t.length, label: `Ends at ${number(run.loss.filter((v) => v != null).at(-1))} on the hold-outs.`,
    locate: (px) => (px < frame.left - 6 || px > frame.right + 6 ? null : [nearest(run.t, ((px - frame.left) / (frame.right - frame.left)) * last), 0]),
    cell: (i) => ({ x: x(run.t[i]), y: frame.top, text: `round ${run.t[i]}\nhold-outs ${number(run.loss[i])}\ntraining ${number(run.training[i])}` }),
    csv: () => [["round", "loss", "training_loss"], ...run.t.map((t, i) => [t, run.loss[i], run.training[i]])],
  };
}

function drawAccuracy(frame) {
  const axis = chosen("axis"), kind = chosen("kind"), per = unit(axis).per;
  const shown = visible().map(([recipe, i]) => ({ recipe, i, curve: recipe.curves[kind][axis] })).filter((s) => s.curve[0].length);
  const runsOf = (i) => data.runs.filter((run) => run.recipe === i);
  const high = Math.max(...shown.map((s) => s.curve[0].at(-1)), axis === "rounds" ? 2 : 0) / per || 1;
  const [low, top] = range(shown);
  const [x, y] = axes(frame, { low: 0, high, name: axisName(axis) }, { low, high: top, name: `${data.metric.name}, ${KINDS[kind]}` });
  const scale = 1 / data.metric.per, sign = data.metric.per === 1 ? "" : " %", places = data.metric.per === 1 ? 4 : 1;
  clip(frame);
  for (const { i, curve: [xs, mean, half] } of shown) {
    const at = (v, j) => [x(xs[j] / per), y(Math.max(low, Math.min(scale * v, top)))];
    if (half) {
      const upper = mean.map((m, j) => at(m + half[j], j)), lower = mean.map((m, j) => at(m - half[j], j)).reverse();
      node(frame.svg, "path", { d: `${path([...upper, ...lower])}Z`, fill: seriesColour(i), opacity: Math.max(0.035, 0.12 / Math.sqrt(shown.length) ** 1.5), class: "band" });
    }
    if (byId("seeds").checked) for (const run of runsOf(i)) {
      const points = courseOf(run, axis, kind === "averaged").map(([a, b]) => [x(a / per), y(scale * b)]);
      node(frame.svg, "path", { d: path(points), fill: "none", stroke: seriesColour(i), "stroke-width": 1, opacity: 0.45, class: "seed", "clip-path": `url(#${frame.clip})` });
    }
  }
  for (const { i, curve: [xs, mean] } of shown) {
    const points = mean.map((m, j) => [x(xs[j] / per), y(scale * m)]);
    node(frame.svg, "path", { d: path(points), fill: "none", stroke: seriesColour(i), "stroke-width": 2.2, "stroke-dasharray": dash(i), class: "mean", "clip-path": `url(#${frame.clip})` });
    for (const run of runsOf(i)) {
      const end = courseOf(run, axis, false).at(-1);
      if (!run.stop || !end) continue;
      const level = between(xs, mean, end[0]);
      if (level != null) node(frame.svg, "circle", { cx: x(end[0] / per), cy: y(scale * level), r: 4, fill: frame.paper, stroke: seriesColour(i), "stroke-width": 2, class: "stop" });
    }
  }
  if (data.runs.some((run) => run.stop)) keys({ ...frame, left: Math.max(frame.left, frame.right - 190) }, [["a rule ended a run here", frame.muted, "ring"]], frame.bottom - 10);
  const cols = axis === "rounds" ? Math.round(high) : 120;
  const place = (i) => (axis === "rounds" ? i + 1 : (high * (i + 1)) / cols);
  return {
    cols, label: shown.map((s) => `${s.recipe.label} ends at ${number(scale * s.curve[1].at(-1))}${sign}.`).join(" "),
    locate: (px) => (px < frame.left - 4 || px > frame.right + 4 ? null : [Math.max(0, Math.min(cols - 1, Math.round(((px - frame.left) / (frame.right - frame.left)) * (axis === "rounds" ? high : cols)) - 1)), 0]),
    cell: (i) => {
      const v = place(i), lines = [], dots = [];
      for (const { recipe, i: n, curve: [xs, mean, half] } of shown) {
        const m = between(xs, mean, v * per);
        if (m == null) continue;
        const h = half && between(xs, half, v * per);
        lines.push(`${recipe.label}: ${(scale * m).toFixed(places)}${sign}${h == null ? "" : ` ± ${(scale * h).toFixed(places)}`}`);
        dots.push({ x: x(v), y: y(scale * m), paint: seriesColour(n) });
      }
      return { x: x(v), text: [`${AXIS[axis]} ${number(v)} ${axis === "rounds" ? "" : unit(axis).name}`, ...lines].join("\n"), dots };
    },
    csv: () => [["recipe", axisName(axis), data.metric.name, "half_width_95"], ...shown.flatMap(({ recipe, curve: [xs, mean, half] }) => xs.map((v, j) => [recipe.label, v / per, mean[j], half ? half[j] : null]))],
  };
}

// Bars per recipe; parts are stacked figures [figure, heading, opacity], whisker the figure of the interval.
const drawBars = (parts, whisker, scale) => (frame) => {
  const { per, name } = scale(), shown = visible(), n = Math.max(shown.length, 1);
  const whole = (recipe) => recipe.figures[whisker][0] || 0, half = (recipe) => recipe.figures[whisker][1] || 0;
  const most = Math.max(...shown.map(([r]) => (whole(r) + half(r)) / per), 0) * 1.06 || 1;
  const slot = (frame.right - frame.left) / n, wide = Math.min(slot * 0.62, 74);
  const tilted = shown.some(([r]) => 6.8 * short(r.label, 22).length > slot);
  if (!tilted) frame.bottom += 34;
  const [, y] = axes(frame, { low: 0, high: n, ticks: [], name: "" }, { low: 0, high: most, name });
  const stacked = shown.length ? parts(shown[0][0]) : [];
  if (stacked.length > 1) keys({ ...frame, left: frame.left + 60 }, stacked.map(([, head, opacity]) => [head, frame.ink, opacity < 1 ? "pale" : "box"]), frame.top - 9);
  shown.forEach(([recipe, i], j) => {
    const middle = frame.left + slot * (j + 0.5);
    let base = 0;
    for (const [value, , opacity] of parts(recipe)) {
      const top = base + (value || 0) / per;
      node(frame.svg, "rect", { x: middle - wide / 2, y: y(top), width: wide, height: Math.max(y(base) - y(top), 0), fill: seriesColour(i), opacity, class: "bar" });
      base = top;
    }
    const m = whole(recipe) / per, h = half(recipe) / per;
    if (h) node(frame.svg, "path", { d: `M${middle} ${y(Math.max(m - h, 0))}V${y(m + h)}M${middle - 5} ${y(Math.max(m - h, 0))}h10M${middle - 5} ${y(m + h)}h10`, stroke: frame.ink, "stroke-width": 1.4, fill: "none" });
    const below = tilted
      ? { "text-anchor": "end", transform: `rotate(-32 ${middle} ${frame.bottom + 14})` } : {};
    words(frame, middle, frame.bottom + (tilted ? 14 : 18), short(recipe.label, tilted ? 13 : 22), below);
  });
  const text = ([recipe]) => [`${recipe.label}: ${number(whole(recipe) / per, 4)}${half(recipe) ? ` ± ${number(half(recipe) / per)}` : ""} ${name}`,
    ...(parts(recipe).length > 1 ? parts(recipe).map(([value, head]) => `${head}: ${number((value || 0) / per, 4)} ${name}`) : [])].join("\n");
  return {
    cols: shown.length, label: shown.map((s) => text(s).split("\n")[0]).join("; ") + ".",
    locate: (px) => (px < frame.left || px > frame.right || !shown.length ? null : [Math.min(shown.length - 1, Math.floor((px - frame.left) / slot)), 0]),
    cell: (j) => ({ x: frame.left + slot * (j + 0.5), text: shown[j] ? text(shown[j]) : "" , y: frame.top }),
    csv: () => [["recipe", name || whisker, "half_width_95", ...parts(data.recipes[0]).map((p) => p[1])], ...shown.map(([r]) => [r.label, whole(r) / per, r.figures[whisker][1] == null ? null : half(r) / per, ...parts(r).map(([v]) => v / per)])],
  };
};

const now = () => data.runs[Number(byId("run").value)];
// "explore" or "exploit" where the method draws between the two.
const phaseOf = (run, i) => (!run.phases ? "" : run.exploit[i] ? "exploit" : "explore");

function drawConflicts(frame) {
  const run = now(), last = Math.max(run.t.at(-1), 2);
  const most = 1.06 * Math.max(...run.conflicts, run.psi || 0, 1);
  const [x, y] = axes(frame, { low: 0, high: last, name: "round" }, { low: 0, high: most, name: "conflicting peers" });
  const done = run.t.map((t, i) => i).filter((i) => run.outcome[i] === "committed");
  node(frame.svg, "path", { d: path(done.map((i) => [x(run.t[i]), y(run.conflicts[i])])), fill: "none", stroke: frame.line });
  if (run.psi != null) {
    node(frame.svg, "line", { x1: frame.left, x2: frame.right, y1: y(run.psi), y2: y(run.psi), stroke: colour("wasted"), "stroke-dasharray": "6 4", "stroke-width": 1.6, class: "psi" });
    words(frame, frame.left + 6, y(run.psi) - 6, `ψ = ${number(run.psi)}`, { "text-anchor": "start", fill: colour("wasted") });
  }
  for (const i of done) {
    const paint = colour(run.phases && run.exploit[i] ? "exploit" : "explore");
    node(frame.svg, "circle", { cx: x(run.t[i]), cy: y(run.conflicts[i]), r: run.exploit[i] ? 4 : 3.2, fill: run.exploit[i] ? paint : frame.paper, stroke: paint, "stroke-width": 1.6 });
  }
  if (run.decided === "conflicts" && done.length) stopLine(frame, x(run.t[done.at(-1)]));
  if (run.phases) keys(frame, [["explore", colour("explore"), "ring"], [run.psi == null ? "exploit" : "exploit: the rule looks", colour("exploit"), "dot"]], frame.top - 32);
  return {
    cols: run.t.length, label: run.psi == null ? "The run had no conflict rule." : `Threshold psi ${number(run.psi)}; largest value ${number(Math.max(...run.conflicts))}. ${run.stop ? `Stopped: ${run.stop}.` : "Not stopped by a rule."}`,
    locate: (px) => (px < frame.left - 6 || px > frame.right + 6 ? null : [nearest(run.t, ((px - frame.left) / (frame.right - frame.left)) * last), 0]),
    cell: (i) => ({ x: x(run.t[i]), text: `round ${run.t[i]}, ${run.outcome[i] === "committed" ? phaseOf(run, i) || "committed" : run.outcome[i]}\nconflicts ${number(run.conflicts[i])}${run.psi == null ? "" : `, ψ ${number(run.psi)}`}\n${data.metric.name} ${run.accuracy[i] == null ? "–" : (run.accuracy[i] / data.metric.per).toFixed(data.metric.per === 1 ? 4 : 1)}`, dots: [{ x: x(run.t[i]), y: y(run.conflicts[i]), paint: frame.ink }] }),
    csv: () => [["round", "outcome", "exploit", "conflicts", "psi"], ...run.t.map((t, i) => [t, run.outcome[i], run.exploit[i], run.conflicts[i], run.psi])],
  };
}

function drawHeadway(frame) {
  const run = now(), last = Math.max(run.t.at(-1), 2), known = run.t.map((t, i) => i).filter((i) => run.headway[i] != null);
  const all = [...known.map((i) => run.headway[i]), run.least || 0, 0];
  const [x, y] = axes(frame, { low: 0, high: last, name: "round" }, { low: 1.1 * Math.min(...all), high: 1.1 * Math.max(...all, 0.05), name: "cosine with the way so far" });
  const course = known.filter((i) => run.course[i] != null);
  for (const i of known) node(frame.svg, "circle", { cx: x(run.t[i]), cy: y(run.headway[i]), r: 3.2, fill: frame.paper, stroke: colour("explore"), "stroke-width": 1.6 });
  node(frame.svg, "path", { d: path(course.map((i) => [x(run.t[i]), y(run.course[i])])), fill: "none", stroke: colour("exploit"), "stroke-width": 2.2, class: "course" });
  if (run.least != null) {
    node(frame.svg, "line", { x1: frame.left, x2: frame.right, y1: y(run.least), y2: y(run.least), stroke: colour("wasted"), "stroke-dasharray": "6 4", "stroke-width": 1.6, class: "least" });
    words(frame, frame.left + 6, y(run.least) - 6, `below ${number(run.least, 2)}: standstill`, { "text-anchor": "start", fill: colour("wasted") });
  }
  if (run.decided === "headway") stopLine(frame, x(run.t.at(-1)));
  keys(frame, [["a round", colour("explore"), "ring"], ...(course.length ? [["mean the rule looks at", colour("exploit"), ""]] : [])], frame.top - 32);
  return {
    cols: run.t.length, label: run.least == null ? "The run had no standstill rule." : `A mean below ${number(run.least)} is a standstill. ${run.stop ? `Stopped: ${run.stop}.` : "Not stopped by a rule."}`,
    locate: (px) => (px < frame.left - 6 || px > frame.right + 6 ? null : [nearest(run.t, ((px - frame.left) / (frame.right - frame.left)) * last), 0]),
    cell: (i) => ({ x: x(run.t[i]), y: frame.top, text: `round ${run.t[i]}\nheadway ${run.headway[i] == null ? "–" : number(run.headway[i])}${run.course[i] == null ? "" : `, mean ${number(run.course[i])}`}` }),
    csv: () => [["round", "headway", "mean", "least"], ...run.t.map((t, i) => [t, run.headway[i], run.course[i], run.least])],
  };
}

function drawFigure(frame) {
  const run = now(), name = byId("figure").value, values = run.figures[name], last = Math.max(run.t.at(-1), 2);
  const known = run.t.map((t, i) => i).filter((i) => values[i] != null), all = known.map((i) => values[i]);
  const low = Math.min(...all), high = Math.max(...all), room = 0.06 * (high - low || Math.abs(high) || 1);
  const [x, y] = axes(frame, { low: 0, high: last, name: "round" }, { low: low >= 0 && low < 0.5 * high ? 0 : low - room, high: high + room, name });
  node(frame.svg, "path", { d: path(known.map((i) => [x(run.t[i]), y(values[i])])), fill: "none", stroke: colour("exploit"), "stroke-width": 2.2, class: "course" });
  return {
    cols: run.t.length, label: `${name} of each round.`,
    locate: (px) => (px < frame.left - 6 || px > frame.right + 6 ? null : [nearest(run.t, ((px - frame.left) / (frame.right - frame.left)) * last), 0]),
    cell: (i) => ({ x: x(run.t[i]), y: frame.top, text: `round ${run.t[i]}\n${name} ${values[i] == null ? "–" : number(values[i])}` }),
    csv: () => [["round", ...Object.keys(run.figures)], ...run.t.map((t, i) => [t, ...Object.values(run.figures).map((series) => series[i])])],
  };
}

function drawWorth(frame) {
  const run = now(), w = run.worth, last = Math.max(run.t.at(-1), 2);
  const most = Math.min(1.1 * Math.max(...w.value, ...w.limit), 6 * Math.max(...w.limit, 1e-9)), low = Math.min(0, 1.1 * Math.min(...w.value));
  const [x, y] = axes(frame, { low: 0, high: last, name: "round" }, { low, high: most, name: w.unit || w.name });
  const line = (values) => path(w.looks.map((t, i) => [x(t), y(Math.min(values[i], most))]));
  node(frame.svg, "path", { d: line(w.value), fill: "none", stroke: colour("exploit"), "stroke-width": 2.2, class: "gain" });
  node(frame.svg, "path", { d: line(w.limit), fill: "none", stroke: colour("wasted"), "stroke-dasharray": "6 4", "stroke-width": 1.6, class: "price" });
  if (run.decided === w.name) stopLine(frame, x(run.t.at(-1)));
  keys(frame, [[w.title, colour("exploit"), ""], [w.limit_name, colour("wasted"), "6 4"]], frame.top - 32);
  return {
    cols: w.looks.length, label: `At the last look: ${w.title} ${number(w.value.at(-1))}${w.unit ? ` (${w.unit})` : ""}; ${w.limit_name} ${number(w.limit.at(-1))}. ${run.stop ? `Stopped: ${run.stop}.` : "Not stopped by a rule."}`,
    locate: (px) => (px < frame.left - 6 || px > frame.right + 6 ? null : [nearest(w.looks, ((px - frame.left) / (frame.right - frame.left)) * last), 0]),
    cell: (i) => ({ x: x(w.looks[i]), y: frame.top, text: `round ${w.looks[i]}\n${w.title}: ${number(w.value[i])}${w.unit ? ` (${w.unit})` : ""}\n${w.limit_name} ${number(w.limit[i])}` }),
    csv: () => [["round", w.name, w.limit_name], ...w.looks.map((t, i) => [t, w.value[i], w.limit[i]])],
  };
}

// Joules a point, on a scale of powers: it doubles and doubles. A look that promises nothing has no price and is a ring at the top.
function drawPoint(frame) {
  const run = now(), p = run.point, last = Math.max(run.t.at(-1), 2), power = Math.log10;
  const known = p.looks.map((t, i) => i).filter((i) => p.joules[i] > 0), may = p.looks.map((t, i) => i).filter((i) => p.most[i] > 0);
  const all = [...known.map((i) => power(p.joules[i])), ...may.map((i) => power(p.most[i]))];
  const low = Math.floor(Math.min(...all)), high = Math.max(Math.ceil(Math.max(...all)), low + 1);
  const step = Math.ceil((high - low) / 6), marks = Array.from({ length: Math.floor((high - low) / step) + 1 }, (v, i) => low + i * step);
  const [x, y] = axes(frame, { low: 0, high: last, name: "round" }, { low, high, ticks: marks, name: `J ${p.per}`, text: (v) => number(10 ** v) });
  const line = (some, values) => path(some.map((i) => [x(p.looks[i]), y(power(values[i]))]));
  node(frame.svg, "path", { d: line(may, p.most), fill: "none", stroke: colour("wasted"), "stroke-dasharray": "6 4", "stroke-width": 1.6, class: "most" });
  node(frame.svg, "path", { d: line(known, p.joules), fill: "none", stroke: colour("exploit"), "stroke-width": 2.2, class: "joules" });
  const nothing = p.looks.filter((t, i) => !(p.joules[i] > 0));
  for (const t of nothing) node(frame.svg, "circle", { cx: x(t), cy: frame.top + 6, r: 3.2, fill: frame.paper, stroke: colour("exploit"), "stroke-width": 1.6 });
  if (run.decided === "gain") stopLine(frame, x(run.t.at(-1)));
  keys(frame, [["estimated cost", colour("exploit"), ""], ...(may.length ? [["it may cost", colour("wasted"), "6 4"]] : []), ...(nothing.length ? [["no predicted gain", colour("exploit"), "ring"]] : [])], frame.top - 32);
  const each = (i) => (p.joules[i] > 0 ? `${number(p.joules[i])} J` : "no predicted gain");
  return {
    cols: p.looks.length, label: `Estimated cost of a point: ${each(known[0])} in round ${p.looks[known[0]]} and ${each(p.looks.length - 1)} in round ${p.looks.at(-1)}.`,
    locate: (px) => (px < frame.left - 6 || px > frame.right + 6 ? null : [nearest(p.looks, ((px - frame.left) / (frame.right - frame.left)) * last), 0]),
    cell: (i) => ({ x: x(p.looks[i]), y: frame.top, text: `round ${p.looks[i]}\na point: ${each(i)}${p.most[i] > 0 ? `\nit may cost ${number(p.most[i])} J` : ""}\npredicted gain from doubling the rounds: up to ${number(p.gain[i])} points` }),
    csv: () => [["round", "joules a point", "bytes a point", "may cost", "predicted points, upper end"], ...p.looks.map((t, i) => [t, p.joules[i], p.bytes[i], p.most[i], p.gain[i]])],
  };
}

function nearest(values, v) {
  let best = 0;
  values.forEach((x, i) => { if (Math.abs(x - v) < Math.abs(values[best] - v)) best = i; });
  return best;
}
