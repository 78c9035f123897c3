// Choices of the reader: which methods, which colours, light or dark, which reference, method and seed to look at.
const chips = [...document.querySelectorAll(".chip")];

for (const chip of chips) {
  const label = chip.dataset.method;
  chip.querySelector("input").addEventListener("change", (event) => {
    if (event.target.checked) state.shown.add(label);
    else state.shown.delete(label);
    changed();
  });
  chip.querySelector(".pick")?.addEventListener("click", () => pick(label));
}

const QUICK = {
  all: () => page.labels,
  none: () => [],
  best: () => page.labels.slice(0, page.looks.dashes.length),
  coloured: () => page.labels.filter((label) => state.picks.includes(label)),
};
for (const button of document.querySelectorAll("[data-quick]"))
  button.addEventListener("click", () => {
    state.shown = new Set(QUICK[button.dataset.quick]());
    changed();
  });

function followChips() {
  const look = signals();
  for (const chip of chips) {
    const label = chip.dataset.method;
    chip.querySelector("input").checked = state.shown.has(label);
    chip.querySelector(".swatch")?.remove();
    chip.querySelector("input").after(swatch(label, look));
    chip.querySelector(".pick")?.setAttribute("aria-pressed", look.picked.includes(label));
  }
  const count = document.getElementById("count");
  if (count) count.textContent = `${state.shown.size} of ${page.labels.length} shown`;
}
listeners.push(followChips);
if (innerWidth > 900 && page.labels.length <= 12) document.getElementById("filter").open = true;

for (const control of document.querySelectorAll("select[data-choice]"))
  control.addEventListener("change", () => {
    const { choice } = control.dataset;
    state[choice] = choice === "seed" ? Number(control.value) : control.value;
    for (const same of document.querySelectorAll(`select[data-choice="${choice}"]`)) same.value = control.value;
    changed();
  });

// light and dark: the system's, until the reader chooses
const system = matchMedia("(prefers-color-scheme: dark)");
const theme = document.getElementById("theme");
let chosen = null;
try {
  chosen = localStorage.getItem("bespoke-theme");
} catch { /* a page from a file may not keep anything */ }

function setMode(mode) {
  state.mode = mode;
  root.dataset.theme = mode;
  theme.textContent = mode === "dark" ? "Light" : "Dark";
  theme.setAttribute("aria-label", `Switch to ${mode === "dark" ? "light" : "dark"} colours`);
  theme.setAttribute("aria-pressed", mode === "dark");
  redraw();
  changed();
}
theme.addEventListener("click", () => {
  chosen = state.mode === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("bespoke-theme", chosen);
  } catch { /* then it lasts as long as the page */ }
  setMode(chosen);
});
system.addEventListener("change", () => chosen || setMode(system.matches ? "dark" : "light"));
setMode(chosen ?? (system.matches ? "dark" : "light"));
window.bespokeReport = { state, charts, drawAll };
