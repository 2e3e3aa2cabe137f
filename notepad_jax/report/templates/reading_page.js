// The server's page to read with, as a whole: a document and questions become a reading, whose id
// stands in the address, so that the page can be loaded again, and be left.
"use strict";

(() => {
  const at = (id) => document.getElementById(id);
  const drop = at("drop"), chooser = at("file"), problem = at("problem");
  const USUAL = drop.textContent, LONGEST_NAME = 120;
  let file = null; // that was dropped or chosen
  let sent = null; // {source, text, id, used}: the document that the server has already
  let following = null; // AbortController of the reading that is shown
  let sending = null;

  function complain(error) {
    problem.hidden = !error;
    problem.textContent = error ? visible(error.message) : "";
  }

  const size = (bytes) => bytes < 1e6 ? count(Math.ceil(bytes / 1e3)) + " kB" :
    (bytes / 1e6).toLocaleString("en", { maximumFractionDigits: 1 }) + " MB";

  // ------------------------------------------------------------ the document

  function choose(one) {
    file = one;
    drop.textContent = one ? visible(one.name) + ", " + size(one.size) : USUAL;
    at("removing").hidden = !one;
    at("pasting").hidden = !!one;
    complain(null);
  }

  drop.addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", () => {
    if (chooser.files.length) choose(chooser.files[0]);
    chooser.value = ""; // the same one may be chosen again
    at("questions").focus();
  });
  at("remove").addEventListener("click", () => {
    choose(null);
    drop.focus();
  });
  const over = (event, on) => {
    event.preventDefault(); // wherever it falls: the browser would leave this page for it
    drop.classList.toggle("over", on);
  };
  addEventListener("dragover", (event) => over(event, true));
  addEventListener("dragleave", (event) => over(event, false));
  addEventListener("drop", (event) => {
    over(event, false);
    const { files } = event.dataTransfer;
    if (files.length > 1) return complain(new Error("drop one file at a time; a reading has one document"));
    if (!files.length) return;
    choose(files[0]);
    at("questions").focus();
  });

  // Sends the document, unless the server has it from the question before.
  async function documentId() {
    const text = at("text").value;
    if (sent && (file ? sent.source === file : !sent.source && sent.text === text)) return sent.id;
    if (sent && !sent.used) api.drop(sent.id);
    sent = null;
    const plain = visible(file ? file.name : "pasted.txt").replace(/[\\/"]/g, "_");
    const name = plain.slice(-LONGEST_NAME) || "document";
    const { id } = await api.send(file ?? new Blob([text]), name, (done, all) => {
      at("sending").textContent = "sending: " + size(done) + " of " + size(all);
    }, sending.signal);
    sent = { source: file, text, id, used: false };
    return id;
  }

  // ------------------------------------------------------------ asking

  async function begin(questions) {
    const known = sent?.id, file_id = await documentId();
    at("sending").textContent = "asking";
    try {
      return await api.begin({ file_id, questions, detach: true });
    } catch (error) {
      if (error.code !== "file_not_found" || file_id !== known) throw error;
      sent = null; // somebody removed it, or the server forgot it: once more
      return begin(questions);
    }
  }

  async function ask() {
    complain(null);
    const questions = at("questions").value.split("\n").map((line) => line.trim()).filter(Boolean);
    if (!file && !at("text").value.trim()) {
      complain(new Error("there is no document yet: drop one, choose one, or paste a text"));
      return drop.focus();
    }
    if (!questions.length) {
      complain(new Error("there is no question yet"));
      return at("questions").focus();
    }
    sending = new AbortController();
    at("read").disabled = true;
    at("cancel").hidden = false;
    try {
      const reading = await begin(questions);
      sent.used = true;
      history.pushState(null, "", "#reading=" + reading.id);
      show(reading);
      at("of-reading").focus();
    } catch (error) {
      complain(error);
    } finally {
      at("sending").textContent = "";
      at("read").disabled = false;
      at("cancel").hidden = true;
    }
  }

  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!at("read").disabled) ask();
  });
  at("cancel").addEventListener("click", () => sending.abort());
  at("questions").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("ask").requestSubmit();
  });

  // ------------------------------------------------------------ a reading

  const ENDS = { completed: "It was read to its end.", cancelled: "It was stopped.", failed: "It failed." };

  function show(reading) {
    following?.abort();
    const mine = following = new AbortController();
    at("ask").hidden = true;
    at("reading").hidden = false;
    at("courses").replaceChildren();
    const several = reading.samples > 1;
    const courses = reading.readings.map((one) =>
      courseOf(one, several ? " (sample " + (one.sample + 1) + ")" : "", at("courses")));
    const trace = at("trace");
    trace.href = "/traces/" + encodeURIComponent(reading.id) + "/";
    at("stop").dataset.id = reading.id;

    function stands(status, error, stopping) {
      const over = status !== "in_progress";
      at("state").textContent = over ? ENDS[status] ?? status :
        stopping ? "Stopping: turns that were begun are ended." : "Under way. It goes on where this page is left.";
      at("stop").hidden = over;
      at("stop").disabled = stopping;
      trace.hidden = !over;
      if (error) complain(error);
      if (!over) return;
      courses.forEach((one) => one.end());
    }

    stands(reading.status, reading.error, reading.stopping);
    if (reading.status !== "in_progress") return;
    // Events are counted by turns, from 0: what follows those that are shown already.
    const turns = reading.usage.turns;
    api.follow(reading.id, turns ? turns - 1 : null, (name, data) => {
      if (name !== "done") return courses[data.reading].take(name, data);
      stands(data.status, data.error, false);
      heard(ENDS[data.status] ?? data.status, true);
    }, (lost) => {
      if (lost) at("state").textContent = "The connection broke; trying again.";
      else if (!at("stop").hidden) stands("in_progress", null, at("stop").disabled);
    }, mine.signal).catch((error) => { // the server knows it no more
      if (mine.signal.aborted) return;
      complain(error);
      at("state").textContent = "";
      at("stop").hidden = true;
      courses.forEach((one) => one.end());
    });
  }

  at("stop").addEventListener("click", async () => {
    at("stop").disabled = true;
    try {
      await api.stop(at("stop").dataset.id);
      if (!at("stop").hidden) at("state").textContent = "Stopping: turns that were begun are ended.";
    } catch (error) {
      at("stop").disabled = false;
      complain(error);
    }
  });
  at("another").addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return; // another tab
    event.preventDefault();
    history.pushState(null, "", "/");
    arrive();
    drop.focus();
  });

  // ------------------------------------------------------------ the address

  async function arrive() {
    complain(null);
    const id = new URLSearchParams(location.hash.slice(1)).get("reading");
    following?.abort();
    following = null;
    at("ask").hidden = !!id;
    at("reading").hidden = true;
    if (!id) return;
    try {
      const reading = await api.look(id);
      if (new URLSearchParams(location.hash.slice(1)).get("reading") === id) show(reading);
    } catch (error) {
      complain(error);
      at("ask").hidden = false;
    }
  }

  addEventListener("popstate", arrive);
  api.models().then(({ data }) => {
    const reader = data.find((one) => one.id.endsWith(":notepad")); // the first policy's
    at("model").textContent = visible(reader.id) + " reads here.";
  }).catch(complain);
  arrive();
})();
