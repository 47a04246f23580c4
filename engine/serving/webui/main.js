// The start of the page: the parts are connected, and the server is asked for its models.
import { json, key } from "./api.js";
import { Chat } from "./chat.js";
import { Conversation } from "./conversation.js";
import { ask } from "./dialog.js";
import { byId, el, notice } from "./dom.js";
import * as settings from "./settings.js";
import { Sidebar } from "./sidebar.js";
import * as store from "./store.js";

const POLL_MS = 1500; // between two looks at a model that is being opened
const WIDE = matchMedia("(min-width: 900px)");

const chat = new Chat(withKey, () => sidebar.show());
const sidebar = new Sidebar(chat, open);
let asking = null; // the dialog for the key, which several requests may wait for

// What a function gives, which is called again with an API key if the server wants one.
async function withKey(call) {
  for (;;) {
    const used = key.get();
    try {
      return await call();
    } catch (error) {
      if (error.status !== 401) throw error;
      if (key.get() !== used) continue;
      const text = used ? "The server does not accept this key." : "The server asks for an API key. It is kept until this tab is closed.";
      asking ??= ask({ title: "API key", text, label: "Key", kind: "password", confirm: "Use the key" });
      const given = await asking;
      asking = null;
      if (!given) throw error;
      key.set(given.trim());
      byId("forget").hidden = false;
    }
  }
}

function open(conversation) {
  chat.open(conversation);
  settings.fill(conversation.settings);
  showModels();
  sidebar.show();
  if (!WIDE.matches) toggle("list", false);
}

// --- models ----------------------------------------------------------------------------------------------------------

let models = [];

async function loadModels() {
  try {
    models = (await withKey(() => json("v1/models"))).data;
  } catch (error) {
    return notice(error.message);
  }
  showModels();
  const status = current()?.status.value;
  if (status === "loading") setTimeout(loadModels, POLL_MS);
  if (status === "loaded") await loadProps();
}

// The model of the conversation; the first one if it has none, or one that is not here any more.
function current() {
  const { settings } = chat.conversation;
  const found = models.find((each) => each.id === settings.model);
  if (models.length && !found) settings.model = "";
  return found ?? models[0];
}

function showModels() {
  const select = byId("model"), model = current();
  select.replaceChildren(...models.map((each) => el("option", { value: each.id, text: each.id })));
  if (!model) return;
  select.value = model.id;
  const words = { loading: "is being opened …", unloaded: "is opened by the first message", loaded: `${model.max_model_len} tokens of context` };
  byId("state").textContent = words[model.status.value] ?? model.status.value;
}

async function loadProps() {
  try {
    const props = await withKey(() => json(`props?model=${encodeURIComponent(current().id)}`));
    settings.showDefaults(props);
  } catch (error) {
    notice(error.message);
  }
}

byId("model").addEventListener("change", () => {
  chat.conversation.settings.model = byId("model").value;
  chat.keep(chat.conversation);
  loadModels();
});

// --- settings and panels ---------------------------------------------------------------------------------------------

settings.bind((changed) => {
  Object.assign(chat.conversation.settings, changed);
  chat.keep(chat.conversation);
});

// Show or hide a panel. On a phone it covers the page.
function toggle(name, shown = byId(name).hidden) {
  byId(name).hidden = !shown;
  byId(`${name}-toggle`).setAttribute("aria-expanded", String(shown));
  if (WIDE.matches) return cover();
  if (shown) byId(name === "list" ? "settings" : "list").hidden = true;
  cover();
  if (shown) byId(`${name}-close`).focus();
  else byId(`${name}-toggle`).focus();
}

// What a panel covers is out of reach.
function cover() {
  const covered = !WIDE.matches && !(byId("list").hidden && byId("settings").hidden);
  for (const each of [byId("main"), byId("top")]) each.inert = covered;
  for (const name of ["list", "settings"]) byId(`${name}-toggle`).setAttribute("aria-expanded", String(!byId(name).hidden));
}

for (const name of ["list", "settings"]) {
  byId(`${name}-toggle`).addEventListener("click", () => toggle(name));
  byId(`${name}-close`).addEventListener("click", () => toggle(name, false));
}
WIDE.addEventListener("change", () => {
  byId("list").hidden = !WIDE.matches;
  byId("settings").hidden = true;
  cover();
});

byId("forget").addEventListener("click", () => {
  key.set("");
  byId("forget").hidden = true;
  notice("The API key is forgotten.");
});

// --- keyboard --------------------------------------------------------------------------------------------------------

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  chat.send();
  loadSoon();
});
byId("stop").addEventListener("click", () => chat.stop());
byId("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  chat.send();
  loadSoon();
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented || byId("dialog").open) return;
  if (chat.running) chat.stop();
  else if (!byId("settings").hidden) toggle("settings", false);
  else if (!WIDE.matches && !byId("list").hidden) toggle("list", false);
});

// A model that the first message opens has properties afterwards.
function loadSoon() {
  if (current()?.status.value !== "loaded") setTimeout(loadModels, POLL_MS);
}

// --- start -----------------------------------------------------------------------------------------------------------

store.watch((id) => {
  const changed = !chat.running && id === chat.conversation.id && store.load(id);
  if (changed) open(changed);
  else sidebar.show();
});
addEventListener("pagehide", () => {
  if (!chat.running) return;
  chat.running.message.finish = "stopped";
  chat.keep(chat.running.conversation);
});
byId("forget").hidden = !key.get();
byId("list").hidden = !WIDE.matches;
cover();
const [latest] = store.list();
open(latest ? store.load(latest.id) : new Conversation());
loadModels();
byId("message").focus();
