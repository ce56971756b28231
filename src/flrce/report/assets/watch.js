// The page of `flrce watch`: asks its own server every two seconds, draws what has changed. Names enter as text only.

const EVERY = 2000;
let runs = [], version = "", chosen = null, heard = Date.now();
const one = () => runs.find((run) => run.folder === chosen && run.T) || null;

const joules = (value) => (value == null ? "–" : value >= 1e6 ? `${number(value / 1e6)} MJ` : value >= 1e3 ? `${number(value / 1e3)} kJ` : `${number(value)} J`);
const bytes = (value) => (value == null ? "–" : value >= 1e9 ? `${number(value / 1e9)} GB` : value >= 1e6 ? `${number(value / 1e6)} MB` : `${number(value / 1e3)} kB`);
const seconds = (value) => (value < 100 ? `${Math.round(value)} s` : value < 6000 ? `${Math.round(value / 60)} min` : `${number(value / 3600)} h`);
const left = (run) => (run.ends == null ? "–" : seconds(Math.max(run.ends - Date.now() / 1000, 0)));
const price = (run) => (!run.price ? "–" : run.price.joules == null ? "no gain" : `${joules(run.price.joules)}, ${bytes(run.price.bytes)}`);
const budget = (run) => run.budget.map((each) => `${each.shown[1]}${each.lasts == null || each.name === "rounds" ? "" : ` (${each.lasts} rounds)`}`).join("; ") || "–";

// Lines over rounds: series are { name, points: [[t, value]], paint, dash }, level a threshold with its name.
function lines(frame, series, axis, level = null) {
  const all = series.flatMap((each) => each.points), values = all.map((p) => p[1] / axis.per).concat(level ? [level.at] : []);
  const low = Math.min(...values), high = Math.max(...values), pad = (high - low || Math.abs(high) || 1) * 0.06;
  const times = all.map((p) => p[0]), floor = axis.zero ? 0 : low - pad;
  const [x, y] = axes(frame, { low: Math.min(...times), high: Math.max(...times, Math.min(...times) + 1), name: "round" }, { low: floor, high: high + pad, name: axis.name });
  for (const each of series) {
    const path = each.points.map(([t, v], i) => `${i ? "L" : "M"}${x(t).toFixed(1)} ${y(v / axis.per).toFixed(1)}`).join("");
    node(frame.svg, "path", { d: path, fill: "none", stroke: each.paint, "stroke-width": 2, "stroke-dasharray": each.dash });
  }
  if (level) {
    node(frame.svg, "line", { x1: frame.left, x2: frame.right, y1: y(level.at), y2: y(level.at), stroke: colour("wasted"), "stroke-dasharray": "5 4" });
    words(frame, frame.right, y(level.at) - 6, level.name, { "text-anchor": "end", fill: frame.muted });
  }
  if (series.length > 1) keys(frame, series.map((each) => [each.name, each.paint, each.dash]), 14);
  const [first] = series, points = first.points;
  return {
    label: `${points.length} rounds.`, cols: points.length,
    locate: (px) => (points.length ? [points.reduce((best, p, i) => (Math.abs(x(p[0]) - px) < Math.abs(x(points[best][0]) - px) ? i : best), 0), 0] : null),
    cell: (i) => ({ x: x(points[i][0]), y: y(points[i][1] / axis.per), text: `round ${points[i][0]}: ${number(points[i][1] / axis.per, 4)} ${axis.name}`, dots: [{ x: x(points[i][0]), y: y(points[i][1] / axis.per), paint: first.paint }] }),
    csv: () => [["series", "round", "value"], ...series.flatMap((each) => each.points.map(([t, v]) => [each.name, t, v]))],
  };
}

function drawCourse(frame) {
  const run = one(), same = JSON.stringify(run.raw) === JSON.stringify(run.handed);
  const series = [{ name: "final model", points: run.handed, paint: seriesColour(0) }];
  if (!same) series.push({ name: "last model", points: run.raw, paint: seriesColour(1), dash: "5 3" });
  return lines(frame, series, { name: run.metric.heading, per: run.metric.per });
}

function drawConflicts(frame) {
  const run = one();
  return lines(frame, [{ name: "conflicts", points: run.conflicts, paint: seriesColour(3) }], { name: "peers", per: 1, zero: true }, run.psi == null ? null : { at: run.psi, name: `ψ = ${number(run.psi)}` });
}

function drawTrained(frame) {
  const run = one(), most = Math.max(...run.trained.map(([, n]) => n)), height = 18;
  const x = linear(0, most, frame.left, frame.right);
  run.trained.forEach(([client, n], i) => {
    const y = frame.top + i * height, now = run.round && run.round.chosen.includes(client);
    node(frame.svg, "rect", { x: frame.left, y, width: Math.max(x(n) - frame.left, 1), height: height - 4, fill: colour(now ? "exploit" : "explore"), rx: 2 });
    words(frame, frame.left - 6, y + 11, short(client, 16), { "text-anchor": "end", fill: frame.muted });
    words(frame, x(n) - 4, y + 11, String(n), { "text-anchor": "end", fill: frame.paper, "font-size": 11 });
  });
  const clamp = (i) => Math.max(0, Math.min(i, run.trained.length - 1));
  return {
    label: `${run.trained.length} clients; those of the last round in another colour.`, cols: 1, rows: run.trained.length,
    locate: (px, py) => [0, clamp(Math.floor((py - frame.top) / height))],
    cell: (_, j) => ({ x: frame.left, y: frame.top + j * height, box: { x: frame.left, y: frame.top + j * height, width: frame.right - frame.left, height: height - 4 }, text: `${run.trained[j][0]}: ${run.trained[j][1]} times` }),
    csv: () => [["client", "times"], ...run.trained],
  };
}

