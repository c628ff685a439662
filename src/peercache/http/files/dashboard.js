// Replaces the figures of the page by fresh ones, and keeps what the reader does: open details,
// the focus, and where the page is scrolled to. Without a script the page reloads itself.
"use strict";

const every = Number(document.body.dataset.refresh) * 1000;
const pause = document.getElementById("pause");
const trouble = document.getElementById("trouble");
let isPaused = false;
let isAsking = false;

function place(element) {
  // The way from #live down to an element: positions survive where contents change.
  const live = document.getElementById("live");
  const way = [];
  for (let at = element; at && at !== live; at = at.parentElement) {
    way.unshift(Array.prototype.indexOf.call(at.parentElement.children, at));
  }
  return way;
}

function show(fresh) {
  const live = document.getElementById("live");
  const open = [...live.querySelectorAll("details[open]")].map((each) => each.id);
  const focused = document.activeElement;
  const href = focused && focused.getAttribute("href");
  const way = focused && focused !== live && live.contains(focused) ? place(focused) : null;
  document.title = fresh.title;
  live.replaceChildren(...fresh.getElementById("live").childNodes);
  for (const id of open) {
    const each = document.getElementById(id);
    if (each) each.open = true;
  }
  if (way) {
    const same = way.reduce((at, step) => at && at.children[step], live);
    const target = same && same.getAttribute("href") === href
      ? same
      : href && [...live.querySelectorAll("a")].find((each) => each.getAttribute("href") === href);
    (target || live).focus({ preventScroll: true });
  }
}

function isReading() {
  // What the reader has marked, types or points at stays.
  const at = document.activeElement;
  const types = at && at.type === "search" && at.value !== at.defaultValue;
  return types || String(document.getSelection()) || document.querySelector(".at");
}

async function refresh() {
  if (isPaused || isAsking || document.hidden || isReading()) return;
  isAsking = true;
  try {
    const answer = await fetch(location.pathname + location.search, { cache: "no-store", signal: AbortSignal.timeout(8000) });
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (!fresh.getElementById("live")) throw new Error(`the node answers ${answer.status}`);
    if (isPaused) return;
    show(fresh);
    trouble.hidden = true;
  } catch (error) {
    if (trouble.hidden) {
      const at = new Date().toLocaleTimeString();
      trouble.textContent = `No new figures since ${at}: ${error.message}. It is tried again.`;
      trouble.hidden = false;
    }
  } finally {
    isAsking = false;
  }
}

// The values at a point of a chart, in its legend while the pointer is there. They are read from the
// lines themselves, so the page carries no numbers twice.
const WIDTH = 600, HEIGHT = 120;

function unknown(value) {
  return Number.isFinite(value) ? "" : "–";
}

function digits(value) {
  return value >= 10 || value === Math.round(value) ? value.toFixed(0) : value.toFixed(1);
}

function scaled(value, steps) {
  const [size, name] = steps.find((each) => value >= each[0]) || steps[steps.length - 1];
  return `${digits(value / size)} ${name}`;
}

const WRITTEN = {
  share: (value) => `${(100 * value).toFixed(1)} %`,
  rate: (value) => `${scaled(value, [[1e9, "G"], [1e6, "M"], [1e4, "k"], [1, ""]]).trim()}/s`,
  time: (value) => scaled(value, [[60, "min"], [1, "s"], [1e-3, "ms"], [1e-6, "µs"]]),
  bytes: (value) => `${scaled(value, [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "bytes"]])}/s`,
};

function pointsOf(path) {
  return [...path.getAttribute("d").matchAll(/[ML](-?[\d.]+) (-?[\d.]+)/g)].map((each) => [+each[1], +each[2]]);
}

function heightsAt(svg, x, step) {
  // Of each line its height at x, 0 to 1; NaN where nothing is known.
  return [...svg.querySelectorAll(".line, .area")].map((path) => {
    const next = path.nextElementSibling;
    const dots = next && next.classList.contains("dots") ? pointsOf(next) : [];
    const near = [...pointsOf(path), ...dots].filter((each) => Math.abs(each[0] - x) <= step);
    if (!near.length) return NaN;
    const away = Math.min(...near.map((each) => Math.abs(each[0] - x)));
    const down = near.filter((each) => Math.abs(each[0] - x) === away).map((each) => each[1]);
    const low = path.classList.contains("area") ? Math.max(...down) : HEIGHT;
    return (low - Math.min(...down)) / HEIGHT;
  });
}

function valueOf(svg, height) {
  const low = Number(svg.dataset.low), high = Number(svg.dataset.high);
  return low > 0 ? low * (high / low) ** height : high * height;
}

function pointAt(svg, clientX) {
  const box = svg.getBoundingClientRect();
  const x = Math.min(1, Math.max(0, (clientX - box.left) / box.width)) * WIDTH;
  const figure = svg.closest("figure");
  const marks = [...svg.querySelectorAll(".event")].filter((each) => Math.abs(pointsOf(each)[0][0] - x) < 4);
  const ago = WRITTEN.time(Number(svg.dataset.span) * (1 - x / WIDTH));
  figure.querySelector(".to").textContent = [`${ago} ago`, ...marks.map((each) => each.textContent)].join("; ");
  const heights = heightsAt(svg, x, WIDTH / 50);
  figure.querySelectorAll(".legend b").forEach((shown, place) => {
    const value = valueOf(svg, heights[place]);
    shown.dataset.now ??= shown.textContent;
    shown.textContent = unknown(value) || WRITTEN[svg.dataset.unit](value);
  });
  let line = svg.querySelector(".at");
  if (!line) {
    line = document.createElementNS("http://www.w3.org/2000/svg", "path");
    line.setAttribute("class", "at");
    svg.append(line);
  }
  line.setAttribute("d", `M${x} 0V${HEIGHT}`);
}

function leave(svg) {
  const figure = svg.closest("figure");
  svg.querySelector(".at")?.remove();
  figure.querySelector(".to").textContent = "now";
  for (const shown of figure.querySelectorAll(".legend b")) shown.textContent = shown.dataset.now ?? shown.textContent;
}

document.addEventListener("pointermove", (event) => {
  const svg = event.target.closest?.("svg[data-unit]");
  for (const other of document.querySelectorAll("svg:has(.at)")) if (other !== svg) leave(other);
  if (svg) pointAt(svg, event.clientX);
});
document.addEventListener("pointerleave", () => document.querySelectorAll("svg:has(.at)").forEach(leave));

pause.hidden = false;
pause.addEventListener("click", () => {
  isPaused = !isPaused;
  pause.setAttribute("aria-pressed", String(isPaused));
  pause.textContent = isPaused ? "Resume" : "Pause";
  refresh();
});
document.addEventListener("visibilitychange", refresh);
setInterval(refresh, every);
