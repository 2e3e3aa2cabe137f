// The tree of a parallel reading: a picture a round, its chunks at the bottom, each note joined to
// the merge that read it, the memory at the top. Which turns stand together, and who read whom,
// was decided in Python (reading_tree); here it is drawn, and worked by clicks and keys.
"use strict";

const STOREY = 28; // pixels from one level to the next
const LOOKS = [["cell", "nothing new"], ["cell noted", "a note"],
  ["cell noted same", "one that was there already"],
  // where the evidence is known:
  ["cell noted holds", "a note with evidence"], ["cell lost", "evidence lost"]];

function several(count, word) {
  return number(count) + " " + word + (count === 1 ? "" : "s");
}

// What a cell is, in words: "chunks 21 to 40: 3 of 20 wrote a note, with 1 fact; 1 fact lost here".
function cellWords(cell, level) {
  const count = cell.last - cell.first + 1, one = count === 1;
  const kind = (level ? "level " + level + ", merge" : "chunk") + (one ? " " : "s ");
  const place = number(cell.unit + 1) + (one ? "" : " to " + number(cell.unit + count));
  const wrote = !cell.notes ? "nothing new" : one ? "wrote a note" :
    number(cell.notes) + " of " + number(count) + " wrote a note";
  return kind + place + ": " + wrote + (!cell.same ? "" : one ? " that was there already" :
    ", " + number(cell.same) + " of them there already") +
    (cell.holds ? ", with " + several(cell.holds, "fact") : "") +
    (cell.lost ? "; " + several(cell.lost, "fact") + " lost here" : "");
}

function cellLook(cell) {
  return "cell" + (cell.notes ? " noted" : "") +
    (cell.notes && cell.same === cell.notes ? " same" : "") + (cell.holds ? " holds" : "") +
    (cell.lost ? " lost" : "");
}

// What a round came to, in words: its picture for who does not see it.
function roundWords({ levels, memory }, n) {
  const sum = (level, name) => level.reduce((all, cell) => all + cell[name], 0);
  const told = levels.map((level, k) => {
    const count = level.at(-1).last - level[0].first + 1, lost = sum(level, "lost");
    const same = sum(level, "same");
    return (k ? several(count, "merge") : several(count, "chunk")) + ", " +
      several(sum(level, "notes"), "note") + (same ? " (" + number(same) + " there already)" : "") +
      (lost ? ", " + several(lost, "fact") + " lost" : "");
  });
  return "Round " + (n + 1) + ": " + told.join("; ") +
    (memory ? "" : "; the memory stayed as it was");
}

// Where cell `n` of `count` stands, in thousandths of the width.
function across(n, count) {
  return (n + 0.5) / count * 1000;
}

// Lines from notes to what read them, in a picture whose width may be any.
function boughs({ levels, lines, memory }, under) {
  const svg = document.getElementById("boughs").content.firstElementChild.cloneNode(true);
  const storeys = levels.length + 1;
  const down = (level) => (storeys - level - 0.5) * STOREY;
  const line = (level, from, to) =>
    "M" + from + " " + down(level) + "L" + to + " " + down(level + 1);
  const drawn = lines.map(([level, cell, above]) =>
    line(level, across(cell, levels[level].length), across(above, levels[level + 1].length)));
  if (memory) drawn.push(...toMemory(levels, memory, line));
  svg.setAttribute("viewBox", "0 0 1000 " + storeys * STOREY);
  svg.firstElementChild.setAttribute("d", drawn.join(""));
  under.append(svg);
}

// The way from the note that is the memory: it may have been the only one of a level below.
function toMemory(levels, [level, cell], line) {
  const from = across(cell, levels[level].length);
  return levels.slice(level).map((_, k) => line(level + k, k ? 500 : from, 500));
}

function treeOf(head, turn, state, go) {
  const box = el("details", "tree", "");
  box.open = state.tree;
  box.addEventListener("toggle", () => { state.tree = box.open; });
  el("summary", "", "The tree of this reading, " + several(head.rounds.length, "round"), box);
  head.rounds.forEach((round, n) => roundOf(round, n, turn, go, box));
  const here = box.querySelector("[aria-current]") ?? box.querySelector("button");
  here.tabIndex = 0; // one stop of Tab; arrows go on from it
  box.addEventListener("keydown", (event) => climb(event, head.rounds, box));
  const legend = el("p", "legend dim", "", box);
  LOOKS.slice(0, head.evidence.length ? LOOKS.length : 3).forEach(([look, words]) => {
    const pair = el("span", "pair", "", legend);
    el("i", look, "", pair);
    pair.append(" " + words);
  });
  return box;
}

function roundOf(round, n, turn, go, under) {
  const { levels } = round, figure = el("figure", "", "", under);
  const words = roundWords(round, n);
  el("figcaption", "dim", words, figure);
  const crown = el("div", "crown", "", figure);
  crown.setAttribute("role", "group");
  crown.setAttribute("aria-label", words);
  crown.style.height = (levels.length + 1) * STOREY + "px";
  boughs(round, crown);
  const put = (look, label, level, k, count, to) => {
    const one = button("", label, crown, () => go(to));
    one.className = look;
    one.tabIndex = -1;
    one.dataset.hold = ["tree", n, level, k].join("-");
    one.setAttribute("aria-label", label);
    one.style.left = across(k, count) / 10 + "%";
    one.style.top = (levels.length - level + 0.5) * STOREY + "px";
    one.style.maxWidth = "max(3px, calc(" + 100 / count + "% - 1px))";
    return one;
  };
  levels.forEach((level, k) => level.forEach((cell, i) => {
    const one = put(cellLook(cell), cellWords(cell, k), k, i, level.length, cell.opens);
    if (cell.first <= turn && turn <= cell.last) one.setAttribute("aria-current", "true");
  }));
  const label = round.memory ? "the memory after round " + (n + 1) : "the memory, as it was before";
  const look = "cell root" + (round.memory ? " noted" : "");
  put(look, label, levels.length, 0, 1, levels.at(-1).at(-1).last);
}

// The arrows go to the cell beside, to who read this one's notes, and to one whose it read.
function climb(event, rounds, box) {
  const [, n, level, k] = (event.target.dataset?.hold ?? "").split("-").map(Number);
  const round = rounds[n];
  if (!round || event.ctrlKey || event.metaKey || event.altKey) return;
  const [from, cell] = round.memory ?? [];
  const ways = {
    ArrowLeft: () => [level, k - 1],
    ArrowRight: () => [level, k + 1],
    ArrowUp: () => {
      const up = round.lines.find(([one, below]) => one === level && below === k);
      return up ? [level + 1, up[2]] : from === level && cell === k ? [round.levels.length, 0] : [];
    },
    ArrowDown: () => {
      if (level === round.levels.length) return round.memory ?? [];
      const below = round.lines.find(([one, , above]) => one === level - 1 && above === k);
      return below ? [level - 1, below[1]] : [];
    },
  };
  if (!ways[event.key]) return;
  event.preventDefault();
  event.stopPropagation();
  box.querySelector(`[data-hold="${["tree", n, ...ways[event.key]()].join("-")}"]`)?.focus();
}
