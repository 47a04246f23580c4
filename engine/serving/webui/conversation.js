// A conversation: a tree of messages, of which one path is shown. Editing a message or asking again adds a branch.

const TEXTS = ["model", "system", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "schema", "thinking"];
export const FLAGS = ["logprobs", "receipts"];
const NUMBERS = ["promptN", "cacheN", "promptRate", "answerN", "answerRate", "drafted", "kept"];

export const FORMAT = "bitmirror.conversations";

// Settings as they are typed; "" leaves a value to the server.
export function emptySettings() {
  return Object.fromEntries([...TEXTS.map((name) => [name, ""]), ...FLAGS.map((name) => [name, false])]);
}

export class Conversation {
  constructor(settings = emptySettings()) {
    this.id = newId();
    this.title = "";
    this.updated = Date.now();
    this.settings = { ...settings };
    this.messages = new Map(); // by id, in the order in which they were made
    this.next = null; // the first message that is shown
  }

  // Add a message after another one, null: at the beginning, and show it.
  add(parent, role, content, more = {}) {
    const id = 1 + Math.max(0, ...this.messages.keys());
    const message = { id, parent: parent?.id ?? null, next: null, role, content, ...more };
    this.messages.set(id, message);
    this.show(message);
    return message;
  }

  // Make a message the one of its siblings that is shown.
  show(message) {
    (this.parentOf(message) ?? this).next = message.id;
  }

  parentOf(message) {
    return this.messages.get(message.parent) ?? null;
  }

  siblings(message) {
    return [...this.messages.values()].filter((each) => each.parent === message.parent);
  }

  // The messages that are shown.
  path() {
    const found = [];
    for (let id = this.next; this.messages.has(id); id = found.at(-1).next) found.push(this.messages.get(id));
    return found;
  }

  // The messages before one.
  before(message) {
    const found = [];
    for (let each = this.parentOf(message); each; each = this.parentOf(each)) found.unshift(each);
    return found;
  }

  // The title, or else the beginning of the first message.
  get name() {
    const first = this.path().find((message) => message.role === "user")?.content.trim().split("\n")[0] ?? "";
    return this.title || (first.length > 60 ? `${first.slice(0, 59)}…` : first) || "New conversation";
  }

  // As JSON: all but log-probabilities, which the same seed gives again.
  toJSON() {
    const { id, title, updated, settings, next } = this;
    const messages = [...this.messages.values()].map(({ tokens, ...message }) => message);
    return { id, title, updated, settings, next, messages };
  }

  // A conversation from the value of some JSON, which anybody may have written. Throws TypeError if it is none.
  static read(value) {
    const made = new Conversation();
    if (!Array.isArray(value?.messages)) throw new TypeError("there is a conversation without messages");
    if (typeof value.id === "string" && /^[0-9a-f]{16}$/.test(value.id)) made.id = value.id;
    made.title = text(value.title).slice(0, 200);
    made.updated = number(value.updated) ?? made.updated;
    for (const name of TEXTS) made.settings[name] = text(value.settings?.[name]);
    for (const name of FLAGS) made.settings[name] = value.settings?.[name] === true;
    for (const each of value.messages) {
      const known = (id) => id === null || made.messages.has(id);
      const valid = Number.isSafeInteger(each?.id) && each.id > 0 && !made.messages.has(each.id) && known(each.parent);
      if (!valid || !["user", "assistant"].includes(each.role) || typeof each.content !== "string")
        throw new TypeError("there is a message that is none");
      made.messages.set(each.id, message(each));
    }
    made.next = number(value.next);
    const latest = new Map([...made.messages.values()].map((each) => [each.parent, each.id]));
    for (const each of [made, ...made.messages.values()]) {
      const id = each === made ? null : each.id;
      const next = made.messages.get(each.next);
      if (next?.parent !== id || !next) each.next = latest.get(id) ?? null;
    }
    return made;
  }
}

function message(value) {
  const { id, parent, role, content } = value;
  const made = { id, parent, role, content, next: number(value.next) };
  for (const name of ["reasoning", "model", "fingerprint", "finish", "error"])
    if (text(value[name])) made[name] = value[name];
  if (Number.isSafeInteger(value.seed)) made.seed = value.seed;
  if (value.edited === true) made.edited = true;
  if (value.receipt && typeof value.receipt === "object") made.receipt = value.receipt;
  if (value.stats) made.stats = Object.fromEntries(NUMBERS.map((name) => [name, number(value.stats[name]) ?? 0]));
  return made;
}

const text = (value) => (typeof value === "string" ? value : "");
const number = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);

export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

// A seed, below 2^32.
export function newSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}
