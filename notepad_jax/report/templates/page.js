// What a page does besides lying there: numbers under the pointer, and a filter of readings.
// Values come from data attributes and are put in as text, never as HTML. Nothing is fetched.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function part(name, className, text, under) {
  const made = under.appendChild(document.createElement(name));
  made.className = className;
  made.textContent = text;
  return made;
}

// A figure with data-stops: [[x, heading, [[label, tone, words, y], ...]], ...], in the picture's
// own pixels. The pointer, a finger or the arrow keys choose the nearest stop.
function follow(figure) {
  const svg = figure.querySelector("svg"), stops = JSON.parse(figure.dataset.stops);
  if (!stops.length) return;
  const marks = svg.appendChild(document.createElementNS(SVG, "g"));
  const tip = part("div", "tip", "", figure);
  let at = -1;
  tip.hidden = true;
  svg.setAttribute("tabindex", "0");

  function hide() {
    at = -1;
    tip.hidden = true;
    marks.replaceChildren();
  }

  function show(k) {
    if (k === at) return;
    at = k;
    const [x, heading, rows] = stops[k];
    marks.replaceChildren();
    tip.replaceChildren();
    part("b", "", heading, tip);
    for (const [label, tone, words, y] of rows) {
      const dot = marks.appendChild(document.createElementNS(SVG, "circle"));
      dot.setAttribute("class", "dot " + tone);
      dot.setAttribute("cx", x);
      dot.setAttribute("cy", y);
      dot.setAttribute("r", 5);
      const row = part("div", tone, "", tip);
      part("i", "key", "", row);
      part("span", "", label + " ", row);
      part("span", "told", words, row);
    }
    tip.hidden = false;
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    const right = x * scale + 14, left = x * scale - 14 - tip.offsetWidth;
    const fits = right + tip.offsetWidth <= figure.clientWidth;
    // Beside the stop where there is room, else below the picture: it must not hide what it tells.
    const below = !fits && left < 0;
    tip.style.left = (below ? 0 : fits ? right : left) + "px";
    tip.style.top = box.height * (below ? 1 : 0.15) + "px";
  }

  function near(event) {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    let best = 0;
    stops.forEach((stop, k) => {
      if (Math.abs(stop[0] - x) < Math.abs(stops[best][0] - x)) best = k;
    });
    show(best);
  }

  svg.addEventListener("pointermove", near);
  svg.addEventListener("pointerdown", near);
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step) return;
    event.preventDefault();
    show(Math.min(Math.max(at + step, 0), stops.length - 1));
  });
}

// A form.filter: each select names a data attribute of the readings, and the search field looks
// at all of their words. Without this script the form stays hidden and all readings are shown.
function narrow(form) {
  const readings = [...document.querySelectorAll("details.reading")];
  const words = readings.map((reading) => reading.textContent.toLowerCase());
  const count = form.querySelector("output");

  function apply() {
    const wanted = form.elements.words.value.toLowerCase().split(/\s+/);
    const choices = [...form.querySelectorAll("select")].filter((select) => select.value);
    let shown = 0;
    readings.forEach((reading, k) => {
      const fits = wanted.every((word) => words[k].includes(word)) &&
        choices.every((select) => reading.getAttribute("data-" + select.name) === select.value);
      reading.hidden = !fits;
      shown += fits;
    });
    count.textContent = shown + " of " + readings.length;
  }

  form.hidden = false;
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  apply();
}

document.querySelectorAll("figure[data-stops]").forEach(follow);
document.querySelectorAll("form.filter").forEach(narrow);
