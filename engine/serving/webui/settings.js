// The form of the settings of a conversation, and the fields of a request that they become.
import { byId } from "./dom.js";
import { FLAGS, newSeed } from "./conversation.js";

const NUMBERS = { temperature: false, top_p: false, top_k: true, min_p: false, max_tokens: true }; // whether it is whole
const NAMES = ["system", "thinking", ...Object.keys(NUMBERS), "seed", "schema"];

export const TOP = 5; // alternatives to each token

// Call `onchange` with the settings whenever the form changes.
export function bind(onchange) {
  byId("settings-form").addEventListener("input", () => {
    const texts = NAMES.map((name) => [name, byId(name).value]), flags = FLAGS.map((name) => [name, byId(name).checked]);
    onchange(Object.fromEntries([...texts, ...flags]));
  });
  byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
}

export function fill(settings) {
  for (const name of NAMES) byId(name).value = settings[name];
  for (const name of FLAGS) byId(name).checked = settings[name];
}

// Show what the server's `/props` say: what counts for fields that are empty, and whether there are receipts.
export function showDefaults(props) {
  byId("receipts-field").hidden = props?.receipts !== true;
  const defaults = props?.default_generation_settings?.params ?? {};
  for (const name of Object.keys(NUMBERS)) {
    const value = defaults[name];
    // Values are float32 in the engine.
    if (typeof value === "number" && name !== "max_tokens") byId(name).placeholder = String(Number(value.toPrecision(6)));
  }
}

// The fields of a request besides its messages. Throws an Error with a sentence if a value is no number, or no JSON.
export function fields(settings, seed) {
  const found = { seed };
  if (settings.model) found.model = settings.model;
  for (const [name, whole] of Object.entries(NUMBERS)) {
    const typed = settings[name].trim().replace(",", ".");
    if (!typed) continue;
    const value = Number(typed);
    if (!Number.isFinite(value) || (whole && !Number.isInteger(value)))
      throw new Error(`${label(name)} must be a ${whole ? "whole " : ""}number, not "${typed.slice(0, 40)}".`);
    found[name] = value;
  }
  if (settings.thinking) found.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  if (settings.schema.trim()) {
    let schema;
    try {
      schema = JSON.parse(settings.schema);
    } catch (error) {
      throw new Error(`The JSON schema is no JSON: ${error.message}.`);
    }
    found.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (settings.logprobs) Object.assign(found, { logprobs: true, top_logprobs: TOP });
  if (settings.receipts && !byId("receipts-field").hidden) found.receipt = true;
  return found;
}

// The seed of the settings, or a new one.
export function seedOf(settings) {
  const typed = settings.seed.trim();
  if (!typed) return newSeed();
  if (!/^\d+$/.test(typed) || !Number.isSafeInteger(Number(typed)))
    throw new Error(`${label("seed")} must be a whole number from 0 to ${Number.MAX_SAFE_INTEGER}.`);
  return Number(typed);
}

const label = (name) => document.querySelector(`label[for="${name}"]`).textContent;
