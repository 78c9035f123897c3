// Charts: Vega-Lite specifications without data, drawn when they come into sight, and told of every choice by signals.
const charts = new Map(); // by id: { panel, place, view, told }
const AXES = 45; // pixels below a chart, before it is drawn
const MOST_SVG = 3000; // rows; beyond, a canvas is faster

function tablesOf(spec, found = new Set()) {
  if (Array.isArray(spec)) spec.forEach((part) => tablesOf(part, found));
  else if (spec && typeof spec === "object") {
    if (spec.data && spec.data.name in page.tables) found.add(spec.data.name);
    Object.values(spec).forEach((part) => tablesOf(part, found));
  }
  return found;
}

function heightOf({ panel }) {
  return panel.step * Math.max(1, state.shown.size);
}

async function draw(chart) {
  const spec = structuredClone(chart.panel.spec);
  const values = signals();
  for (const param of spec.params) if (param.name in values) param.value = values[param.name];
  if (chart.panel.step) spec.height = heightOf(chart);
  const rows = Object.fromEntries([...tablesOf(spec)].map((name) => [name, rowsOf(name).map((row) => ({ ...row }))]));
  const most = Math.max(...Object.values(rows).map((table) => table.length));
  chart.view?.finalize();
  chart.told = values;
  const { view } = await vegaEmbed(chart.place, spec, {
    mode: "vega-lite", actions: false, defaultStyle: false, tooltip: showTip, logLevel: 1,
    renderer: most > MOST_SVG ? "canvas" : "svg",
    config: page.configs[state.mode],
    patch: (compiled) => {
      for (const source of compiled.data) if (source.name in rows) source.values = rows[source.name];
      for (const mark of compiled.marks) if (mark.type === "text" && mark.name?.startsWith(page.labelling.layer)) mark.transform = [page.labelling.transform];
      return compiled;
    },
  });
  chart.view = view;
  chart.place.style.minHeight = "";
  chart.place.parentElement.dataset.drawn = state.mode;
  tell(chart); // of what was chosen meanwhile
}

function tell(chart) {
  if (!chart.view) return;
  const values = signals();
  let news = false;
  for (const [name, value] of Object.entries(values)) {
    if (JSON.stringify(value) === JSON.stringify(chart.told[name])) continue;
    chart.view.signal(name, value);
    news = true;
  }
  chart.told = values;
  if (news && chart.panel.step) chart.view.height(heightOf(chart));
  if (news) chart.view.runAsync();
}

async function drawAll() {
  for (const chart of charts.values()) if (!chart.view) await draw(chart);
}

function redraw() {
  for (const chart of charts.values()) if (chart.view) draw(chart);
}

function showTip(_, event, item, value) {
  const tip = document.getElementById("tip");
  if (value === null || value === undefined || value === "") {
    tip.hidden = true;
    return;
  }
  const list = element("dl");
  for (const [name, text] of Object.entries(value)) {
    if (text === "null" || text === "undefined" || text === "NaN" || text === null) continue;
    list.append(element("dt", {}, name), element("dd", {}, String(text)));
  }
  tip.replaceChildren(list);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 14 + width > innerWidth ? event.clientX - width - 14 : event.clientX + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 4))}px`;
}

function drawLegends() {
  const look = signals();
  for (const { panel, legend } of charts.values()) {
    if (!panel.legend) continue;
    const named = look.shown.filter((label) => look.picked.includes(label));
    const items = named.map((label) => element("li", {}, swatch(label, look), label));
    const others = look.shown.length - named.length;
    if (others) items.push(element("li", {}, `${others} more in grey: point at them, or give them a colour above`));
    legend.replaceChildren(...items);
  }
}

for (const panel of page.panels) {
  const figure = document.getElementById(`panel-${panel.number}`);
  const place = figure.querySelector(".drawing > div"); // Vega gives it a role of its own, its parent keeps ours
  charts.set(panel.id, { panel, figure, place, legend: figure.querySelector(".legend"), view: null, told: {} });
  const height = panel.step ? heightOf({ panel }) : panel.spec.height;
  place.style.minHeight = `${height + AXES}px`; // so that links into the page arrive where they should
}
const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    sight.unobserve(entry.target);
    const chart = charts.get(entry.target.dataset.panel);
    if (!chart.view) draw(chart);
  }
}, { rootMargin: "500px" });
for (const chart of charts.values()) sight.observe(chart.figure);
addEventListener("beforeprint", () => drawAll());
listeners.push(() => {
  for (const chart of charts.values()) {
    const { method } = chart.figure.dataset;
    chart.figure.hidden = method !== undefined && !state.shown.has(method);
    tell(chart);
  }
  drawLegends();
});
