// The conversations, in the storage of the browser: one entry each, so that two tabs do not overwrite each other's.
import { Conversation, FORMAT, newId } from "./conversation.js";

const PREFIX = "bitmirror.conversation.";

const seen = new Map(); // entries that have been read, by their names: {text, id, name, updated}

// The id, name and time of every conversation that can be read, the latest first.
export function list() {
  const found = [];
  for (const name of names()) {
    const text = localStorage.getItem(name);
    if (seen.get(name)?.text !== text) {
      const conversation = read(text);
      if (!conversation) continue;
      seen.set(name, { text, id: conversation.id, name: conversation.name, updated: conversation.updated });
    }
    found.push(seen.get(name));
  }
  return found.sort((a, b) => b.updated - a.updated);
}

// A conversation; null if there is none.
export function load(id) {
  return read(localStorage.getItem(PREFIX + id));
}

// All conversations, the latest first.
export function all() {
  return list().map((each) => load(each.id));
}

function names() {
  try {
    return Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  } catch {
    return []; // the browser allows no storage
  }
}

function read(text) {
  try {
    return Conversation.read(JSON.parse(text));
  } catch {
    return null; // it is damaged, or there is none
  }
}

// Keep a conversation. Throws an Error with a sentence if there is no room.
export function save(conversation) {
  if (!conversation.messages.size && !conversation.title) return;
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
  } catch {
    throw new Error("The browser has no room for this conversation: export it, or delete others.");
  }
}

export function remove(conversation) {
  try {
    localStorage.removeItem(PREFIX + conversation.id);
  } catch {
    // the browser allows no storage
  }
}

// Call `listener` when another tab has changed conversations, with the id of the one; null: several.
export function watch(listener) {
  addEventListener("storage", (event) => {
    if (event.key === null) listener(null);
    else if (event.key.startsWith(PREFIX)) listener(event.key.slice(PREFIX.length));
  });
}

// The text of a file with some conversations.
export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

// The conversations in the text of such a file, as new ones. Throws an Error with a sentence if it is another file.
export function imported(text) {
  try {
    const value = JSON.parse(text);
    if (value?.format !== FORMAT || value.version !== 1) throw new TypeError("it was not exported by this page");
    const found = value.conversations.map(Conversation.read);
    for (const each of found) each.id = newId();
    return found;
  } catch (error) {
    const reason = error instanceof SyntaxError ? "it is no JSON" : error.message;
    throw new Error(`The file cannot be imported: ${reason}.`);
  }
}
