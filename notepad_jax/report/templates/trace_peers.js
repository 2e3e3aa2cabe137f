// Other readings of the question beside the one that is looked at: the other samples of its group,
// and those of other steps, methods and runs; what each held at the same chunk, and where they part.
"use strict";

const MOST_PEERS = 24; // that are shown beside a reading

// [same group, then others by their place], without the reading itself.
function peersOf(reading, readings) {
  const same = readings.filter((one) => one.asked === reading.asked && one !== reading);
  const rank = (one) => one.group === reading.group ? 0 : 1;
  return same.sort((a, b) => rank(a) - rank(b) || a.number - b.number);
}

// The first chunk after which two readings held different memories; null: none.
function parting(a, b) {
  const ours = [...a.changes], theirs = [...b.changes];
  for (let i = 0; i < Math.max(ours.length, theirs.length); i += 1) {
    const one = ours[i], other = theirs[i];
    if (!one || !other) return (one ?? other).chunk;
    if (one.chunk !== other.chunk || one.sum !== other.sum) return Math.min(one.chunk, other.chunk);
  }
  return null;
}

async function beside(head, k, under, { readings, labels, headOf, go, goTo, another }) {
  const all = peersOf(head.reading, readings), some = all.slice(0, MOST_PEERS);
  const find = standing(head), memory = await head.memory(find(k).now);
  const answer = k === head.count - 1;
  const grid = el("div", "peers", "");
  for (const peer of some) {
    const other = await headOf(peer.number);
    if (another()) return;
    const share = Math.min(k, other.count - 1), last = answer ? other.count - 1 : share;
    const theirs = await other.memory(standing(other)(last).now);
    if (another()) return;
    const card = el("article", peer.group === head.reading.group ? "" : "elsewhere", "", grid);
    const top = el("div", "top", "", card);
    button(who(peer, labels) || "reading " + (peer.number + 1), "look at this reading", top,
      () => goTo(peer.number, last)).className = "asked";
    verdict(peer, top);
    const row = el("p", "dim", "", card), part = parting(head, other);
    if (part === null) row.append("the same memories all the way");
    else button("they part at chunk " + (part + 1), "go to this turn", row, () => go(part));
    if (answer) {
      el("p", "", "", card).append("answer: ", el("q", "", peer.answer || "(none)"));
    }
    lightUp(differing(memory, theirs, card), other.evidence);
  }
  if (all.length > some.length) {
    el("p", "dim", number(all.length - some.length) + " more are in the list of readings", grid);
  }
  under.append(grid);
}
