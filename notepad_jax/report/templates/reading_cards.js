// One of the readings of the server's page: its question, how far it is, the memory as it is now with
// what is new in it and what is gone, and the answer. Screen readers hear of a memory now and then,
// and of every answer.
"use strict";

const PAINT = 150; // ms between two memories that are shown; of faster ones the last change
const HEARD = 8000; // ms between two memories that are told

const heard = (() => {
  let last = 0;
  return (words, now = false) => {
    if (!now && Date.now() - last < HEARD) return;
    last = Date.now();
    const box = document.getElementById("heard");
    box.textContent = "";
    el("span", "", words, box);
  };
})();

function count(value) {
  return Number(value).toLocaleString("en");
}

// `made` is a reading as /v1/readings/ID has it. Answers with what takes its events, and its end.
function courseOf(made, name, under) {
  const box = el("article", "course", "", under);
  el("h3", "", made.question + name, box);
  const told = el("p", "dim", "", box), bar = el("progress", "", "", box);
  bar.setAttribute("aria-label", "chunks that were read");
  const memory = el("div", "", "", box), said = el("p", "answer", "", box);
  const now = { chunk: made.chunk, of: made.of, memory: made.memory, before: null, seconds: null,
    tokens: null, answer: made.answer, finish: made.finish_reason, over: false };
  let shown = null, waiting = null;

  function paint() {
    waiting = null;
    if (now.memory !== shown) {
      memory.replaceChildren();
      differing(now.before, now.memory, memory);
      shown = now.memory;
      if (now.before !== null) announce();
    }
    const parts = [
      now.answer !== null ? "read" : now.over ? "not read to its end" : null,
      !now.chunk && now.answer === null ? "nothing was read yet" :
        "chunk " + count(now.chunk) + (now.of === null ? "" : " of " + count(now.of)),
      now.tokens === null ? null : "memory of " + count(now.tokens) + " tokens",
      now.seconds === null ? null : now.seconds.toLocaleString("en", { maximumFractionDigits: 1 }) + " s",
    ];
    told.textContent = parts.filter((part) => part !== null).join(" · ");
    bar.hidden = now.over || now.answer !== null;
    if (now.of === null) {
      bar.removeAttribute("value");
    } else {
      bar.max = Math.max(now.of, 1);
      bar.value = now.chunk;
    }
    if (now.answer !== null && !said.childElementCount) answered();
  }

  function announce() {
    const fresh = difference(now.before, now.memory).filter(([kind]) => kind === "new")
      .map(([, text]) => text.trim()).join(", ");
    heard("chunk " + now.chunk + (fresh ? ", new in the memory: " + fresh.slice(0, 160) : ""));
  }

  function answered() {
    el("small", "", "Answer", said);
    el("q", "", now.answer || "(nothing)", said);
    if (now.finish === "length") el("b", "wrong", "cut at the limit", said);
    copier("copy", said, async () => now.answer);
  }

  function soon() {
    waiting ??= setTimeout(paint, PAINT);
  }

  function take(event, data) {
    if (event === "turn") {
      now.chunk = data.chunk + (data.kind === "update" ? 1 : 0);
      now.of = data.of;
      now.seconds = data.seconds;
    } else if (event === "memory") {
      now.tokens = data.tokens;
      if (data.memory !== now.memory) { // a turn that is told again changes nothing
        [now.before, now.memory] = [now.memory, data.memory];
      }
    } else if (event === "answer") {
      now.answer = data.answer;
      now.finish = data.finish_reason;
      heard("the answer to " + made.question.slice(0, 80) + " is: " + (data.answer || "nothing"), true);
    }
    soon();
  }

  function end() {
    now.over = true;
    soon();
  }

  paint();
  return { take, end };
}
