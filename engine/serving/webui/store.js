// The conversations, in the storage of the browser: one entry each, so that two tabs do not overwrite each other's.
import { Conversation, FORMAT, newId } from "./conversation.js";

const PREFIX = "bitmirror.conversation.";

// All conversations that can be read, the latest first.
export function all() {
  const found = [];
  for (const name of names()) {
    const conversation = read(localStorage.getItem(name));
    if (conversation) found.push(conversation);
  }
  return found.sort((a, b) => b.updated - a.updated);
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
    return null;
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

// Call `listener` when another tab has changed the conversations.
export function watch(listener) {
  addEventListener("storage", (event) => {
    if (event.key === null || event.key.startsWith(PREFIX)) listener();
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
