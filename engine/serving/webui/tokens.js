// The tokens of an answer, coloured by probability. One of them has the focus or the pointer; its alternatives are listed.
import { announce, button, el } from "./dom.js";
import { LEVELS, colour, percent, shown } from "./probability.js";
import { view } from "./trace.js";

// An element with the tokens that are shown by `show`, in which the arrow keys, Home and End move.
export class Tokens {
  // trace: gives the trace of the pass that a token was chosen after.
  constructor(trace) {
    this.trace = trace;
    this.list = el("div", { class: "tokens", role: "listbox", "aria-label": "Tokens of the answer", "aria-orientation": "horizontal" });
    this.details = el("div", { class: "alternatives" });
    const legend = el("p", { class: "legend" }, "Probability: ");
    const names = [...LEVELS.map((least) => `≥ ${100 * least} %`), `< ${100 * LEVELS.at(-1)} %`];
    names.forEach((name, level) => legend.append(el("span", { class: `token p${level}`, text: name }), " "));
    this.traced = el("div", { class: "traced" });
    this.tracing = 0; // the number of traces that were asked for
    this.element = el("div", {}, legend, this.list, this.details, this.traced);
    this.tokens = [];
    this.current = -1;
    this.decoder = new TextDecoder();
    const place = (event) => [...this.list.children].indexOf(event.target.closest("[role=option]"));
    this.list.addEventListener("pointerover", (event) => place(event) >= 0 && this.select(place(event)));
    this.list.addEventListener("focusin", (event) => place(event) >= 0 && this.select(place(event)));
    this.list.addEventListener("keydown", (event) => this.move(event));
    this.hint();
  }

  hint() {
    this.details.replaceChildren(el("p", { text: "Point at a token, or move with the arrow keys, to see its alternatives. Enter, or the button, traces it through the layers." }));
  }

  // Show tokens, of which those that were shown before are the first.
  show(tokens) {
    for (let at = this.list.children.length; at < tokens.length; at += 1) {
      const { logprob, bytes, token } = tokens[at];
      // The bytes of a character may be divided among tokens.
      const text = bytes ? this.decoder.decode(new Uint8Array(bytes), { stream: true }) : token;
      const p = Math.exp(logprob);
      const name = `${shown(token)}, ${percent(p)}`;
      const attributes = { role: "option", tabindex: at ? "-1" : "0", "aria-selected": "false", "aria-label": name };
      this.list.append(el("span", { class: `token ${colour(p)}`, text: text || "·", ...attributes }));
    }
    this.tokens = tokens;
  }

  select(at) {
    const before = this.list.children[Math.max(0, this.current)], now = this.list.children[at];
    before.tabIndex = -1;
    before.setAttribute("aria-selected", "false");
    now.tabIndex = 0;
    now.setAttribute("aria-selected", "true");
    this.current = at;
    const token = this.tokens[at];
    const others = token.top_logprobs ?? [];
    const listed = others.some((other) => same(other, token)) ? others : [...others, token];
    const rows = listed.map((other) =>
      el("tr", { class: same(other, token) ? "chosen" : null },
        el("td", {}, el("code", { text: shown(other.token) }), same(other, token) ? " chosen" : ""),
        el("td", { text: percent(Math.exp(other.logprob)) }),
        el("td", { text: other.logprob.toFixed(4) })));
    const head = el("tr", {}, ...["Token", "Probability", "Logarithm"].map((name) => el("th", { scope: "col", text: name })));
    const caption = el("caption", { text: `Token ${at + 1} of ${this.tokens.length}` });
    const table = el("table", {}, caption, el("thead", {}, head), el("tbody", {}, ...rows));
    this.details.replaceChildren(table, button("Trace", () => this.traceToken(at), { "aria-label": `Trace token ${at + 1} through the layers` }));
  }

  // Show how a token was chosen, layer by layer.
  async traceToken(at) {
    const number = (this.tracing += 1), token = this.tokens[at];
    this.traced.replaceChildren(el("p", { text: "Tracing …" }));
    let found;
    try {
      found = view(await this.trace(at), at, token.token);
    } catch (error) {
      found = el("p", { class: "error", text: error.message });
    }
    if (number !== this.tracing) return;
    this.traced.replaceChildren(found);
    announce(found.querySelector("h3")?.textContent ?? found.textContent);
    found.scrollIntoView({ block: "nearest" });
  }

  move(event) {
    const last = this.tokens.length - 1, at = Math.max(0, this.current);
    const places = { ArrowLeft: at - 1, ArrowUp: at - 1, ArrowRight: at + 1, ArrowDown: at + 1, Home: 0, End: last };
    if (event.key === "Enter") this.traceToken(at);
    if (!(event.key in places)) return;
    event.preventDefault();
    this.list.children[Math.min(last, Math.max(0, places[event.key]))]?.focus();
  }
}

// Tokens may have the same text and different bytes.
const same = (a, b) => a.logprob === b.logprob && String(a.bytes ?? a.token) === String(b.bytes ?? b.token);
