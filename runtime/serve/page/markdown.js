// The basics of Markdown as DOM nodes. Text of the model never becomes HTML.

import { copyButton, element } from "./elements.js";
import { marked } from "./marks.js";

const DEEPEST = 8; // lists and quotes inside each other; what is deeper is plain text

const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6}) +(?! )([^]*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,12})([-*+]|\d{1,9}[.)])(\s+|$)/;
const COLUMN = /^\s*:?-+:?\s*$/;

// Shows a growing text: blocks that have not changed keep their nodes, so selections in them stay.
export class MarkdownView {
  constructor(parent) {
    this.parent = parent;
    this.shown = [];
  }

  update(text) {
    const blocks = blocksOf(text);
    let same = 0;
    while (
      same < Math.min(blocks.length, this.shown.length) &&
      equal(blocks[same], this.shown[same])
    )
      same += 1;
    while (this.parent.childNodes.length > same) this.parent.lastChild.remove();
    appendAll(this.parent, blocks.slice(same), (block) => nodeOf(block, 0));
    this.shown = blocks;
  }
}

function equal(one, other) {
  return (
    one.kind === other.kind &&
    one.info === other.info &&
    one.lines.join("\n") === other.lines.join("\n")
  );
}

// Blocks of a text: `kind`, `lines` without their marks, and `info` beside them.
function blocksOf(text) {
  const lines = text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const [block, next] = blockAt(lines, at);
    if (block) blocks.push(block);
    at = next;
  }
  return blocks;
}

function blockAt(lines, at) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading)
    return [
      {
        kind: "heading",
        info: heading[1].length,
        lines: [heading[2].replace(/ #+ *$/, "").trim()],
      },
      at + 1,
    ];
  if (RULE.test(line)) return [{ kind: "rule", lines: [] }, at + 1];
  if (QUOTE.test(line)) {
    const end = endOf(lines, at, (each) => QUOTE.test(each));
    return [
      { kind: "quote", lines: lines.slice(at, end).map((each) => each.replace(QUOTE, "")) },
      end,
    ];
  }
  if (ITEM.test(line)) return list(lines, at);
  if (line.includes("|") && cellsOf(lines[at + 1] ?? "").every((cell) => COLUMN.test(cell))) {
    const end = endOf(lines, at + 2, (each) => each.includes("|"));
    return [{ kind: "table", lines: lines.slice(at, end) }, end];
  }
  const end = endOf(lines, at + 1, (each) => each.trim() && !begins(each));
  return [{ kind: "paragraph", lines: lines.slice(at, end) }, end];
}

function begins(line) {
  return (
    FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line)
  );
}

function endOf(lines, at, goesOn) {
  while (at < lines.length && goesOn(lines[at])) at += 1;
  return at;
}

function code(lines, at, fence) {
  const indent = lines[at].search(/\S/);
  const closes = (line) =>
    line.trim().startsWith(fence[1]) && !line.trim().replaceAll(fence[1][0], "");
  const end = endOf(lines, at + 1, (line) => !closes(line));
  const dedented = lines.slice(at + 1, end).map((line) => dedent(line, indent));
  return [{ kind: "code", info: fence[2].trim().split(/\s/)[0], lines: dedented }, end + 1];
}

// An item goes on over lines that are indented, and over blank lines before such lines.
function list(lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const kind = /\d/.test(mark) ? "numbers" : "bullets";
  const items = [];
  let begin = at;
  while (begin < lines.length) {
    const item = ITEM.exec(lines[begin]);
    if (!item || item[1].length > indent.length + 1 || /\d/.test(item[2]) !== (kind === "numbers"))
      break;
    if (RULE.test(lines[begin])) break;
    const width = item[1].length + item[2].length + 1;
    const end = endOf(
      lines,
      begin + 1,
      (line) => !line.trim() || line.search(/\S/) > item[1].length + 1,
    );
    const body = lines.slice(begin + 1, end).map((line) => dedent(line, width));
    items.push([lines[begin].slice(item[0].length), ...body].join("\n").trimEnd());
    begin = end;
  }
  return [{ kind, info: parseInt(mark, 10) || 1, lines: items }, begin];
}

function dedent(line, width) {
  return line.slice(Math.min(width, Math.max(line.search(/\S|$/), 0)));
}

function nodeOf({ kind, info, lines }, depth) {
  const text = lines.join("\n");
  switch (kind) {
    case "code":
      return codeNode(info, text);
    case "heading":
      return marked(element(`h${Math.min(info + 2, 6)}`), text);
    case "rule":
      return element("hr");
    case "quote":
      return filled(element("blockquote"), text, depth + 1);
    case "bullets":
    case "numbers": {
      const node = element(kind === "bullets" ? "ul" : "ol");
      if (kind === "numbers" && info !== 1) node.start = info;
      return appendAll(node, lines, (item) => filled(element("li"), item, depth + 1));
    }
    case "table":
      return tableNode(lines);
    default:
      return marked(element("p"), text);
  }
}

// The blocks of an item or a quote; a single paragraph stands without its own margins.
function filled(node, text, depth) {
  if (depth > DEEPEST) {
    node.append(text);
    return node;
  }
  const blocks = blocksOf(text);
  if (blocks[0]?.kind === "paragraph" && node.localName === "li") {
    marked(node, blocks.shift().lines.join("\n"));
  }
  return appendAll(node, blocks, (block) => nodeOf(block, depth));
}

// One after the other: a call takes no more than some 100,000 arguments.
function appendAll(node, values, nodeFor) {
  for (const value of values) node.append(nodeFor(value));
  return node;
}

function cellsOf(line) {
  return line
    .trim()
    .replace(/^\||\|$/g, "")
    .split(/(?<!\\)\|/);
}

function tableNode([head, , ...rows]) {
  const cell = (name, text) => marked(element(name), text.trim().replaceAll("\\|", "|"));
  const row = (line, name) =>
    appendAll(element("tr"), cellsOf(line), (text) => cell(name, text));
  const body = appendAll(element("tbody"), rows, (line) => row(line, "td"));
  const table = element("table", {}, element("thead", {}, row(head, "th")), body);
  return element(
    "div",
    { className: "table", tabIndex: 0, role: "region", ariaLabel: "Table" },
    table,
  );
}

function codeNode(language, text) {
  const body = element("code", {}, text);
  const copy = copyButton(() => body.textContent);
  const head = element(
    "div",
    { className: "code-head" },
    element("span", {}, language || "text"),
    copy,
  );
  return element("div", { className: "code" }, head, element("pre", { tabIndex: 0 }, body));
}
