// Shows Markdown in a document that counts its nodes: `node render.mjs PAGE_FOLDER`. A JSON object
// of texts by name on stdin becomes one of trees on stdout, or of numbers of nodes with `count`.

import { readFileSync } from "node:fs";

class Node {
  constructor(name) {
    this.localName = name;
    this.childNodes = [];
  }
  append(...children) {
    for (const child of children) this.childNodes.push(child);
  }
  addEventListener() {}
  setAttribute(name, value) {
    this[name] = value;
  }
  tree() {
    const children = this.childNodes.map((child) => (child instanceof Node ? child.tree() : child));
    return this.href === undefined
      ? [this.localName, ...children]
      : [this.localName, { href: this.href, rel: this.rel }, ...children];
  }
  count() {
    let count = 1;
    for (const child of this.childNodes) count += child instanceof Node ? child.count() : 1;
    return count;
  }
}

globalThis.document = { createElement: (name) => new Node(name) };
const [folder, what] = process.argv.slice(2);
const { MarkdownView } = await import(`${folder}/markdown.js`);
const shown = {};
for (const [name, text] of Object.entries(JSON.parse(readFileSync(0, "utf8")))) {
  const node = new Node("div");
  new MarkdownView(node).update(text);
  shown[name] = what === "count" ? node.count() : node.tree().slice(1);
}
console.log(JSON.stringify(shown));
