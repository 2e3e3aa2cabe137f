// The two lists of a trace's page, readings and turns, and what readings can be narrowed down by
// and coloured by. What no reading of a trace says is not offered.
"use strict";

// ---------------------------------------------------------------- colours

// What can be shown by colour: `of` a reading or a turn a share in [0, 1], or null.
function shadesFor(readings) {
  // Not Math.max(...): a call takes some 125,000 arguments, and there may be more readings.
  const most = (name) => readings.reduce((top, one) => Math.max(top, Math.abs(one[name] ?? 0)), 0);
  const far = { advantage: most("advantage"), staleness: most("staleness") };
  const known = (name) => readings.some((one) => one[name] !== null);
  const kept = readings.some((one) => one.kept);
  const none = () => null;
  const all = [
    ["reward", known("reward"), (one) => one.reward, none, null],
    ["advantage", far.advantage > 0,
      (one) => one.advantage === null ? null : 0.5 + one.advantage / far.advantage / 2, none, null],
    ["staleness", far.staleness > 0,
      (one) => one.staleness === null ? null : one.staleness / far.staleness,
      (turn, { fields }) => fields.step ? (fields.step - 1 - turn.version) / far.staleness : null,
      null],
    ["logprob", kept, none, (turn) => turn.mean === null ? null : surprise(turn.mean),
      (logprob) => surprise(logprob)],
    ["logprob gap", readings.some((one) => one.gap !== null), (one) => apart(one.gap),
      (turn) => apart(turn.gap), (logprob, proximal) => apart(proximal - logprob)],
  ];
  return all.filter(([, offered]) => offered)
    .map(([name, , reading, turn, token]) => ({ name, reading, turn, token }));
}

// How surprising a logprob is: 0 certain, 1 at e^-4 and less.
function surprise(logprob) {
  return Math.min(1, Math.max(0, -logprob / 4));
}

// How far sampler and trainer are apart: 0 at 1e-4 and less, 1 at 1 and more.
function apart(gap) {
  if (gap === null || gap === undefined || Number.isNaN(gap)) return null;
  return Math.min(1, Math.max(0, Math.log10(Math.abs(gap) || 1e-9) / 4 + 1));
}

// Paints a thing by a shade; those with two ends go from wrong over nothing to right.
function paint(element, name, share) {
  if (share === null || share === undefined || Number.isNaN(share)) return;
  const twoEnds = name === "reward" || name === "advantage";
  element.classList.add("shaded", twoEnds ? (share < 0.5 ? "low" : "high") : "high");
  element.style.setProperty("--share", twoEnds ? Math.abs(share - 0.5) * 2 : share);
}

// ---------------------------------------------------------------- filters

function option(value, words, under) {
  el("option", "", words, under).value = value;
}

function select(name, any, values, under, words = (value) => value) {
  const made = el("select", "", "", under);
  made.name = "by-" + name; // plain names may be those of the form's own properties
  made.setAttribute("aria-label", any);
  option("", any, made);
  values.forEach((value) => option(String(value), words(value), made));
  return made;
}

function between(name, values, under) {
  const pair = el("span", "pair", "", under);
  [["from", values[0]], ["to", values[1]]].forEach(([end, bound]) => {
    const label = el("label", "", (end === "from" ? name + " " : " to "), pair);
    const made = el("input", "number", "", label);
    made.type = "number";
    made.step = "any";
    made.name = name + "-" + end;
    made.placeholder = String(Math.round(bound * 1000) / 1000);
    made.setAttribute("aria-label", name + " " + end);
  });
}

// Builds the form's choices; returns what a reading must pass: a function of nothing that makes
// one of a reading.
function filtersFor(form, readings, sources) {
  const under = form.querySelector("#choices");
  const CHOICES = [["source", "any file", (k) => sources[k]], ["task", "any task"], ["method", "any method"],
    ["status", "any status"], ["lost", "any fate of evidence"], ["length", "any length"],
    ["version", "any version"]];
  const RANGES = ["reward", "step", "turns", "advantage"];
  const values = (name) => [...new Set(readings.map((one) => one[name]))]
    .filter((value) => value !== null)
    .sort((a, b) => a < b ? -1 : a > b ? 1 : 0);
  const choices = [], ranges = [];
  CHOICES.forEach(([name, any, words]) => {
    const found = values(name);
    if (found.length < 2 || found.length > 1000) return;
    select(name, any, found, under, words);
    choices.push(name);
  });
  RANGES.forEach((name) => {
    const found = values(name);
    if (found.length < 2) return;
    between(name, [found[0], found.at(-1)], under);
    ranges.push(name);
  });
  return () => {
    const words = form.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = choices.map((name) => [name, form.elements["by-" + name].value])
      .filter(([, value]) => value !== "");
    const bounds = ranges.map((name) => [name, ...["from", "to"].map((end) => {
      const { value } = form.elements[name + "-" + end];
      return value === "" ? null : Number(value);
    })]).filter(([, from, to]) => from !== null || to !== null);
    return (one) => wanted.every(([name, value]) => String(one[name]) === value) &&
      bounds.every(([name, from, to]) => one[name] !== null &&
        (from === null || one[name] >= from) && (to === null || one[name] <= to)) &&
      (!words.length || words.every((word) =>
        (one.question + " " + one.answer).toLowerCase().includes(word)));
  };
}

