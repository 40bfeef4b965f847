// Reads the page's memory: `node memory.mjs PAGE_FOLDER`. A list of [chat, key, settings] on stdin, as
// storage has them, becomes one of what the page uses; null stands for a storage that is refused.

import { readFileSync } from "node:fs";

const { recallChat, recallKey, recallSettings, keepChat } = await import(
  `${process.argv[2]}/memory.js`
);

function refuse() {
  throw new Error("SecurityError");
}

function storing(values) {
  return { getItem: (name) => values[name] ?? null, setItem: refuse };
}

const found = JSON.parse(readFileSync(0, "utf8")).map((kept) => {
  const storages = kept && {
    sessionStorage: storing({ "lowbit.chat": kept[0], "lowbit.key": kept[1] }),
    localStorage: storing({ "lowbit.settings": kept[2] }),
  };
  for (const name of ["sessionStorage", "localStorage"]) {
    const get = () => (storages ? storages[name] : refuse());
    Object.defineProperty(globalThis, name, { get, configurable: true });
  }
  keepChat([]); // a full storage
  return [recallChat(), recallKey(), recallSettings()];
});
console.log(JSON.stringify(found));
