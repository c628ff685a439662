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

async function refresh() {
  if (isPaused || isAsking || document.hidden || String(document.getSelection())) return;
  isAsking = true;
  try {
    const answer = await fetch(location.pathname, { cache: "no-store", signal: AbortSignal.timeout(8000) });
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

pause.hidden = false;
pause.addEventListener("click", () => {
  isPaused = !isPaused;
  pause.setAttribute("aria-pressed", String(isPaused));
  pause.textContent = isPaused ? "Resume" : "Pause";
  refresh();
});
document.addEventListener("visibilitychange", refresh);
setInterval(refresh, every);
