// A trace's page as a whole: what is looked at stands in the address, so that a turn can be linked
// to; lists and detail follow it, and so do the keys.
"use strict";

trace.start(({ title, sources, readings }) => {
  const at = (id) => document.getElementById(id);
  const form = at("filter"), detail = at("detail"), fold = at("fold");
  const state = { reading: -1, turn: 0, beside: false, prompt: false, tree: true };
  const heads = new Map(); // of the readings that were looked at last
  const opened = new Set(); // folded turns of this reading that were opened
  let head = null, find = null, shade = null, ticket = 0;

  const labels = labelsFor(readings, sources);
  at("problem").remove();
  form.hidden = document.querySelector("main").hidden = false;
  const passes = filtersFor(form, readings, sources), shades = shadesFor(readings);
  const colour = select("colour", "no colours", shades.map((one) => one.name), form,
    (name) => "colour by " + name);
  colour.setAttribute("aria-label", "colour by");
  colour.hidden = !shades.length;
  form.insertBefore(colour, form.querySelector("output"));

  const list = listOf(at("readings"), 58, {
    draw: (one, row) => readingRow(one, row, labels, shade),
    choose: (one) => look(one.number, 0),
  });
  const turns = listOf(at("turns"), 34, {
    draw: (row, element) => turnRow(row, element, head, find, shade),
    choose: (row) => look(state.reading, row.from),
    open: (row) => {
      if (!row?.quiet) return;
      for (let k = row.from; k <= row.to; k += 1) opened.add(k);
      rowsAnew();
    },
  });

  async function headOf(n) {
    const made = heads.get(n) ?? trace.head(readings[n]);
    made.catch(() => heads.delete(n)); // what failed may be there the next time
    heads.delete(n);
    heads.set(n, made);
    if (heads.size > 40) heads.delete(heads.keys().next().value);
    return made;
  }

  function rowsAnew() {
    const rows = turnRows(head, fold.checked, opened);
    turns.set(rows, rows.findIndex((row) => row.from <= state.turn && state.turn <= row.to));
  }

  // ------------------------------------------------------------ the address

  const address = () => "#reading=" + (state.reading + 1) + "&turn=" + (state.turn + 1) +
    (state.beside ? "&beside" : "");

  function look(reading, turn, side = state.beside) {
    Object.assign(state, { reading, turn, beside: side });
    show();
  }

  function follow() {
    const said = new URLSearchParams(location.hash.slice(1));
    const place = (name, most) =>
      Math.min(Math.max((parseInt(said.get(name), 10) || 1) - 1, 0), most);
    const reading = place("reading", readings.length - 1);
    Object.assign(state, { reading, turn: place("turn", Infinity), beside: said.has("beside") });
    show();
  }

  // ------------------------------------------------------------ what is shown

  async function show() {
    const mine = ticket += 1, another = () => mine !== ticket;
    if (state.reading < 0) return;
    try {
      const made = await headOf(state.reading);
      if (another()) return;
      if (made !== head) {
        head = made;
        find = standing(head);
        opened.clear();
      }
      state.turn = Math.min(state.turn, head.count - 1);
      history.replaceState(null, "", address());
      list.point(list.items.findIndex((one) => one.number === state.reading));
      rowsAnew();
      const inner = el("div", "", "");
      await drawTurn(inner, another);
      if (!another()) {
        const held = document.activeElement?.dataset?.hold; // what is held stays held
        detail.replaceChildren(inner);
        if (held) detail.querySelector(`[data-hold="${held}"]`)?.focus();
      }
    } catch (problem) {
      detail.replaceChildren(el("p", "wrong", problem.message));
    }
  }

  const go = (turn) => look(state.reading, turn);

  async function drawTurn(under, another) {
    const { reading, fields } = head, k = state.turn, here = find(k), end = k === head.count - 1;
    const top = el("div", "top", "", under);
    const stands = end ? "answer" : here.kept?.stands || "chunk " + number(k + 1);
    el("h2", "", stands[0].toUpperCase() + stands.slice(1) + " ", top);
    el("span", "dim", "turn " + number(k + 1) + " of " + number(head.count), top);
    const slider = el("input", "slider", "", under);
    Object.assign(slider, { type: "range", min: 1, max: head.count, value: k + 1 });
    slider.dataset.hold = "slider";
    slider.setAttribute("aria-label", "turn");
    slider.setAttribute("aria-valuetext", stands);
    slider.addEventListener("input", () => go(Number(slider.value) - 1));
    const row = el("p", "buttons", "", under);
    const step = (words, title, to) => {
      const made = button(words, title, row, () => go(to));
      made.dataset.hold = words;
      made.disabled = to === undefined || to < 0 || to >= head.count;
    };
    step("← turn", "the turn before (←)", k - 1);
    step("turn →", "the turn after (→)", k + 1);
    step("← change", "the change of the memory before ([)", here.last?.chunk);
    step("change →", "the change of the memory after (])", here.next?.chunk);
    copier("copy link", row, async () => location.href);

    el("p", "question", fields.question ?? "", under);
    if (head.rounds.length) under.append(treeOf(head, k, state, go));
    if (end) {
      const said = el("p", "", "", under);
      said.append("answer: ", el("q", "", fields.answer || "(none)"), " ");
      verdict(reading, said);
      el("p", "dim", "expected: " + [fields.gold ?? []].flat().join(" | "), under);
      if (fields.problem) el("p", "wrong", fields.problem, under);
      const parts = Object.entries(fields.reward_parts ?? fields.scores ?? {});
      el("p", "dim", parts.map(([name, value]) => name + " " + number(value, 3)).join(" · "), under);
    }
    const [memory, before] = await Promise.all([head.memory(here.now), head.memory(here.before)]);
    if (another()) return;
    const heading = el("h3", "", end ? "The memory it answered from" : "Memory", under);
    el("small", "", " " + [here.change ? "changed here" : here.now ?
      "as after turn " + number(here.now.chunk + 1) : "nothing was written yet",
    here.now && number(here.now.tokens) + " tokens",
    here.change?.seconds && number(here.change.seconds, 1) + " s"].filter(Boolean).join(" · "), heading);
    if (here.now) {
      lightUp(differing(here.change && !end ? before : null, memory, under), head.evidence);
    }
    evidence(head, k, under, go);
    if (here.kept) {
      await sampled(head, here.kept, shade, under, another);
      prompt(head, here.kept, under, headOf, state);
    } else {
      el("p", "dim", "This trace has no prompt and no tokens of this turn.", under);
    }
    const others = peersOf(reading, readings);
    if (others.length) {
      const label = el("label", "", "", el("h3", "", "", under));
      const box = el("input", "", "", label);
      Object.assign(box, { type: "checkbox", checked: state.beside });
      box.dataset.hold = "beside";
      box.addEventListener("change", () => look(state.reading, state.turn, box.checked));
      const count = number(others.length) + " other reading" + (others.length > 1 ? "s" : "");
      label.append(` ${count} of this question beside it`);
      if (state.beside) {
        await beside(head, k, under, { readings, labels, headOf, go, goTo: look, another });
      }
    }
    everything(fields, under);
  }

  function everything(fields, under) {
    const box = el("details", "", "", under);
    el("summary", "", "All that is known of this reading", box);
    const table = el("table", "", "", box);
    Object.entries(fields).forEach(([name, value]) => {
      const row = el("tr", "", "", table);
      el("th", "", name, row);
      el("td", "", (typeof value === "string" ? value : JSON.stringify(value)).slice(0, LONGEST), row);
    });
  }

  // ------------------------------------------------------------ filters, colours, keys

  function narrow() {
    const fits = readings.filter(passes());
    form.querySelector("output").textContent =
      number(fits.length) + " of " + number(readings.length);
    list.set(fits, fits.findIndex((one) => one.number === state.reading));
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => event.target !== colour && narrow());
  colour.addEventListener("change", () => {
    shade = shades.find((one) => one.name === colour.value) ?? null;
    list.refresh();
    show();
  });
  fold.addEventListener("change", () => {
    opened.clear();
    if (head) rowsAnew();
  });
  at("keys").addEventListener("click", () => at("help").showModal());
  addEventListener("hashchange", follow);

  // The reading may be another than the one that is still shown.
  async function toChange(which) {
    const here = standing(await headOf(state.reading))(state.turn);
    go(here[which]?.chunk ?? state.turn);
  }

  const keys = {
    ArrowLeft: () => state.turn > 0 && go(state.turn - 1),
    ArrowRight: () => go(state.turn + 1),
    "[": () => toChange("last"),
    "]": () => toChange("next"),
    n: () => list.move(list.chosen + 1),
    p: () => list.move(list.chosen - 1),
    s: () => look(state.reading, state.turn, !state.beside),
    f: () => fold.click(),
    "/": () => form.elements.words.focus(),
    "?": () => at("help").showModal(),
  };
  addEventListener("keydown", (event) => {
    const typing = event.target.closest("input:not([type=checkbox]), select, textarea, dialog");
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !head) return;
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });

  narrow();
  if (readings.length) follow();
  else detail.append(el("p", "dim", "There are no readings in this trace yet."));
});
