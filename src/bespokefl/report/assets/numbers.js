// The numbers of every chart as a table, made when it is opened; and the ranking, which can be sorted.
const FIRST_ROWS = 300;

function rowsUnder(panel) {
  let rows = rowsOf(panel.data);
  if (panel.focus) rows = rows.filter((row) => row.method === state.focus);
  else if (panel.columns.some((column) => column.field === "method")) rows = rows.filter((row) => state.shown.has(row.method));
  return panel.bySeed ? rows.filter((row) => row.seed === state.seed) : rows;
}

function written(value, digits) {
  if (value === null || value === undefined) return "–";
  return typeof value === "number" && digits !== null ? value.toFixed(digits) : String(value);
}

function fillNumbers(chart, all = false) {
  const { panel } = chart;
  const rows = rowsUnder(panel);
  const head = element("tr", {}, ...panel.columns.map((column) => element("th", { scope: "col" }, column.title)));
  const body = element("tbody");
  for (const row of all ? rows : rows.slice(0, FIRST_ROWS))
    body.append(element("tr", {}, ...panel.columns.map((c) => element("td", {}, written(row[c.field], c.digits)))));
  const caption = element("caption", { class: "unseen" }, panel.title);
  const scroll = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Numbers: ${panel.title}` },
    element("table", {}, caption, element("thead", {}, head), body));
  const files = element("div", { class: "files" });
  const asCsv = element("button", { type: "button" }, `Save ${rows.length} rows as CSV`);
  asCsv.addEventListener("click", () => save(`${panel.id}.csv`, csv(panel, rows), "text/csv"));
  const asSvg = element("button", { type: "button" }, "Save chart as SVG");
  asSvg.addEventListener("click", async () => {
    if (!chart.view) await draw(chart);
    save(`${panel.id}.svg`, await chart.view.toSVG(), "image/svg+xml");
  });
  files.append(asCsv, asSvg);
  if (!all && rows.length > FIRST_ROWS) {
    const more = element("button", { type: "button" }, `Show all ${rows.length} rows`);
    more.addEventListener("click", () => fillNumbers(chart, true));
    files.append(more);
  }
  chart.figure.querySelector(".numbers > div").replaceChildren(files, scroll);
}

function csv(panel, rows) {
  const cell = (value) => (value === null || value === undefined ? "" : /[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value);
  const lines = [panel.columns.map((column) => cell(column.title)), ...rows.map((row) => panel.columns.map((c) => cell(row[c.field])))];
  return lines.map((line) => line.join(",")).join("\n") + "\n";
}

function save(name, content, type) {
  const link = element("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

for (const chart of charts.values())
  chart.figure.querySelector(".numbers").addEventListener("toggle", (event) => event.target.open && fillNumbers(chart));
listeners.push(() => {
  for (const chart of charts.values()) if (chart.figure.querySelector(".numbers").open) fillNumbers(chart);
});

// the ranking
const ranking = document.querySelector(".ranking table");

function sortRanking(heading) {
  const place = [...heading.parentElement.children].indexOf(heading);
  const before = heading.getAttribute("aria-sort");
  const down = before ? before === "ascending" : heading.dataset.first !== "ascending";
  const key = (row) => row.children[place].dataset.value;
  const text = heading.dataset.kind === "text";
  const rows = [...ranking.tBodies[0].rows].sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === "" || y === "") return (x === "") - (y === ""); // what is not known comes last, either way
    const order = text ? x.localeCompare(y) : Number(x) - Number(y);
    return down ? -order : order;
  });
  ranking.tBodies[0].append(...rows);
  for (const other of ranking.tHead.rows[0].children) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  say(`Sorted by ${heading.textContent.trim()}, ${down ? "descending" : "ascending"}.`);
}

function followRanking() {
  const look = signals();
  for (const row of ranking.tBodies[0].rows) {
    row.hidden = !state.shown.has(row.dataset.method);
    row.querySelector(".swatch")?.remove();
    row.cells[0].prepend(swatch(row.dataset.method, look));
  }
}

if (ranking) {
  for (const heading of ranking.tHead.rows[0].children)
    heading.querySelector("button").addEventListener("click", () => sortRanking(heading));
  listeners.push(followRanking);
}
