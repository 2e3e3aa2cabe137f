// Texts on a trace's page and on the server's: put in as text and never as HTML, with everything that
// would be unseen, or would turn what follows around, shown by its name; and the words in which two
// texts differ.
"use strict";

const LONGEST = 20000; // characters that are shown at once

// Controls but tab and line feed, what changes the direction of writing, and other breaks of lines.
const UNSEEN = new RegExp(
  "[\\0-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u00ad\\u061c\\u200b-\\u200f\\u2028-\\u202e" +
  "\\u2060-\\u2069\\ufeff\\ufff9-\\ufffb]", "g");

function visible(text) {
  return String(text).replace(UNSEEN, (one) =>
    "⟨" + one.charCodeAt(0).toString(16).toUpperCase().padStart(2, "0") + "⟩");
}

// A new element with a text in it, put under another.
function el(name, className, text, under) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== "") made.textContent = visible(text);
  under?.append(made);
  return made;
}

function button(words, title, under, press) {
  const made = el("button", "", words, under);
  made.type = "button";
  made.title = title;
  made.addEventListener("click", press);
  return made;
}

// A button that puts words on the clipboard and says so.
function copier(words, under, made) {
  const one = button(words, "copy", under, async () => {
    const text = await made();
    try {
      await navigator.clipboard.writeText(text);
    } catch { // a page on a disk may not have that clipboard
      const field = el("textarea", "", "", document.body);
      field.value = text;
      field.select();
      document.execCommand("copy");
      field.remove();
      one.focus();
    }
    one.textContent = "copied";
    setTimeout(() => { one.textContent = words; }, 1200);
  });
  return one;
}

// Shows a list of things by `put`; those after many characters behind a button.
function bounded(all, length, under, put) {
  let shown = 0;
  function more() {
    let room = LONGEST;
    while (shown < all.length && room > 0) {
      room -= length(all[shown]);
      under.append(put(all[shown]));
      shown += 1;
    }
    const left = all.slice(shown).reduce((sum, one) => sum + length(one), 0);
    if (left) {
      const next = button(left.toLocaleString("en") + " more characters", "", under, () => {
        next.remove();
        more();
      });
    }
  }
  more();
  return under;
}

const WORD = /\s*(?:[\p{L}\p{N}\p{M}_]+|[^\s])|\s+$/gu;
const LARGEST = 4e6; // pairs of words that are looked at

// The words of `after` and those of `before` that are gone: [[kind, text], ...], kind one of
// "same", "gone" and "new". Space around words is no difference.
function difference(before, after) {
  const a = before.match(WORD) ?? [], b = after.match(WORD) ?? [];
  const equal = (i, j) => a[i].trim() === b[j].trim();
  const found = [];
  function add(kind, text) {
    if (found.length && found.at(-1)[0] === kind) found.at(-1)[1] += text;
    else found.push([kind, text]);
  }
  let start = 0, endA = a.length, endB = b.length;
  while (start < Math.min(endA, endB) && equal(start, start)) start += 1;
  while (endA > start && endB > start && equal(endA - 1, endB - 1)) {
    endA -= 1;
    endB -= 1;
  }
  b.slice(0, start).forEach((word) => add("same", word));
  const n = endA - start, m = endB - start, wide = m + 1;
  if (n * m > LARGEST) {
    a.slice(start, endA).forEach((word) => add("gone", word));
    b.slice(start, endB).forEach((word) => add("new", word));
  } else {
    // common[i, j]: words that what follows i and j has in common.
    const common = new Uint16Array((n + 1) * wide);
    for (let i = n - 1; i >= 0; i -= 1) {
      for (let j = m - 1; j >= 0; j -= 1) {
        common[i * wide + j] = equal(start + i, start + j)
          ? common[(i + 1) * wide + j + 1] + 1
          : Math.max(common[(i + 1) * wide + j], common[i * wide + j + 1]);
      }
    }
    let i = 0, j = 0;
    while (i < n || j < m) {
      if (i < n && j < m && equal(start + i, start + j)) {
        add("same", b[start + j]);
        i += 1;
        j += 1;
      } else if (i < n && (j === m || common[(i + 1) * wide + j] >= common[i * wide + j + 1])) {
        add("gone", a[start + i]);
        i += 1;
      } else {
        add("new", b[start + j]);
        j += 1;
      }
    }
  }
  b.slice(endB).forEach((word) => add("same", word));
  return found;
}

// A text with what is new in it and what is gone since another; `null`: with nothing.
function differing(before, after, under) {
  const box = el("div", "text", "", under);
  if (!after.trim()) el("span", "dim", "(empty)", box);
  const parts = before === null ? [["same", after]] : difference(before, after);
  const names = { same: "span", gone: "del", new: "ins" };
  const cut = parts.flatMap(([kind, text]) => {
    const pieces = [];
    for (let k = 0; k < text.length; k += LONGEST) pieces.push([kind, text.slice(k, k + LONGEST)]);
    return pieces;
  });
  return bounded(cut, ([, text]) => text.length, box, ([kind, text]) =>
    el(names[kind], "", kind === "same" ? text.replace(/^ /, " ") : text));
}