const missing = (key) => () => (one() && one()[key].length ? "" : "Nothing yet.");
new Chart("course", { draw: drawCourse, height: (w) => Math.max(240, Math.min(360, w * 0.4)), margins: { top: 46 }, empty: missing("handed") });
new Chart("conflicts", { draw: drawConflicts, height: () => 280, empty: missing("conflicts") });
new Chart("trained", { draw: drawTrained, height: () => 40 + 18 * (one()?.trained.length || 1), margins: { left: 112, top: 14, bottom: 18 }, empty: missing("trained") });

function fillRuns() {
  const body = byId("runs").tBodies[0], held = document.activeElement?.dataset?.folder;
  body.replaceChildren();
  for (const run of runs) {
    const row = tag(body, "tr"), name = tag(row, "th", { scope: "row" }), button = tag(name, "button", { type: "button" }, run.folder);
    row.setAttribute("aria-selected", String(run.folder === chosen));
    button.dataset.folder = run.folder;
    row.addEventListener("click", () => pick(run.folder));
    tag(row, "td", { className: `words ${run.state.split(/[ :]/)[0]}` }, run.state);
    if (!run.T) { tag(row, "td", { colSpan: 8 }); continue; }
    const round = tag(row, "td", {}, `${run.t} of ${run.T}`);
    tag(round, "progress", { max: run.T, value: run.t }).setAttribute("aria-label", `${run.t} of ${run.T} rounds`);
    tag(row, "td", {}, `${run.metric.name} ${run.shown}`);
    tag(row, "td", {}, run.conflicts.length ? number(run.conflicts.at(-1)[1]) : "–");
    tag(row, "td", {}, price(run));
    tag(row, "td", {}, run.energy === "unknown" ? "unknown" : joules(run.spent.joules));
    tag(row, "td", {}, bytes(run.spent.bytes));
    tag(row, "td", { className: "left" }, left(run));
    tag(row, "td", {}, budget(run));
    if (held === run.folder) button.focus();
  }
}

function facts(run) {
  const last = run.round, said = [`${run.recipe} on ${run.data}, seed ${run.seed}: ${run.state}, round ${run.t} of ${run.T}; ${run.M} clients, ${run.P} a round.`];
  if (last) said.push(`Round ${last.t}${last.outcome === "committed" ? "" : ` (${last.outcome})`}${last.phase ? `, ${last.phase}` : ""}: ${last.chosen.join(", ")}${last.count > last.chosen.length ? ` and ${last.count - last.chosen.length} more` : ""}; ${last.replied} of ${last.count} replies counted.${last.reach ? ` ${last.reach}.` : ""}`);
  if (run.waiting) said.push(`${run.waiting} clients have not trained yet.`);
  if (run.price) said.push(run.price.joules == null ? `No gain over the last ${run.price.rounds} rounds.` : `A point has cost ${price(run)} over the last ${run.price.rounds} rounds (${run.energy} energy).`);
  for (const each of run.budget) said.push(`Of the budget of ${each.shown[0]}, ${each.shown[1]} are left${each.lasts == null || each.name === "rounds" ? "" : `: about ${each.lasts} rounds`}.`);
  if (run.abandoned) said.push(`${run.abandoned} rounds were abandoned.`);
  if (run.stop) said.push(`Stop: ${run.stop}.`);
  return said.concat(run.notes.map((note) => `Note: ${note}.`));
}

function fillOne() {
  const run = one();
  byId("one").hidden = !run;
  if (!run) return;
  byId("h-one").textContent = run.folder;
  byId("facts").replaceChildren();
  for (const fact of facts(run)) tag(byId("facts"), "li", {}, fact);
  const body = byId("refused").tBodies[0];
  body.replaceChildren();
  byId("none").hidden = run.refused.length > 0;
  byId("refused").parentElement.hidden = run.refused.length === 0;
  for (const [t, client, reason] of run.refused) {
    const row = tag(body, "tr");
    tag(row, "th", { scope: "row", title: client }, client);
    tag(row, "td", {}, String(t));
    tag(row, "td", { className: "words" }, reason);
  }
  charts.forEach((chart) => chart.render());
}

function pick(folder) { chosen = folder; fillRuns(); fillOne(); }

function pulse(lost) {
  const ago = Math.round((Date.now() - heard) / 1000), live = runs.filter((run) => /^(running|preparing)/.test(run.state)).length;
  byId("pulse").className = lost ? "lost" : "";
  byId("pulse").textContent = lost ? `Nobody answers since ${ago} s: flrce watch has ended. The runs go on without it; start it again and this page follows.` : `${live} of ${runs.length} runs under way.`;
}

async function ask() {
  try {
    const answer = await fetch(`state?since=${version}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(String(answer.status));
    const told = await answer.json();
    heard = Date.now();
    if (told.runs) {
      ({ runs, version } = told);
      if (!one()) chosen = runs.find((run) => run.T)?.folder ?? null;
      fillRuns();
      fillOne();
    } else document.querySelectorAll("#runs td.left").forEach((cell, i) => { cell.textContent = left(runs.filter((run) => run.T)[i]); });
    pulse(false);
  } catch { pulse(true); }
  document.documentElement.dataset.ready = "true";
  setTimeout(ask, EVERY);
}

const THEMES = ["system", "light", "dark"];
byId("theme").addEventListener("click", () => {
  const root = document.documentElement, next = THEMES[(THEMES.indexOf(root.dataset.theme || "system") + 1) % 3];
  if (next === "system") delete root.dataset.theme; else root.dataset.theme = next;
  byId("theme").textContent = `Theme: ${next}`;
  fillOne();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", fillOne);
ask();
