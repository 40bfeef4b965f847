// What this browser keeps of the page. It may hold anything: only what has the right shape is used.

import { PICTURE } from "./pictures.js";

const SETTINGS = "lowbit.settings"; // in this browser
const KEY = "lowbit.key"; // in this tab
const CHAT = "lowbit.chat"; // in this tab

const isText = (value) => typeof value === "string";
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const FIGURES = {
  ...Object.fromEntries(
    ["rate", "first", "last", "tokens", "reasoning"].map((name) => [name, Number.isFinite]),
  ),
  note: isText,
};
const ERROR = { title: isText, text: isText, key: (value) => typeof value === "boolean" };
const isPicture = (value) => isText(value) && PICTURE.test(value);
const QUESTION = {
  role: (value) => value === "user",
  content: isText,
  images: (value) => Array.isArray(value) && value.every(isPicture),
  lost: Number.isFinite,
};
const ANSWER = {
  role: (value) => value === "assistant",
  content: isText,
  reasoning: isText,
  thoughtSeconds: Number.isFinite,
  meta: isObject,
  error: (value) => isObject(value) && isText(value.title) && isText(value.text),
};

// The turns of this tab's conversation: role, content; of answers also reasoning, meta, error.
export function recallChat() {
  const found = recall("sessionStorage", CHAT);
  return Array.isArray(found) ? found.map(turnOf).filter((turn) => turn !== null) : [];
}

// Pictures may be more than the browser keeps; then the turns are kept without them.
export function keepChat(turns) {
  if (!keep("sessionStorage", CHAT, turns)) keep("sessionStorage", CHAT, turns.map(withoutImages));
}

function withoutImages({ images, ...turn }) {
  return images ? { ...turn, lost: images.length + (turn.lost ?? 0) } : turn;
}

// The fields of the settings by name, as text.
export function recallSettings() {
  const found = recall("localStorage", SETTINGS);
  if (!isObject(found)) return {};
  return Object.fromEntries(Object.entries(found).filter(([, value]) => isText(value)));
}

export function keepSettings(fields) {
  keep("localStorage", SETTINGS, fields);
}

export function recallKey() {
  const found = recall("sessionStorage", KEY);
  return isText(found) ? found : "";
}

export function keepKey(key) {
  keep("sessionStorage", KEY, key);
}

// A turn with the fields that fit, or null. An answer without an end was stopped by a reload.
function turnOf(value) {
  if (!isObject(value) || !isText(value.content)) return null;
  if (value.role === "user") return pick(value, QUESTION);
  if (value.role !== "assistant") return null;
  const turn = pick(value, ANSWER);
  if (turn.meta) turn.meta = pick(turn.meta, FIGURES);
  if (turn.error) turn.error = pick(turn.error, ERROR);
  else turn.meta ??= { note: "stopped" };
  return turn;
}

function pick(value, shapes) {
  const fields = Object.entries(shapes).filter(
    ([name, fits]) => Object.hasOwn(value, name) && fits(value[name]),
  );
  return Object.fromEntries(fields.map(([name]) => [name, value[name]]));
}

// A browser may refuse its storage, as early as it is named.

function recall(storage, name) {
  try {
    return JSON.parse(globalThis[storage].getItem(name));
  } catch {
    return null;
  }
}

function keep(storage, name, value) {
  try {
    globalThis[storage].setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false; // full, or refused: the page works without
  }
}
