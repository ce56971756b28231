// Create the charts, and redraw them when a control changes.

const recipeBars = (id, figure, scale, parts, more = {}) =>
  new Chart(id, { height: () => 290, margins: { left: 62, bottom: 66 }, legend: legendOf, draw: drawBars(parts, figure, scale), ...more });
const efficiencyBars = (id, figure, name) => recipeBars(
  id, figure, () => ({ per: 1, name }), (r) => [[r.figures[figure][0], `accuracy ${name}`, 1]],
  { optional: true, empty: () => (data.recipes.some((r) => r.figures[figure][0] != null) ? "" : "Available for accuracy only.") },
);
const compareCharts = [
  new Chart("accuracy", { draw: drawAccuracy, height: (w) => Math.max(260, Math.min(430, w * 0.5)), legend: legendOf }),
  recipeBars("energy", "joules", () => unit("joules"), ({ figures: f }) => [[f.joules[0] - f.joules_wasted[0], "useful", 1], [f.joules_wasted[0], "wasted", 0.4]]),
  recipeBars("traffic", "bytes", () => unit("bytes"), ({ figures: f }) => [[f.bytes_down[0], "down", 1], [f.bytes_up[0], "up", 0.55]]),
  efficiencyBars("per-joule", "computation_efficiency", "per kJ"),
  efficiencyBars("per-byte", "communication_efficiency", "per GB"),
];
const nothing = () => (now().t.length ? "" : "No round is committed yet.");
const noMap = () => (now().left_out ? "Left out to limit the size of the page: write a report of this run alone to see its map." : now().relations ? "" : now().M > 300 ? "Runs with more than 300 clients record no map per round." : "This recipe keeps no relationship map.");
const tall = () => Math.max(220, Math.min(660, names(now()).length * 9 + 90));
const run_has_loss = () => [...now().loss, ...now().training].some((v) => v != null);
const unserved = (key) => () => (now()[key].some((v) => v != null) ? "" : "Not recorded: the run has not ended, or its devices report no metrics.");
const runCharts = [
  new Chart("loss", { draw: drawLoss, height: () => 260, margins: { top: 52 }, empty: () => (run_has_loss() ? "" : "The run was not evaluated.") }),
  new Chart("by-client", { optional: true, draw: drawServed((run) => [run.byClient, names(run), "clients, worst first", true]), height: () => 260, empty: unserved("byClient") }),
  new Chart("by-class", { optional: true, draw: drawServed((run) => [run.byClass, run.classes, "class", false]), height: () => 260, empty: unserved("byClass") }),
  new Chart("conflicts", { draw: drawConflicts, height: () => 300, margins: { top: 52 }, empty: nothing }),
  new Chart("worth", { optional: true, draw: drawWorth, height: () => 280, margins: { top: 52 }, empty: () => (now().worth.looks.length ? "" : "The run has no stop rule with a limit, or too few rounds.") }),
  new Chart("point", { optional: true, draw: drawPoint, height: () => 280, margins: { top: 52, left: 66 }, empty: () => (now().point.joules.some((j) => j > 0) ? "" : "Too few rounds, or no predicted gain.") }),
  new Chart("headway", { optional: true, draw: drawHeadway, height: () => 280, margins: { top: 52 }, empty: () => (now().headway.some((h) => h != null) ? "" : "Headway needs an averaged model; this run kept none.") }),
  new Chart("figures", { optional: true, draw: drawFigure, height: () => 280, margins: { left: 66 }, empty: () => (Object.keys(now().figures).length ? "" : "No piece of this run reports figures of its own.") }),
  new Chart("selections", { draw: drawSelections, height: tall, margins: { left: 60 }, empty: nothing }),
  new Chart("relations", { optional: !data.runs.some((run) => run.relations || run.left_out), draw: drawRelations, height: (w) => Math.min(w, 620) + 14, margins: { left: 60, top: 36, right: 16 }, empty: noMap }),
  new Chart("partition", { optional: true, draw: drawPartition, height: (w) => Math.min(w, 620) + 14, margins: { left: 60, top: 36 }, empty: () => (labelsOf(now()).length ? "" : "The run records no label counts.") }),
  new Chart("costs", { draw: drawCosts, height: () => 280, margins: { left: 58 }, empty: nothing }),
];
const chartOf = (id) => charts.find((chart) => chart.id === id);
const redraw = (list) => list.forEach((chart) => chart.render());
const on = (selector, event, action) => document.querySelectorAll(selector).forEach((each) => each.addEventListener(event, action));

