// Charts of recipes (curves with bands, bars) and of the rounds of one run.

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
  if (data.runs.some((run) => run.stop)) keys({ ...frame, left: Math.max(frame.left, frame.right - 190) }, [["a stop rule ended a run", frame.muted, "ring"]], frame.bottom - 10);
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
  const labels = shorten(shown.map(([r]) => r.label), tilted ? 13 : 22);
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
    words(frame, middle, frame.bottom + (tilted ? 14 : 18), labels[j], below);
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
// "explore" or "exploit" if the method draws between the two.
const phaseOf = (run, i) => (!run.phases ? "" : run.exploit[i] ? "exploit" : "explore");
const stopped = (run) => (run.stop ? `Stopped: ${run.stop}.` : "Not stopped by a rule.");

// A chart over the rounds of a run. lines: { values, paint, dash, width, name }; points: { i, v, paint, fill, r };
// level: a horizontal line { at, text, name }; text(i) describes round i; stop marks the last round.
function roundChart(frame, { rounds = now().t, ys, lines = [], points = [], level = null, stop = false, legend = [], label, text, csv }) {
  const last = Math.max(now().t.at(-1), 2);
  const [x, y] = axes(frame, { low: 0, high: last, name: "round" }, ys);
  for (const { values, paint, dash = "", width = 2.2, name = "" } of lines) {
    const drawn = rounds.map((t, i) => [t, values[i]]).filter(([, v]) => v != null);
    node(frame.svg, "path", { d: path(drawn.map(([t, v]) => [x(t), y(v)])), fill: "none", stroke: paint, "stroke-width": width, "stroke-dasharray": dash, class: name });
  }
  for (const { i, v, paint, fill = frame.paper, r = 3.2 } of points) {
    node(frame.svg, "circle", { cx: x(rounds[i]), cy: y(v), r, fill, stroke: paint, "stroke-width": 1.6 });
  }
  if (level && level.at != null) {
    const at = y(level.at), paint = colour("wasted");
    node(frame.svg, "line", { x1: frame.left, x2: frame.right, y1: at, y2: at, stroke: paint, "stroke-dasharray": "6 4", "stroke-width": 1.6, class: level.name });
    words(frame, frame.left + 6, at - 6, level.text, { "text-anchor": "start", fill: paint });
  }
  if (stop) {
    const at = x(now().t.at(-1));
    node(frame.svg, "line", { x1: at, x2: at, y1: frame.top, y2: frame.bottom, stroke: frame.ink, "stroke-width": 1.4, class: "stop" });
    words(frame, at - 6, frame.top + 10, "stop", { "text-anchor": "end" });
  }
  keys(frame, legend, frame.top - 32);
  const toRound = linear(frame.left, frame.right, 0, last);
  return {
    cols: rounds.length, label, csv,
    locate: (px) => (px < frame.left - 6 || px > frame.right + 6 ? null : [nearest(rounds, toRound(px)), 0]),
    cell: (i) => ({ x: x(rounds[i]), y: frame.top, text: `round ${rounds[i]}${text(i)}` }),
  };
}

function drawLoss(frame) {
  const run = now(), finals = run.loss.filter((v) => v != null);
  const series = [["hold-outs, last model", run.loss, colour("s0"), ""], ["training, first epoch", run.training, colour("s1"), "2 3"]];
  return roundChart(frame, {
    ys: { low: 0, high: 1.05 * Math.max(...run.loss, ...run.training, 0.01) },
    lines: series.map(([, values, paint, dash]) => ({ values, paint, dash, width: 2 })),
    legend: series.map(([name, , paint, dash]) => [name, paint, dash]),
    label: `Ends at ${number(finals.at(-1))} on the hold-outs.`,
    text: (i) => `\nhold-outs ${number(run.loss[i])}\ntraining ${number(run.training[i])}`,
    csv: () => [["round", "loss", "training_loss"], ...run.t.map((t, i) => [t, run.loss[i], run.training[i]])],
  });
}

