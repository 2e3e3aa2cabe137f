// A list of any length of which only the rows in sight exist. One row is chosen, by a click or with
// the arrow keys; screen readers are told which one.
"use strict";

// `box` scrolls, rows are `height` pixels high, `draw(item, row)` fills one in, `choose(item, k)`
// is called when somebody chose one, and `open(item)` when Enter was pressed on it.
function listOf(box, height, { draw, choose, open }) {
  const inner = el("div", "rows", "", box);
  const AROUND = 6; // rows out of sight that exist
  let items = [], chosen = -1, first = -1, last = -1;

  function place() {
    const top = Math.max(0, Math.floor(box.scrollTop / height) - AROUND);
    const end = Math.min(items.length, Math.ceil((box.scrollTop + box.clientHeight) / height) + AROUND);
    if (top === first && end === last) return;
    [first, last] = [top, end];
    const rows = [];
    for (let k = top; k < end; k += 1) {
      const row = el("div", "row" + (k === chosen ? " chosen" : ""), "");
      row.id = box.id + "-" + k;
      row.setAttribute("role", "option");
      row.setAttribute("aria-selected", String(k === chosen));
      row.setAttribute("aria-posinset", String(k + 1));
      row.setAttribute("aria-setsize", String(items.length));
      row.style.top = k * height + "px";
      row.style.height = height + "px";
      row.dataset.k = k;
      draw(items[k], row);
      rows.push(row);
    }
    inner.replaceChildren(...rows);
    if (chosen < 0) box.removeAttribute("aria-activedescendant");
    else box.setAttribute("aria-activedescendant", box.id + "-" + chosen);
  }

  function refresh() {
    first = -1;
    place();
  }

  // Shows a row as chosen, and brings it into sight.
  function point(k) {
    chosen = k;
    inner.style.height = items.length * height + "px"; // there is room to scroll
    if (k >= 0) {
      const above = k * height, below = above + height - box.clientHeight;
      if (box.scrollTop > above) box.scrollTop = above;
      else if (box.scrollTop < below) box.scrollTop = below;
    }
    refresh();
  }

  function set(all, k) {
    items = all;
    point(Math.min(k, all.length - 1));
  }

  function move(k) {
    if (!items.length) return;
    const to = Math.min(Math.max(k, 0), items.length - 1);
    point(to);
    choose(items[to], to);
  }

  box.addEventListener("scroll", place, { passive: true });
  new ResizeObserver(place).observe(box);
  box.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (!row) return;
    const k = Number(row.dataset.k), again = k === chosen;
    move(k);
    if (again) open?.(items[k]);
  });
  box.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(box.clientHeight / height) - 1);
    const to = { ArrowDown: chosen + 1, ArrowUp: chosen - 1, PageDown: chosen + page,
      PageUp: chosen - page, Home: 0, End: items.length - 1 }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (to !== undefined) move(to);
    else if (event.key === "Enter" || event.key === " ") open?.(items[chosen]);
    else return;
    event.preventDefault();
  });

  return { set, point, refresh, move, get chosen() { return chosen; }, get items() { return items; } };
}
