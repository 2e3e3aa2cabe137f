// The server's API as its page uses it: with the key where there is one, errors in the server's own
// words, and events that go on where they were cut. Nothing but this server is ever asked.
"use strict";

class Refused extends Error {
  constructor(status, { message, code }) {
    super(message);
    Object.assign(this, { status, code });
  }
}

const api = (() => {
  const SLOT = "notepad-key", SILENCE = 30000; // ms without a sign of life
  const at = (id) => document.getElementById(id);
  let key = null, asking = null;
  try {
    key = sessionStorage.getItem(SLOT);
  } catch { /* a browser that keeps nothing: the key lives as long as the page */ }

  const headers = (more = {}) => key ? { Authorization: "Bearer " + key, ...more } : more;

  // Asks for the key; one question, however many requests wait for the answer.
  function knock(refusal) {
    asking ??= new Promise((resolve, reject) => {
      const refused = at("refused");
      refused.hidden = key === null; // there was none to be wrong
      refused.textContent = refusal.message;
      at("key").value = "";
      at("door").showModal();
      at("knock").onsubmit = (event) => {
        event.preventDefault();
        key = at("key").value.trim();
        if (!/^[\x20-\x7e]+$/.test(key)) {
          refused.textContent = "a key is printable ASCII, in one line";
          refused.hidden = false;
          return;
        }
        try {
          sessionStorage.setItem(SLOT, key);
        } catch { /* as above */ }
        // The pages of traces are links, which carry no header: a cookie of theirs.
        fetch("/traces", { method: "POST", body: new URLSearchParams({ key }), redirect: "manual" })
          .catch(() => {});
        resolve();
        at("door").close();
      };
      at("door").onclose = () => { // without a key, if nobody resolved it
        asking = null;
        reject(refusal);
      };
    });
    return asking;
  }

  function refusalOf(status, text) {
    try {
      return new Refused(status, JSON.parse(text).error);
    } catch {
      return new Refused(status, { message: "the server answered with " + status });
    }
  }

  // Answers with the response; throws Refused with the server's words.
  async function request(method, path, { json, more, signal } = {}) {
    for (;;) {
      const said = json === undefined ? {} :
        { body: JSON.stringify(json), headers: headers({ "Content-Type": "application/json", ...more }) };
      const reply = await fetch(path, { method, headers: headers(more), signal, cache: "no-store",
        credentials: "omit", ...said }).catch(() => {
        throw new Error("the server does not answer; is it still running?"); // or who asked went
      });
      if (reply.ok) return reply;
      const refusal = refusalOf(reply.status, await reply.text());
      if (reply.status !== 401) throw refusal;
      await knock(refusal);
    }
  }

  const told = async (...about) => (await request(...about)).json();

  // Sends a file; `progress` hears how much of it went. XMLHttpRequest, which counts.
  function send(file, name, progress, signal) {
    return new Promise((resolve, reject) => {
      const form = new FormData(), wire = new XMLHttpRequest();
      form.append("purpose", "user_data");
      form.append("file", file, name);
      wire.open("POST", "/v1/files");
      Object.entries(headers()).forEach(([header, value]) => wire.setRequestHeader(header, value));
      wire.upload.onprogress = ({ loaded, total }) => progress(loaded, total);
      wire.onload = () => {
        if (wire.status === 200) return resolve(JSON.parse(wire.responseText));
        const refusal = refusalOf(wire.status, wire.responseText);
        if (wire.status !== 401) return reject(refusal);
        knock(refusal).then(() => send(file, name, progress, signal)).then(resolve, reject);
      };
      wire.onerror = () => reject(new Error("the connection broke while the document was sent, or " +
        "it cannot be read; is it a folder?"));
      wire.onabort = () => reject(new Error("nothing was sent"));
      signal.addEventListener("abort", () => wire.abort());
      wire.send(form);
    });
  }

  // The events of a stream: {id, name, data}. Comments are signs of life and nothing else.
  async function* eventsOf(body, alive) {
    const reader = body.getReader(), decoder = new TextDecoder();
    let held = "";
    try {
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        alive();
        held += decoder.decode(value, { stream: true });
        const blocks = held.split("\n\n");
        held = blocks.pop();
        for (const block of blocks) {
          const fields = new Map(block.split("\n").map((line) => {
            const colon = line.indexOf(": ");
            return [line.slice(0, colon), line.slice(colon + 2)];
          }));
          const data = fields.get("data");
          if (data !== undefined) {
            yield { id: fields.get("id"), name: fields.get("event"), data: JSON.parse(data) };
          }
        }
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  }

  // Tells what happens in a reading behind event `seen` (null: from the beginning), until it is over.
  // A connection that breaks, or is silent for long, is made again: `lost` hears of it, true or false.
  async function follow(id, seen, tell, lost, signal) {
    for (let wait = 500; !signal.aborted; wait = Math.min(2 * wait, 5000)) {
      const cut = new AbortController(), cutIt = () => cut.abort();
      let silent = setTimeout(cutIt, SILENCE);
      const alive = () => {
        clearTimeout(silent);
        silent = setTimeout(cutIt, SILENCE);
      };
      signal.addEventListener("abort", cutIt);
      try {
        const more = seen === null ? {} : { "Last-Event-ID": String(seen) };
        const reply = await request("GET", readingOf(id) + "/events", { more, signal: cut.signal });
        lost(false);
        wait = 250;
        for await (const { id: number, name, data } of eventsOf(reply.body, alive)) {
          if (signal.aborted) return;
          if (number !== undefined) seen = Number(number);
          if (name) tell(name, data);
          if (name === "done") return;
        }
      } catch (problem) {
        if (problem instanceof Refused && problem.status < 500 && problem.status !== 429) throw problem;
      } finally {
        clearTimeout(silent);
        signal.removeEventListener("abort", cutIt);
      }
      if (signal.aborted) return;
      lost(true);
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }

  const readingOf = (id) => "/v1/readings/" + encodeURIComponent(id);

  return {
    send, follow,
    models: () => told("GET", "/v1/models"),
    begin: (asked) => told("POST", "/v1/readings", { json: asked }),
    look: (id) => told("GET", readingOf(id)),
    stop: (id) => told("POST", readingOf(id) + "/cancel"),
    drop: (file) => request("DELETE", "/v1/files/" + encodeURIComponent(file)).catch(() => {}),
  };
})();
