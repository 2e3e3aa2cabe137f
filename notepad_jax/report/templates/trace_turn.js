// One turn of a reading: the memory before and after, what of the evidence it holds, and, where the
// trace has them, the exact prompt and what was sampled, token by token.
"use strict";

// Where a reading stands after turn `k`: the change that made the memory, whether this turn made
// it, the change before it, and the turn's record. Changes and records are in order.
function standing(head) {
  const records = new Map(head.turns.map((turn) => [turn.chunk, turn]));
  return (k) => {
    let low = 0, high = head.changes.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (head.changes[middle].chunk <= k) low = middle + 1;
      else high = middle;
    }
    const now = head.changes[low - 1], here = now?.chunk === k;
    return { change: here ? now : undefined, now, before: here ? head.changes[low - 2] : now,
      kept: records.get(k), next: head.changes[low], last: here ? head.changes[low - 2] : now };
  };
}

// What became of each fact up to turn `k`: "found at chunk 3, lost at chunk 9".
function fates(head, k) {
  return head.evidence.map((fact, i) => {
    const moves = [];
    let held = false;
    head.changes.filter((change) => change.chunk <= k).forEach((change) => {
      const now = change.held[i] === "1";
      if (now !== held) moves.push([now ? "found" : "lost", change.chunk]);
      held = now;
    });
    const later = head.changes.find((change) => change.chunk > k && (change.held[i] === "1") !== held);
    return { fact, held, moves, later };
  });
}

function evidence(head, k, under, go) {
  if (!head.evidence.length) return;
  el("h3", "", "Evidence", under);
  const list = el("ul", "evidence", "", under);
  fates(head, k).forEach(({ fact, held, moves, later }) => {
    const row = el("li", held ? "held" : "", "", list);
    el("q", "", fact, row);
    el("b", held ? "right" : "wrong", held ? "kept" : moves.length ? "lost" : "not found yet", row);
    moves.slice(-6).forEach(([what, chunk]) =>
      button(what + " at chunk " + (chunk + 1), "go to this turn", row, () => go(chunk)));
    if (later) {
      button((held ? "lost" : "found") + " later, at chunk " + (later.chunk + 1),
        "go to this turn", row, () => go(later.chunk));
    }
  });
}

// Marks the facts of the evidence where they stand in a text, by their words and in their place.
function lightUp(box, evidence) {
  const wanted = evidence.map((fact) => fact.toLowerCase().trim()).filter(Boolean);
  if (!wanted.length) return;
  box.querySelectorAll("span, ins").forEach((part) => {
    const text = part.textContent, low = text.toLowerCase();
    if (low.length !== text.length) return; // letters that grow: places would be off
    const spots = [];
    wanted.forEach((fact) => {
      for (let at = low.indexOf(fact); at >= 0; at = low.indexOf(fact, at + fact.length)) {
        spots.push([at, at + fact.length]);
      }
    });
    spots.sort(([a], [b]) => a - b);
    const made = [];
    let end = 0;
    spots.forEach(([from, to]) => {
      if (from < end) return;
      made.push(text.slice(end, from), [text.slice(from, to)]);
      end = to;
    });
    if (!made.length) return;
    part.replaceChildren(...made.map((one) => Array.isArray(one) ? el("mark", "", one[0]) : one),
      text.slice(end));
  });
}

// Tokens as they were sampled or shown, control pieces by their names, painted by `shade`.
function tokensOf(ids, pieces, under, shade, { logprobs, proximal } = {}) {
  const box = el("div", "text tokens", "", under);
  if (!ids.length) el("span", "dim", "(nothing)", box);
  return bounded(ids.map((id, k) => k), (k) => (pieces[ids[k]] ?? "?").length + 1, box, (k) => {
    const piece = pieces[ids[k]];
    const special = piece === undefined || /^<\|?[^<>\s]+\|?>$/.test(piece);
    const token = el("span", special ? "special" : "", piece ?? "⟨" + ids[k] + "⟩");
    token.title = "id " + ids[k] + (logprobs ? ", logprob " + number(logprobs[k], 4) : "") +
      (proximal?.length ? ", of the trainer " + number(proximal[k], 4) : "");
    if (shade && logprobs) paint(token, shade.name, shade.token(logprobs[k], proximal[k]));
    return token;
  });
}

async function sampled(head, kept, shade, under, another) {
  const long = await head.turn(kept), pieces = await head.pieces();
  if (another()) return;
  const facts = [number(kept.tokens) + " tokens", kept.finish === "length" ? "cut at the limit" : null,
    "policy version " + kept.version,
    kept.mean === null ? null : "mean logprob " + number(kept.mean, 3),
    kept.least === null ? null : "least " + number(kept.least, 2),
    kept.gap === null ? null : "largest gap to the trainer's " + number(kept.gap, 4)];
  const heading = el("h3", "", "Sampled", under);
  el("small", "", " " + facts.filter(Boolean).join(" · "), heading);
  tokensOf(long.tokens, pieces, under, shade?.token ? shade : null, long);
  const row = el("p", "buttons", "", under);
  copier("copy ids", row, async () => long.tokens.join(" "));
  copier("copy text", row, async () => long.tokens.map((id) => pieces[id] ?? "").join(""));
}

// The exact prompt, which is long: made when somebody opens it.
function prompt(head, kept, under, headOf, state) {
  const box = el("details", "", "", under);
  el("summary", "", "The exact prompt, " + number(kept.prompt) + " tokens", box);
  async function fill() {
    state.prompt = box.open;
    box.querySelector("p.wrong")?.remove();
    if (!box.open || box.childElementCount > 1) return;
    const inner = el("div", "", "", box);
    try {
      await put(inner);
    } catch (problem) { // data that are gone: opened again, it is tried again
      inner.replaceWith(el("p", "wrong", problem.message));
    }
  }
  async function put(inner) {
    const long = await head.turn(kept), pieces = { ...await head.pieces() };
    let { shared } = long;
    if (kept.whose !== null) {
      const other = await headOf(kept.whose);
      const theirs = other.turns.find((turn) => turn.chunk === kept.chunk);
      ({ shared } = await other.turn(theirs));
      Object.assign(pieces, await other.pieces());
    }
    const ids = [...shared, ...long.tail];
    const row = el("p", "buttons", "", inner);
    copier("copy ids", row, async () => ids.join(" "));
    copier("copy text", row, async () => ids.map((id) => pieces[id] ?? "").join(""));
    el("small", "", number(shared.length) + " tokens that a group shares, " +
      number(long.tail.length) + " of its own", row);
    tokensOf(shared, pieces, inner, null);
    tokensOf(long.tail, pieces, inner, null).classList.add("own");
  }
  box.addEventListener("toggle", fill);
  box.open = state.prompt;
}
