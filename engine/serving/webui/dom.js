// Elements of the page. Text is always set as text: nothing here, or elsewhere in the page, parses HTML.

// An element. `attributes` may have `class`, `text`, `on` (listeners by event) and any attribute; those that are null,
// undefined or false are left out, and true stands for an attribute without a value. Children are nodes, texts, lists of them,
// or null.
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else element.setAttribute(name, value === true ? "" : value);
  }
  // One by one: a call has room for some 100 000 arguments.
  for (const child of children.flat()) if (child !== null) element.append(child);
  return element;
}

// A button that says what it does.
export function button(text, onclick, attributes = {}) {
  return el("button", { type: "button", text, on: { click: onclick }, ...attributes });
}

export const byId = (id) => document.getElementById(id);

// Tell screen readers, in the region that is made for it.
export function announce(text) {
  byId("announcement").textContent = text;
}

// Show a sentence above the message field until the next one; "" removes it.
export function notice(text) {
  const place = byId("notice");
  place.textContent = text;
  place.hidden = !text;
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without HTTPS there is no clipboard, but for this older way.
    const area = el("textarea", { class: "hidden-text", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    const focused = document.activeElement;
    area.select();
    document.execCommand("copy");
    area.remove();
    focused?.focus();
  }
  announce("Copied.");
}

// Save a text as a file with JSON.
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
