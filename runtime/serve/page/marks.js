// Marks inside a paragraph: code, bold, italic, struck out, links. Every character is looked at a
// bounded number of times, whatever the text: the next place of each sign is found once.

import { element } from "./elements.js";

const DEEPEST = 8; // marks inside each other; what is deeper is plain text
const LONGEST = 8000; // characters of a paragraph in which marks are looked for

const ESCAPED = /[\\`*_{}[\]()#+\-.!~|>]/;
const BLANK = /\s/;
const WORD = /\w/;
const TARGET_END = /[\s)<>]/;
const ADDRESS = /https?:\/\/[^\s<>"'`*]*/y;
const ADDRESS_END = /[^.,;:!?)\]]/;
const SAFE = /^(https?:\/\/|mailto:)/i;
const STARS = { "**": "strong", __: "strong", "~~": "del" };

// Appends a text with its marks as nodes.
export function marked(node, text, depth = 0) {
  if (depth > DEEPEST || text.length > LONGEST) {
    node.append(text);
    return node;
  }
  const places = new Places(text);
  let begin = 0; // of the plain text before `at`
  let at = 0;
  while (at < text.length) {
    const [made, end] = markAt(text, at, places, depth);
    if (made === undefined) {
      at = end;
      continue;
    }
    if (at > begin) node.append(text.slice(begin, at));
    node.append(made);
    begin = at = end;
  }
  if (at > begin) node.append(text.slice(begin));
  return node;
}

// Where the next sign of a kind is, for all places of a text, counted when it is first asked for.
class Places {
  constructor(text) {
    this.text = text;
    this.found = new Map();
    this.runs = undefined;
  }

  // The first place from `at` on where `holds(text, place)`; the text's length if there is none.
  next(name, at, holds) {
    const { text, found } = this;
    if (!found.has(name)) {
      const places = new Int32Array(text.length + 1).fill(text.length);
      for (let place = text.length - 1; place >= 0; place -= 1)
        places[place] = holds(text, place) ? place : places[place + 1];
      found.set(name, places);
    }
    return found.get(name)[Math.min(at, text.length)];
  }

  // The first run of exactly `length` backticks from `at` on; calls come with growing `at`.
  run(length, at) {
    if (this.runs === undefined) {
      this.runs = new Map();
      for (const { 0: ticks, index } of this.text.matchAll(/`+/g)) {
        if (!this.runs.has(ticks.length)) this.runs.set(ticks.length, { all: [], first: 0 });
        this.runs.get(ticks.length).all.push(index);
      }
    }
    const runs = this.runs.get(length);
    while (runs && runs.all[runs.first] < at) runs.first += 1;
    return runs?.all[runs.first];
  }
}

// The node or text that begins at a place and the place after it; no node where none begins there.
function markAt(text, at, places, depth) {
  switch (text[at]) {
    case "\\":
      if (at + 1 < text.length && ESCAPED.test(text[at + 1])) return [text[at + 1], at + 2];
      return [undefined, at + 1];
    case "`":
      return codeAt(text, at, places);
    case "*":
    case "_":
    case "~":
      return starredAt(text, at, places, depth);
    case "!":
      return text[at + 1] === "[" ? linkAt(text, at, at + 1, places) : [undefined, at + 1];
    case "[":
      return linkAt(text, at, at, places);
    case "h":
      return addressAt(text, at);
    default:
      return [undefined, at + 1];
  }
}

function codeAt(text, at, places) {
  let begin = at;
  while (text[begin] === "`") begin += 1;
  const end = places.run(begin - at, begin + 1);
  if (end === undefined) return [undefined, begin];
  const content = text.slice(begin, end).replace(/^ ([^]*) $/, "$1");
  return [element("code", {}, content), end + begin - at];
}

function starredAt(text, at, places, depth) {
  const sign = text[at];
  const pair = sign + sign;
  if (text[at + 1] === sign && at + 2 < text.length && !BLANK.test(text[at + 2])) {
    let end = places.next(pair, at + 3, (all, place) => closes(all, place, sign));
    if (end < text.length) {
      if (sign !== "~" && text[at + 2] === sign && text[end + 2] === sign) end += 1; // ***both***
      return [marked(element(STARS[pair]), text.slice(at + 2, end), depth + 1), end + 2];
    }
  }
  if (sign === "~") return [undefined, at + 1];
  const within = sign === "_"; // of a word, where an underscore is one of its letters
  if (within && at > 0 && WORD.test(text[at - 1])) return [undefined, at + 1];
  const end = places.next(sign, at + 1, (all, place) => all[place] === sign);
  if (end >= text.length || end === at + 1) return [undefined, at + 1];
  if (BLANK.test(text[at + 1]) || BLANK.test(text[end - 1])) return [undefined, at + 1];
  if (within && end + 1 < text.length && WORD.test(text[end + 1])) return [undefined, at + 1];
  return [marked(element("em"), text.slice(at + 1, end), depth + 1), end + 1];
}

function closes(text, at, sign) {
  return text[at] === sign && text[at + 1] === sign && at > 0 && !BLANK.test(text[at - 1]);
}

// [label](target "title"); a picture becomes its text, as it is not loaded.
function linkAt(text, at, bracket, places) {
  const nothing = [undefined, at + 1];
  const close = places.next("label", bracket + 1, (all, p) => all[p] === "]" || all[p] === "\n");
  if (text[close] !== "]" || text[close + 1] !== "(") return nothing;
  let begin = places.next("target", close + 2, (all, p) => !BLANK.test(all[p]));
  if (text[begin] === "<") begin += 1;
  const end = places.next("target end", begin, (all, p) => TARGET_END.test(all[p]));
  const last = places.next("link", end, (all, p) => all[p] === ")" || all[p] === "\n");
  if (text[last] !== ")") return nothing;
  const label = text.slice(bracket + 1, close);
  const href = text.slice(begin, end);
  if (!SAFE.test(href)) return [text.slice(at, last + 1), last + 1];
  return [linkNode(href, label || href), last + 1];
}

function addressAt(text, at) {
  ADDRESS.lastIndex = at;
  const found = ADDRESS.exec(text);
  if (!found) return [undefined, at + 1];
  const first = text.indexOf("//", at) + 2;
  let end = at + found[0].length;
  while (end > first && !ADDRESS_END.test(text[end - 1])) end -= 1;
  if (end === first) return [undefined, first];
  const href = text.slice(at, end);
  return [linkNode(href, href), end];
}

function linkNode(href, label) {
  const options = { href, target: "_blank", rel: "noopener noreferrer", title: href };
  return element("a", options, label);
}