function fillLegend() {
  byId("legend").replaceChildren();
  data.recipes.forEach((recipe, i) => {
    const button = tag(byId("legend"), "button", { type: "button" });
    button.setAttribute("aria-pressed", String(!hidden.has(i)));
    const key = node(button, "svg", { width: 22, height: 10, "aria-hidden": "true" });
    node(key, "line", { x1: 1, x2: 21, y1: 5, y2: 5, stroke: seriesColour(i), "stroke-width": 3, "stroke-dasharray": dash(i) });
    tag(button, "span", {}, `${recipe.label}${recipe.seeds > 1 ? ` (${recipe.seeds} seeds)` : ""}`);
    button.addEventListener("click", () => {
      if (!hidden.delete(i)) hidden.add(i);
      button.setAttribute("aria-pressed", String(!hidden.has(i)));
      redraw(compareCharts);
    });
  });
}

function pickRun() {
  const run = now(), slider = byId("slider"), steps = run.relations ? run.relations.t.length : 0;
  slider.max = Math.max(steps - 1, 0);
  slider.value = slider.max;
  slider.disabled = steps < 2;
  showRound();
  byId("ended").textContent = `This run ${run.ended}.${run.M > names(run).length ? ` The charts show the ${names(run).length} clients chosen most often, of ${run.M}.` : ""}`;
  fillTable(byId("clients"), clientTable(run));
  fillFigures(run);
  redraw(runCharts);
}

function fillFigures(run) {
  const select = byId("figure"), before = select.value, known = Object.keys(run.figures);
  select.replaceChildren();
  for (const name of known) tag(select, "option", { value: name }, name);
  if (known.includes(before)) select.value = before;
}

function showRound() {
  const run = now(), t = run.relations?.t[Number(byId("slider").value)];
  byId("at").textContent = t == null ? "–" : `${t} of ${run.t.at(-1)}`;
  byId("slider").setAttribute("aria-valuetext", t == null ? "none" : `after round ${t}`);
}

function fillTable(table, [head, ...rows]) {
  table.replaceChildren();
  const top = tag(tag(table, "thead"), "tr"), body = tag(table, "tbody");
  for (const name of head) tag(top, "th", { scope: "col", tabIndex: 0 }, name);
  for (const [name, ...values] of rows) {
    const row = tag(body, "tr");
    tag(row, "th", { scope: "row", title: name }, name);
    for (const value of values) tag(row, "td", {}, number(value, 5));
  }
}

// Sort a table by the number or text of a column; a second click reverses the order.
function sortBy(cell) {
  const table = cell.closest("table"), body = table.tBodies[0], at = cell.cellIndex;
  const down = cell.getAttribute("aria-sort") !== "descending";
  const key = (row) => { const text = row.cells[at].textContent, n = parseFloat(text); return isNaN(n) ? text : n; };
  const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
  body.append(...[...body.rows].sort((a, b) => (down ? -1 : 1) * order(key(a), key(b))));
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  cell.setAttribute("aria-sort", down ? "descending" : "ascending");
}
document.querySelectorAll("table.sortable").forEach((table) => {
  const act = (event) => { const cell = event.target.closest("thead th"); if (cell && (event.type === "click" || event.key === "Enter")) sortBy(cell); };
  table.addEventListener("click", act);
  table.addEventListener("keydown", act);
});

const THEMES = ["system", "light", "dark"];
byId("theme").addEventListener("click", () => {
  const root = document.documentElement, next = THEMES[(THEMES.indexOf(root.dataset.theme || "system") + 1) % 3];
  if (next === "system") delete root.dataset.theme; else root.dataset.theme = next;
  byId("theme").textContent = `Theme: ${next}`;
  repaint();
});
function repaint() { fillLegend(); redraw(charts); }
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

if (!data.recipes.some((recipe) => recipe.hasAverage)) {
  const averaged = document.querySelector('input[value="averaged"]');
  averaged.parentElement.title = "No run kept a server average: the last model is the final model";
}
on('input[name="axis"], input[name="kind"], #seeds, #zoom', "change", () => chartOf("accuracy").render());
on('input[name="order"]', "change", () => redraw(["relations", "selections", "partition"].map(chartOf)));
on('input[name="cost"]', "change", () => chartOf("costs").render());
on("#figure", "change", () => chartOf("figures").render());
on("#run", "change", pickRun);
on("#slider", "input", () => { showRound(); chartOf("relations").render(); });
on("[data-table]", "click", (event) => {
  const id = event.target.dataset.table, rows = [...byId(id).rows].map((row) => [...row.cells].map((cell) => cell.textContent));
  download(`${id}.csv`, new Blob([csv(id === "clients" ? clientTable(now()) : rows)], { type: "text/csv" }));
});
const first = data.runs.findIndex((run) => run.relations);
byId("run").value = String(Math.max(first, 0));
if (data.recipes.length < 2) document.querySelector("#compare .pair").hidden = true;
fillLegend();
redraw(compareCharts);
pickRun();
document.documentElement.dataset.ready = "true";