function drawConflicts(frame) {
  const run = now(), committed = run.t.map((t, i) => i).filter((i) => run.outcome[i] === "committed");
  const metric = (v) => (v == null ? "–" : (v / data.metric.per).toFixed(data.metric.per === 1 ? 4 : 1));
  const points = committed.map((i) => {
    const paint = colour(run.phases && run.exploit[i] ? "exploit" : "explore");
    return { i, v: run.conflicts[i], paint, fill: run.exploit[i] ? paint : frame.paper, r: run.exploit[i] ? 4 : 3.2 };
  });
  const exploit = run.psi == null ? "exploit" : "exploit: checked by the stop rule";
  return roundChart(frame, {
    ys: { low: 0, high: 1.06 * Math.max(...run.conflicts, run.psi || 0, 1), name: "conflicting peers" },
    lines: [{ values: run.conflicts.map((v, i) => (run.outcome[i] === "committed" ? v : null)), paint: frame.line, width: 1 }],
    points, level: { at: run.psi, text: `ψ = ${number(run.psi)}`, name: "psi" },
    stop: run.decided === "conflicts" && committed.length > 0,
    legend: run.phases ? [["explore", colour("explore"), "ring"], [exploit, colour("exploit"), "dot"]] : [],
    label: run.psi == null ? "The run had no conflict rule." : `Threshold psi ${number(run.psi)}; largest value ${number(Math.max(...run.conflicts))}. ${stopped(run)}`,
    text: (i) => `, ${run.outcome[i] === "committed" ? phaseOf(run, i) || "committed" : run.outcome[i]}\nconflicts ${number(run.conflicts[i])}${run.psi == null ? "" : `, ψ ${number(run.psi)}`}\n${data.metric.name} ${metric(run.accuracy[i])}`,
    csv: () => [["round", "outcome", "exploit", "conflicts", "psi"], ...run.t.map((t, i) => [t, run.outcome[i], run.exploit[i], run.conflicts[i], run.psi])],
  });
}

function drawHeadway(frame) {
  const run = now(), measured = run.t.map((t, i) => i).filter((i) => run.headway[i] != null);
  const all = [...measured.map((i) => run.headway[i]), run.least || 0, 0], hasMeans = run.course.some((v) => v != null);
  return roundChart(frame, {
    ys: { low: 1.1 * Math.min(...all), high: 1.1 * Math.max(...all, 0.05), name: "cosine with earlier progress" },
    lines: [{ values: run.course, paint: colour("exploit"), name: "course" }],
    points: measured.map((i) => ({ i, v: run.headway[i], paint: colour("explore") })),
    level: { at: run.least, text: `limit ${number(run.least, 2)}`, name: "least" },
    stop: run.decided === "headway",
    legend: [["a round", colour("explore"), "ring"], ...(hasMeans ? [["mean that the stop rule checks", colour("exploit"), ""]] : [])],
    label: run.least == null ? "The run had no headway rule." : `The run stops when the mean falls below ${number(run.least)}. ${stopped(run)}`,
    text: (i) => `\nheadway ${number(run.headway[i])}${run.course[i] == null ? "" : `, mean ${number(run.course[i])}`}`,
    csv: () => [["round", "headway", "mean", "least"], ...run.t.map((t, i) => [t, run.headway[i], run.course[i], run.least])],
  });
}

function drawFigure(frame) {
  const run = now(), name = byId("figure").value, values = run.figures[name], all = values.filter((v) => v != null);
  const low = Math.min(...all), high = Math.max(...all), room = 0.06 * (high - low || Math.abs(high) || 1);
  return roundChart(frame, {
    ys: { low: low >= 0 && low < 0.5 * high ? 0 : low - room, high: high + room, name },
    lines: [{ values, paint: colour("exploit"), name: "course" }],
    label: `${name} of each round.`,
    text: (i) => `\n${name} ${number(values[i])}`,
    csv: () => [["round", ...Object.keys(run.figures)], ...run.t.map((t, i) => [t, ...Object.values(run.figures).map((series) => series[i])])],
  });
}

