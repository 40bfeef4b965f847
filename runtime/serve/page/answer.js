// One answer on the page.

import { action, copyButton, element } from "./elements.js";
import { MarkdownView } from "./markdown.js";

// An answer on the page: reasoning, text, figures and what can be done with it.
export class Answer {
  // `retry` asks again, `askForKey` opens the field of the API key.
  constructor(message, { retry, askForKey }) {
    Object.assign(this, { message, retry, askForKey });
    this.summary = element("summary");
    this.thought = element("div", { className: "thought" });
    this.details = element("details", { hidden: true }, this.summary, this.thought);
    this.text = element("div", { className: "text" });
    this.view = new MarkdownView(this.text);
    this.foot = element("div", { className: "foot" });
    this.node = element(
      "li",
      { className: "assistant", ariaLabel: "Answer" },
      this.details,
      this.text,
      this.foot,
    );
    this.draw();
  }

  draw() {
    const { message } = this;
    const live = message.meta === undefined && !message.error;
    const thinks = live && message.reasoning && !message.content;
    this.node.classList.toggle("live", live);
    this.node.classList.toggle("waits", live && !message.reasoning && !message.content);
    this.node.ariaBusy = String(live);
    this.details.hidden = !message.reasoning;
    this.details.classList.toggle("live", Boolean(thinks));
    if (thinks) this.began ??= performance.now();
    this.summary.textContent = thinks ? `Thinking … ${elapsed(this.began)}` : thoughtFor(message);
    if (this.thought.textContent !== message.reasoning)
      this.thought.textContent = message.reasoning;
    if (this.details.open) this.thought.scrollTop = this.thought.scrollHeight;
    this.view.update(message.content);
    this.foot.replaceChildren(...(live ? [] : this.ending()));
  }

  *ending() {
    const { message } = this;
    if (message.error) {
      const box = element(
        "div",
        { className: "error", role: "alert" },
        element("b", {}, message.error.title),
      );
      box.append(element("p", {}, message.error.text));
      if (message.error.key) box.append(action("Enter API key", this.askForKey));
      yield box;
    } else if (!message.content) {
      yield element(
        "p",
        { className: "note" },
        message.meta.note ? "" : "The model wrote no answer.",
      );
    }
    const figures = message.meta ? figuresOf(message.meta) : [];
    const meta = element("div", { className: "meta" });
    meta.append(...figures.map(([text, title]) => element("span", { title }, text)));
    const actions = element("div", { className: "actions" });
    if (message.content) actions.append(copyButton(() => message.content));
    actions.append(action("Retry", this.retry));
    yield element("div", { className: "line" }, meta, actions);
  }
}

function elapsed(began) {
  const whole = Math.floor((performance.now() - began) / 1000);
  return whole ? `${whole} s` : "";
}

function thoughtFor({ thoughtSeconds }) {
  return thoughtSeconds === undefined ? "Thoughts" : `Thought for ${seconds(thoughtSeconds)}`;
}

function figuresOf({ rate, first, tokens, reasoning, note }) {
  const figures = [];
  if (rate)
    figures.push([`${figure(rate)} tok/s`, "Tokens a second, from the first to the last one"]);
  if (first !== undefined) {
    figures.push([
      `${seconds(first)} to first token`,
      "From your message to the first token, as this browser saw it",
    ]);
  }
  if (tokens) {
    const part = reasoning ? ` (${reasoning.toLocaleString("en")} thinking)` : "";
    figures.push([`${tokens.toLocaleString("en")} tokens${part}`, "Tokens that the model wrote"]);
  }
  if (note) figures.push([note, ""]);
  return figures;
}

function seconds(value) {
  return value < 1 ? `${Math.round(1000 * value)} ms` : `${figure(value)} s`;
}

function figure(value) {
  return value < 100 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}
