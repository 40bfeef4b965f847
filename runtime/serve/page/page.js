// A chat with the model of this server, over its OpenAI API.

import { Answer } from "./answer.js";
import { ask, explained, readHealth, readModel, readReport } from "./client.js";
import { action, copyButton, element } from "./elements.js";
import { keepChat, keepKey, keepSettings, recallChat, recallKey, recallSettings } from "./memory.js";
import { filesOf, MOST, PictureError, pictureRow, readPicture } from "./pictures.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const KEY_NOTE = "This server asks for one. It is forgotten when the tab closes.";
const ALONE = "The page loads nothing from elsewhere.";
const MOST_SENT = 40e6; // characters of a conversation's pictures; the server takes 64 MiB
const NEAR = 80; // pixels from the end at which the page follows a growing answer

const $ = (id) => document.getElementById(id);
const [chat, composer, field, send, scroll] = ["chat", "composer", "ask", "send", "scroll"].map($);

let messages = recallChat();
let running = null; // the AbortController of the answer that is being made
let model = null;
let pending = []; // pictures of the message that is being written
let reading = 0; // files that are being read for it
let follows = true; // the page shows the end of the conversation

// Settings

function readSettings() {
  const values = Object.fromEntries(new FormData($("fields")));
  const request = {};
  for (const name of NUMBERS) {
    if (values[name] !== "" && $(name).validity.valid) request[name] = Number(values[name]);
  }
  if (values.thinking) request.chat_template_kwargs = { enable_thinking: values.thinking === "on" };
  return { request, system: values.system.trim() };
}

function restoreSettings(values) {
  $("fields").reset();
  for (const [name, value] of Object.entries(values)) {
    const input = $("fields").elements.namedItem(name);
    if (input && name !== "key") input.value = value;
  }
}

function openSettings(focus = "system") {
  $("settings").showModal();
  $(focus).focus();
}

$("fields").addEventListener("input", () => {
  keepSettings(Object.fromEntries(new FormData($("fields"))));
});
$("key").addEventListener("change", () => {
  keepKey($("key").value.trim());
  connect();
});
$("fields").addEventListener("submit", (event) => {
  event.preventDefault();
  $("settings").close();
});
$("settings").addEventListener("click", (event) => {
  if (event.target === $("settings")) $("settings").close();
});
$("settings").addEventListener("close", () => field.focus());
$("open-settings").addEventListener("click", () => openSettings());
$("close-settings").addEventListener("click", () => $("settings").close());
$("defaults").addEventListener("click", () => {
  restoreSettings({});
  keepSettings({});
});

// The conversation on the page

function show() {
  chat.replaceChildren(...messages.map((message, index) => turn(message, index)));
  $("welcome").hidden = messages.length > 0;
  document.body.classList.toggle("empty", !messages.length);
  keepChat(messages);
  refresh();
}

function turn(message, index) {
  return message.role === "user" ? question(message, index) : answerAt(message, index).node;
}

function question(message, index) {
  const shown = [];
  if (message.images?.length) shown.push(pictureRow(message.images));
  if (message.lost) shown.push(element("p", { className: "note" }, lostNote(message.lost)));
  if (message.content) shown.push(element("div", { className: "bubble" }, message.content));
  const edit = action("Edit", () => editQuestion(index));
  const actions = element(
    "div",
    { className: "actions" },
    copyButton(() => message.content),
    edit,
  );
  return element("li", { className: "user", ariaLabel: "You" }, ...shown, actions);
}

function lostNote(count) {
  const pictures = count === 1 ? "A picture" : `${count} pictures`;
  return `${pictures} could not be kept when the page was loaded again.`;
}

function answerAt(message, index) {
  return new Answer(message, { retry: () => retry(index), askForKey: () => openSettings("key") });
}

function editQuestion(index) {
  if (running) return;
  const input = element("textarea", { value: messages[index].content, ariaLabel: "Edit message" });
  let images = messages[index].images ?? [];
  const save = () => {
    if (!input.value.trim() && !images.length) return;
    messages = messages.slice(0, index);
    say(input.value.trim(), images);
  };
  const row = element("div");
  const showImages = () =>
    row.replaceChildren(
      pictureRow(images, (gone) => {
        images = images.filter((_, at) => at !== gone);
        showImages();
      }),
    );
  if (images.length) showImages();
  const sendIt = element("button", { type: "button", className: "primary" }, "Send");
  sendIt.addEventListener("click", save);
  const buttons = element("div", { className: "buttons" }, action("Cancel", show), sendIt);
  chat.children[index].replaceChildren(element("div", { className: "editor" }, row, input, buttons));
  input.addEventListener("input", () => grow(input));
  input.addEventListener("keydown", (event) => {
    if (sends(event)) save();
    if (event.key === "Escape") show();
    if (sends(event) || event.key === "Escape") event.preventDefault();
  });
  grow(input);
  input.focus();
}