function drawWorth(frame) {
  const run = now(), w = run.worth, unitText = w.unit ? ` (${w.unit})` : "";
  const most = Math.min(1.1 * Math.max(...w.value, ...w.limit), 6 * Math.max(...w.limit, 1e-9));
  const cut = (values) => values.map((v) => Math.min(v, most));
  return roundChart(frame, {
    rounds: w.looks,
    ys: { low: Math.min(0, 1.1 * Math.min(...w.value)), high: most, name: w.unit || w.name },
    lines: [
      { values: cut(w.value), paint: colour("exploit"), name: "gain" },
      { values: cut(w.limit), paint: colour("wasted"), dash: "6 4", width: 1.6, name: "price" },
    ],
    stop: run.decided === w.name,
    legend: [[w.title, colour("exploit"), ""], [w.limit_name, colour("wasted"), "6 4"]],
    label: `At the last evaluation: ${w.title} ${number(w.value.at(-1))}${unitText}; ${w.limit_name} ${number(w.limit.at(-1))}. ${stopped(run)}`,
    text: (i) => `\n${w.title}: ${number(w.value[i])}${unitText}\n${w.limit_name} ${number(w.limit[i])}`,
    csv: () => [["round", w.name, w.limit_name], ...w.looks.map((t, i) => [t, w.value[i], w.limit[i]])],
  });
}

// Joules per point on a logarithmic scale. A round without predicted gain has no price: a ring at the top.
function drawPoint(frame) {
  const run = now(), p = run.point, log = (values) => values.map((v) => (v > 0 ? Math.log10(v) : null));
  const prices = log(p.joules), limits = log(p.most), all = [...prices, ...limits].filter((v) => v != null);
  const low = Math.floor(Math.min(...all)), high = Math.max(Math.ceil(Math.max(...all)), low + 1), step = Math.ceil((high - low) / 6);
  const marks = Array.from({ length: Math.floor((high - low) / step) + 1 }, (v, i) => low + i * step);
  const without = p.looks.map((t, i) => i).filter((i) => prices[i] == null), first = prices.findIndex((v) => v != null);
  const price = (i) => (prices[i] == null ? "no predicted gain" : `${number(p.joules[i])} J`);
  const limited = limits.some((v) => v != null);
  return roundChart(frame, {
    rounds: p.looks,
    ys: { low, high, ticks: marks, name: `J ${p.per}`, text: (v) => number(10 ** v) },
    lines: [
      { values: limits, paint: colour("wasted"), dash: "6 4", width: 1.6, name: "most" },
      { values: prices, paint: colour("exploit"), name: "joules" },
    ],
    points: without.map((i) => ({ i, v: high, paint: colour("exploit") })),
    stop: run.decided === "gain",
    legend: [["estimated cost", colour("exploit"), ""], ...(limited ? [["limit of the stop rule", colour("wasted"), "6 4"]] : []), ...(without.length ? [["no predicted gain", colour("exploit"), "ring"]] : [])],
    label: `Estimated cost of a point: ${price(first)} in round ${p.looks[first]} and ${price(p.looks.length - 1)} in round ${p.looks.at(-1)}.`,
    text: (i) => `\na point: ${price(i)}${p.most[i] > 0 ? `\nlimit of the stop rule: ${number(p.most[i])} J` : ""}\npredicted gain from doubling the rounds: up to ${number(p.gain[i])} points`,
    csv: () => [["round", "joules per point", "bytes per point", "limit", "predicted points, upper end"], ...p.looks.map((t, i) => [t, p.joules[i], p.bytes[i], p.most[i], p.gain[i]])],
  });
}

function nearest(values, v) {
  let best = 0;
  values.forEach((x, i) => { if (Math.abs(x - v) < Math.abs(values[best] - v)) best = i; });
  return best;
}
