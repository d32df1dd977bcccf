// The conversations that this browser keeps: its storage for the page's address, within bounds. What does not fit drops
// those that were changed the longest ago. Access keys are not in it.

const MAX_CONVERSATIONS = 200;
/** Characters of all conversations as JSON, two bytes each. Browsers keep about five million for an address. */
const MAX_CHARACTERS = 4_000_000;
const MAX_TITLE = 80;
/** Servers below other paths of the address have theirs. */
const PREFIX = `penstock:${new URL(".", document.baseURI).pathname}:`;

const listeners = new Set();
const followers = new Set();
/** Calls a function when the list has changed, in any tab. */
export const onHistory = (listener) => listeners.add(listener);
/** Calls a function with the id of each conversation that another tab keeps. */
export const onKept = (follower) => followers.add(follower);
addEventListener("storage", ({ key, newValue }) => {
  if (key === null || key === `${PREFIX}list`) tell();
  else if (newValue !== null && key.startsWith(PREFIX)) for (const follower of followers) follower(key.slice(PREFIX.length));
});

function tell() {
  for (const listener of listeners) listener();
}

function get(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name)) ?? otherwise;
  } catch {
    return otherwise; // no storage in this browser, or not what this page wrote
  }
}

function put(name, text) {
  try {
    localStorage.setItem(PREFIX + name, text);
    return true;
  } catch {
    return false; // no storage, or it is full
  }
}

function drop(name) {
  try {
    localStorage.removeItem(PREFIX + name);
  } catch {
    // no storage: nothing is there
  }
}

/** What is kept: {id, title, size, changed} of each, the latest first. */
export function keptList() {
  const list = get("list", []);
  return Array.isArray(list) ? list.filter((each) => typeof each?.id === "string" && typeof each.title === "string") : [];
}

/** The messages of a conversation, none if it is not kept. */
export const keptMessages = (id) => get(id, []);

export const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;

export const shortTitle = (text) => text.trim().replace(/\s+/g, " ").slice(0, MAX_TITLE);

/** Keeps a conversation, with the title that any tab gave it. Returns whether there was room, and how many others left for it. */
export function keep({ id, title, messages }) {
  const text = JSON.stringify(messages);
  const list = keptList();
  const before = list.find((each) => each.id === id);
  const others = list.filter((each) => each.id !== id);
  if (text.length > MAX_CHARACTERS) return { kept: false, dropped: 0 };
  const entry = { id, title: before?.title ?? title, size: text.length, changed: Date.now() };
  let room = MAX_CHARACTERS - text.length;
  let fitting = 0;
  while (fitting < others.length && fitting < MAX_CONVERSATIONS - 1 && others[fitting].size <= room) room -= others[fitting++].size;
  let dropped = 0;
  const dropLast = () => {
    drop(others.pop().id);
    dropped += 1;
  };
  while (others.length > fitting) dropLast();
  while (!put(id, text)) {
    if (!others.length) return { kept: false, dropped };
    dropLast();
  }
  const listed = put("list", JSON.stringify([entry, ...others]));
  if (dropped || list[0]?.id !== id) tell();
  return { kept: listed, dropped };
}

export function rename(id, title) {
  put("list", JSON.stringify(keptList().map((each) => (each.id === id ? { ...each, title } : each))));
  tell();
}

export function forget(id) {
  drop(id);
  put("list", JSON.stringify(keptList().filter((each) => each.id !== id)));
  tell();
}