// Asking

function say(text, images = []) {
  messages.push({ role: "user", content: text, ...(images.length ? { images } : {}) });
  answer();
}

// A turn as the server takes it.
function sent({ role, content, images }) {
  if (!images?.length) return { role, content };
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role, content: content ? [...parts, { type: "text", text: content }] : parts };
}

function retry(index) {
  if (running) return;
  messages = messages.slice(0, index);
  answer();
}

async function answer() {
  const { request, system } = readSettings();
  const past = messages
    .filter((message) => message.content || message.images?.length)
    .map(sent);
  if (system) past.unshift({ role: "system", content: system });
  const message = { role: "assistant", content: "", reasoning: "" };
  messages.push(message);
  show();
  if (matchMedia("(hover: hover)").matches) field.focus(); // elsewhere a keyboard would open
  const shown = answerAt(message, messages.length - 1);
  chat.lastElementChild.replaceWith(shown.node);
  const mine = new AbortController();
  running = mine;
  refresh();
  toEnd();
  if (!model) await identify();
  await follow(message, shown, { ...request, model: model?.id, messages: past }, mine.signal);
  shown.draw();
  if (running !== mine) return; // a new chat has begun
  running = null;
  keepChat(messages);
  $("status").textContent = message.error ? message.error.title : "The answer is complete.";
  refresh();
  toEndIfFollowing();
}

// Read one answer into its message, with the times at which its parts came.
async function follow(message, shown, body, signal) {
  const began = performance.now();
  const since = () => (performance.now() - began) / 1000;
  const meta = {};
  const key = recallKey();
  try {
    for await (const part of ask(body, key, signal)) {
      if (part.reasoning || part.content) {
        meta.first ??= since();
        meta.last = since();
        if (part.content && message.reasoning) message.thoughtSeconds ??= meta.last - meta.first;
        message.reasoning += part.reasoning ?? "";
        message.content += part.content ?? "";
        schedule(shown);
      }
      if (part.usage) Object.assign(meta, tokensOf(part.usage));
      if (part.reason === "length") meta.note = "cut at the token limit";
    }
  } catch (error) {
    if (signal.aborted) meta.note = "stopped";
    else message.error = explained(error);
  }
  if (meta.tokens > 1 && meta.last > meta.first)
    meta.rate = (meta.tokens - 1) / (meta.last - meta.first);
  if (meta.first !== undefined || !message.error) message.meta = meta;
  if (message.reasoning && !message.content) message.thoughtSeconds ??= meta.last - meta.first;
}

function tokensOf(usage) {
  return {
    tokens: usage.completion_tokens,
    reasoning: usage.completion_tokens_details?.reasoning_tokens,
  };
}

let scheduled = null;

function schedule(shown) {
  scheduled ??= requestAnimationFrame(() => {
    scheduled = null;
    shown.draw();
    toEndIfFollowing();
  });
}

function stop() {
  running?.abort();
}

// Scrolling: the page follows an answer until the reader scrolls up.

function toEnd() {
  follows = true;
  scroll.scrollTop = scroll.scrollHeight;
}

function toEndIfFollowing() {
  if (follows) toEnd();
}

scroll.addEventListener("scroll", () => {
  follows = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR;
  $("latest").hidden = follows;
});
$("latest").addEventListener("click", toEnd);
new ResizeObserver(toEndIfFollowing).observe(chat);

// Writing

function refresh() {
  send.classList.toggle("stops", Boolean(running));
  send.disabled = !running && (reading > 0 || !(field.value.trim() || pending.length));
  $("add").hidden = !sees();
  send.ariaLabel = running ? "Stop" : "Send";
  send.title = running ? "Stop (Esc)" : "Send (Enter)";
  document.body.classList.toggle("running", Boolean(running));
}