// ---------------------------------------------------------------- rows

function number(value, places = 2) {
  if (value === null || value === undefined) return "";
  const words = Number(value).toLocaleString("en", { maximumFractionDigits: places });
  return words === "-0" ? "0" : words;
}

function verdict(reading, under) {
  const right = reading.reward !== null && reading.reward >= 1;
  const told = reading.status === "answered" ? "" : reading.status ?? "";
  const words = reading.reward === null ? told : number(reading.reward);
  if (words) el("b", right ? "right" : "wrong", words, under).title = "reward";
}

// What tells readings of a question apart: `labels` for `who`.
function labelsFor(readings, sources) {
  const several = (name) => new Set(readings.map((one) => one[name])).size > 1;
  return { sources, method: several("method"), sample: several("sample") };
}

// Who read, in a few words: "step_100 · step 3 · sample 1".
function who(reading, { sources, method, sample }) {
  return [
    sources.length > 1 ? sources[reading.source] : null,
    method ? reading.method : null,
    reading.step === null ? null : "step " + reading.step,
    sample && reading.sample !== null ? "sample " + reading.sample : null,
  ].filter((one) => one !== null).join(" · ");
}

function readingRow(reading, row, labels, shade) {
  if (shade) paint(row, shade.name, shade.reading(reading));
  const top = el("div", "top", "", row);
  el("span", "asked", reading.question || "(no question)", top);
  verdict(reading, top);
  const told = [who(reading, labels),
    reading.advantage === null ? null : "advantage " + number(reading.advantage),
    reading.status === "answered" ? null : reading.status,
    reading.lost && "evidence " + reading.lost, reading.task,
    reading.turns === null ? null : number(reading.turns) + " turns"];
  el("div", "dim", told.filter(Boolean).join(" · "), row);
}

// The rows of a reading's turns. Turns that changed nothing are one row where `folded`, but for
// those that were opened: [{from, to}], both ends included.
function turnRows(head, folded, opened) {
  const changed = new Set(head.changes.map((change) => change.chunk));
  const rows = [];
  for (let k = 0; k < head.count; k += 1) {
    const answer = k === head.count - 1, last = rows.at(-1);
    const quiet = folded && !answer && !changed.has(k) && !opened.has(k);
    if (quiet && last?.quiet) last.to = k;
    else rows.push({ from: k, to: k, quiet });
  }
  rows.forEach((row) => { row.quiet &&= row.from < row.to; });
  return rows;
}

function turnRow(row, element, head, find, shade) {
  const { change, kept } = find(row.from);
  if (shade && kept) paint(element, shade.name, shade.turn(kept, head));
  const top = el("div", "top", "", element);
  if (row.quiet) {
    el("span", "dim", "chunks " + number(row.from + 1) + " to " + number(row.to + 1) +
      ": nothing changed", top);
    return;
  }
  const answer = row.from === head.count - 1;
  el("span", "asked", answer ? "answer" : kept?.stands || "chunk " + number(row.from + 1), top);
  if (change) {
    facts(change.held, top);
    el("span", "dim", number(change.tokens) + " tokens", top);
  } else if (!answer) {
    el("span", "dim", "as it was", top);
  }
  if (kept && kept.finish === "length") el("b", "wrong", "cut", top);
}

// A dot for each fact: filled where the memory has it.
function facts(held, under) {
  if (!held) return;
  const count = [...held].filter((one) => one === "1").length;
  const box = el("span", "facts", "", under);
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", count + " of " + held.length + " facts");
  box.title = count + " of " + held.length + " facts of the evidence are in this memory";
  if (held.length > 12) {
    box.textContent = count + "/" + held.length;
    return;
  }
  [...held].forEach((one) => el("i", one === "1" ? "held" : "", "", box));
}
