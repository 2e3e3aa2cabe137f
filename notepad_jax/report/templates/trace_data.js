// The data of a trace's page. They lie beside it as scripts, since a page on a disk may fetch
// nothing; each calls trace.part(name, value) for what it holds. The index is the first; where it
// lies, the others lie. A file is loaded when a part of it is wanted, and the files that nobody
// wanted for longest are let go.
"use strict";

const trace = (() => {
  const MOST = 64; // files that are kept
  const parts = new Map(), files = new Map(); // name -> value; file -> {loaded, names}
  let began = () => {}, folder = "";

  function part(name, value) {
    const { src, dataset: { file } } = document.currentScript;
    if (name === "index") {
      folder = src.replace(/[^/]*$/, "");
      return began(value);
    }
    parts.set(name, value);
    files.get(file)?.names.push(name);
  }

  function load(file) {
    const script = document.createElement("script");
    script.dataset.file = file;
    script.src = folder + file + ".js";
    const loaded = new Promise((resolve, reject) => {
      script.onload = resolve;
      script.onerror = () => {
        files.delete(file);
        reject(new Error("data/" + file + ".js is missing or damaged; load the page again, or make " +
          "it again"));
      };
    });
    files.set(file, { loaded, names: [] });
    document.head.append(script);
    return loaded.finally(() => script.remove());
  }

  // The part `name`, which stands in the file of that number; a promise.
  async function get(number, name) {
    const file = String(number), known = files.get(file);
    if (known) {
      files.delete(file); // to the end of those that are let go
      files.set(file, known);
      await known.loaded;
    } else {
      await load(file);
    }
    const value = parts.get(name);
    for (const [old, { names }] of files) {
      if (files.size <= MOST) break;
      names.forEach((one) => parts.delete(one));
      files.delete(old);
    }
    return value;
  }

  // What is called with the index, as an object a reading: {number, question, reward, ...}.
  function start(call) {
    began = ({ title, sources, columns, rows }) => {
      const readings = rows.map((row, number) =>
        Object.assign(Object.fromEntries(columns.map((name, k) => [name, row[k]])), { number }));
      call({ title, sources, readings });
    };
  }

  // A reading's head: short rows of its changes and turns as objects, and how to get the rest.
  async function head(reading) {
    const n = reading.number, told = await get(reading.file, "r" + n);
    const changes = told.changes.map(([chunk, tokens, seconds, share, held, sum, block, place]) =>
      ({ chunk, tokens, seconds, share, held, sum, block, place }));
    const turns = told.turns.map(
      ([chunk, kind, version, finish, tokens, mean, least, prompt, whose, gap, stands, block,
        place]) => ({ chunk, kind, version, finish, tokens, mean, least, prompt, whose, gap, stands,
        block, place }));
    const last = changes.length ? changes.at(-1).chunk + 2 : 1;
    return { reading, fields: told.fields, evidence: told.evidence, changes, turns,
      rounds: told.rounds,
      count: Math.max(reading.turns ?? last, last, 1), ...sources(n, told) };
  }

  function sources(n, told) {
    async function memory(change) {
      if (!change) return "";
      const { block, place } = change;
      return (await get(told.memory_files[block], "m" + n + "." + block))[place];
    }
    async function turn({ block, place }) {
      const long = (await get(told.turn_files[block], "t" + n + "." + block))[place];
      const [shared, tail, tokens, logprobs, proximal] = long;
      return { shared, tail, tokens, logprobs, proximal };
    }
    const pieces = () => told.pieces === null ? {} : get(told.pieces, "p" + n);
    return { memory, turn, pieces };
  }

  return { part, start, head };
})();