function grow(input) {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + input.offsetHeight - input.clientHeight}px`;
}

function sends(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = field.value.trim();
  if (running) {
    stop();
  } else if (!reading && (text || pending.length)) {
    const images = pending;
    field.value = "";
    grow(field);
    setPending([]);
    say(text, images);
  }
});
field.addEventListener("input", () => {
  complain("");
  grow(field);
  refresh();
});
field.addEventListener("keydown", (event) => {
  if (sends(event)) {
    event.preventDefault();
    if (!running) composer.requestSubmit();
  } else if (event.key === "ArrowUp" && !field.value && !running) {
    const last = messages.findLastIndex((message) => message.role === "user");
    if (last >= 0) {
      event.preventDefault();
      editQuestion(last);
    }
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) stop();
  if (event.altKey && event.code === "KeyN") newChat();
  if (event.altKey && event.code === "KeyS" && !$("settings").open) openSettings();
});
$("welcome").addEventListener("click", (event) => {
  const idea = event.target.closest("button");
  if (idea) say(idea.textContent.replace(/\s+/g, " ").trim());
});

// Pictures for the message that is being written

function sees() {
  return Boolean(model?.architecture?.input_modalities?.includes("image"));
}

function setPending(urls) {
  pending = urls;
  const remove = (gone) => setPending(pending.filter((_, at) => at !== gone));
  $("pending").replaceChildren(pictureRow(pending, remove));
  $("pending").hidden = !pending.length;
  refresh();
}

function complain(text) {
  $("trouble").textContent = text;
  $("trouble").hidden = !text;
}

async function addPictures(files) {
  complain("");
  if (!model) await identify();
  if (!sees()) {
    complain(model ? "The model takes no pictures." : "The server cannot be reached.");
    return;
  }
  const troubles = [];
  for (const file of files) {
    if (pending.length + reading >= MOST) {
      troubles.push(`A message may have ${MOST} pictures.`);
      break;
    }
    reading += 1;
    refresh();
    try {
      const url = await readPicture(file);
      const all = [...messages.flatMap(({ images }) => images ?? []), ...pending, url];
      if (lengthOf(all) > MOST_SENT)
        throw new PictureError("The conversation has too many pictures; begin a new chat.");
      pending = [...pending, url];
    } catch (error) {
      if (!(error instanceof PictureError)) throw error;
      troubles.push(error.message);
    } finally {
      reading -= 1;
    }
    setPending(pending);
  }
  refresh();
  complain([...new Set(troubles)].join(" "));
  if (pending.length) $("status").textContent = `${pending.length} pictures are added.`;
}

function lengthOf(urls) {
  return urls.reduce((sum, url) => sum + url.length, 0);
}

$("add").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", () => {
  addPictures([...$("files").files]);
  $("files").value = ""; // so that the same file can be chosen again
  field.focus();
});
document.addEventListener("paste", (event) => {
  const files = filesOf(event.clipboardData, true);
  if (!files.length || $("settings").open) return;
  event.preventDefault();
  addPictures(files);
});
document.addEventListener("dragover", (event) => {
  if (!event.dataTransfer?.types.includes("Files")) return;
  event.preventDefault(); // else the browser would leave the page for the file
  document.body.classList.add("dropping");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dropping");
});
document.addEventListener("drop", (event) => {
  document.body.classList.remove("dropping");
  const files = filesOf(event.dataTransfer);
  if (!files.length) return;
  event.preventDefault();
  addPictures(files);
});
$("viewer").addEventListener("click", () => $("viewer").close());

function newChat() {
  stop();
  running = null;
  messages = [];
  setPending([]);
  complain("");
  show();
  field.focus();
}

$("new").addEventListener("click", newChat);

// The server

async function connect() {
  const health = await readHealth();
  $("key-field").hidden = !health.auth;
  $("report").hidden = !health.report;
  const key = await identify();
  $("key-note").textContent = key && !model ? "The server does not accept this key." : KEY_NOTE;
  $("key").ariaInvalid = String(Boolean(key && !model));
  if (health.auth && !model && !$("settings").open) openSettings("key");
}

// Learn the model's name; returns the key that was shown.
async function identify() {
  const key = recallKey();
  model = await readModel(key);
  $("model").textContent = model?.id ?? "lowbit";
  refresh();
  document.title = model ? `${model.id} · lowbit` : "lowbit";
  if (model?.max_model_len) {
    const context = `${model.max_model_len.toLocaleString("en")} tokens of context`;
    $("about").textContent = `${model.id} with ${context}, on this server. ${ALONE}`;
  }
  return key;
}

// A link shows no key, so behind one the report is fetched and saved.
$("report").addEventListener("click", async (event) => {
  const key = recallKey();
  if (!key) return;
  event.preventDefault();
  const href = URL.createObjectURL(await readReport(key));
  element("a", { href, download: "quality.html" }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10000);
});

restoreSettings(recallSettings());
$("key").value = recallKey();
show();
connect();
