// What the page knows: its tables, and what the reader has chosen. Everything on the page follows from these.
const page = JSON.parse(document.getElementById("report-data").textContent);
const root = document.documentElement;
const state = { ...page.start, shown: new Set(page.labels), picks: [...page.start.picks], mode: "light" };
const listeners = [];
const unpacked = {};

/** The rows of a table; text columns travel as numbers of a list. */
function rowsOf(name) {
  if (!unpacked[name]) {
    const columns = Object.entries(page.tables[name]).map(([field, values]) =>
      [field, Array.isArray(values) ? values : values.codes.map((code) => values.levels[code])]);
    const length = columns.length ? columns[0][1].length : 0;
    unpacked[name] = Array.from({ length }, (_, i) => Object.fromEntries(columns.map(([f, v]) => [f, v[i]])));
  }
  return unpacked[name];
}

/** Tell everybody once, however many choices changed at a time. */
let waiting = false;
function changed() {
  if (waiting) return;
  waiting = true;
  queueMicrotask(() => {
    waiting = false;
    for (const listener of listeners) listener();
  });
}

/** The values that every chart has as signals. */
function signals() {
  const { colours, dashes, shapes } = page.looks;
  const inks = page.inks[state.mode];
  const place = Object.fromEntries(state.picks.map((label, i) => [label, i]).filter(([label]) => label !== null));
  const looks = (of, other) =>
    Object.fromEntries(page.labels.map((label) => [label, label in place ? of[place[label]] : other]));
  return {
    shown: page.labels.filter((label) => state.shown.has(label)),
    picked: page.labels.filter((label) => label in place),
    colours: looks(colours[state.mode], inks.muted),
    dashes: looks(dashes, [1, 0]),
    shapes: looks(shapes, "circle"),
    ...inks,
    focus: state.focus,
    seed: state.seed,
    reference: state.reference,
  };
}

/** Give a method a colour or take it away; the others keep theirs, and the oldest goes where there is no room. */
function pick(label) {
  const at = state.picks.indexOf(label);
  if (at >= 0) state.picks[at] = null;
  else {
    let free = state.picks.indexOf(null);
    if (free < 0 && state.picks.length < page.looks.dashes.length) free = state.picks.length;
    if (free < 0) free = state.nextOut = ((state.nextOut ?? -1) + 1) % state.picks.length;
    state.picks[free] = label;
  }
  changed();
}

/** A method's line, dash and mark, as a small picture. */
function swatch(label, look) {
  const colour = look.colours[label], dash = look.dashes[label].join(" ");
  const marks = {
    circle: '<circle cx="13" cy="6" r="4"/>', square: '<path d="M9.5 2.5h7v7h-7z"/>',
    "triangle-up": '<path d="M13 1.5 17.5 10h-9z"/>', "triangle-down": '<path d="M13 10.5 17.5 2h-9z"/>',
    "triangle-left": '<path d="M8.5 6 17 1.5v9z"/>', "triangle-right": '<path d="M17.5 6 9 1.5v9z"/>',
    diamond: '<path d="M13 1l4 5-4 5-4-5z"/>', cross: '<path d="M11.5 1.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z"/>',
  };
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "swatch");
  svg.setAttribute("viewBox", "0 0 26 12");
  svg.setAttribute("aria-hidden", "true");
  svg.innerHTML = `<path d="M0 6h26" stroke="${colour}" stroke-width="2" stroke-dasharray="${dash === "1 0" ? "" : dash}"/>` +
    `<g fill="${colour}">${marks[look.shapes[label]]}</g>`;
  return svg;
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function say(text) {
  document.getElementById("said").textContent = text;
}
