// A trace of the server as a table: what the model would say after each layer, and what the layer did.
import { el } from "./dom.js";
import { colour, percent, shown } from "./probability.js";

// The element for a trace; `at` and `text`: the token of the answer that was chosen after it.
export function view(trace, at, text) {
  const read = trace.tokens.at(-1).text;
  const title = `How token ${at + 1}, "${shown(text)}", was chosen`;
  const about = `The token before it, "${shown(read)}", on its way through ${trace.layers.length} layers: the tokens that the model would say after each.`;
  const columns = [
    ["Heads", (layer) => layer.heads, (layer) => heads(layer.heads, trace.tokens)],
    ["Experts", (layer) => layer.experts, (layer) => layer.experts.map(({ expert, weight }) => `${expert} (${percent(weight)})`).join(", ")],
    ["States", (layer) => layer.states, (layer) => folded(`${layer.states.length} heads`, layer.states.map((norm, head) => `${head}: norm ${short(norm)}`))],
    ["Not shown", (layer) => layer.missing, (layer) => layer.missing],
  ].filter(([, has]) => trace.layers.some(has));
  const names = ["Layer", "Most probable", "Norm", ...columns.map(([name]) => name)];
  const head = el("tr", {}, ...names.map((name) => el("th", { scope: "col", text: name })));
  const first = row("Embedding", "", trace.embedding, columns.map(() => ""));
  const rows = trace.layers.map((layer) => {
    const cells = columns.map(([, has, show]) => (has(layer) ? show(layer) : ""));
    return row(String(layer.layer), [layer.mixer, layer.network].filter(Boolean).join(", "), layer, cells);
  });
  const table = el("table", {}, el("thead", {}, head), el("tbody", {}, first, ...rows));
  const scrolls = el("div", { class: "scrolls", role: "region", tabindex: "0", "aria-label": title }, table);
  return el("section", {}, el("h3", { text: title }), el("p", { text: about }), scrolls, drafts(trace.drafts));
}

function row(name, kinds, stream, cells) {
  const label = el("th", { scope: "row" }, name, kinds ? el("div", { class: "hint", text: kinds }) : null);
  const said = el("td", { class: "said" }, ...stream.lens.map(likely));
  return el("tr", {}, label, said, el("td", { text: short(stream.norm) }), ...cells.map((cell) => el("td", {}, cell)));
}

function likely({ text, logprob }) {
  const p = Math.exp(logprob);
  return el("div", {}, el("code", { class: `token ${colour(p)}`, text: shown(text) }), ` ${percent(p)}`);
}

function heads(found, tokens) {
  return folded(`${found.length} heads`, found.map(({ top, sink }, head) => {
    const seen = top.map(({ position, weight }) => `${shown(tokens[position].text)} ${percent(weight)}`);
    return `${head}: ${seen.join(", ")}${sink ? `, sink ${percent(sink)}` : ""}`;
  }));
}

function folded(summary, lines) {
  return el("details", {}, el("summary", { text: summary }), el("ul", {}, ...lines.map((text) => el("li", { text }))));
}

function drafts(found) {
  if (!found) return null;
  const said = found.drafts.map(({ text, fate, own }) => `${shown(text)} ${fate}${fate === "refused" ? ` for ${shown(own.text)}` : ""}`);
  return el("p", { text: `Drafts (${found.source}) after ${shown(found.after.text)}: ${said.join(", ")}.` });
}

const short = (value) => (value === null ? "not finite" : value.toPrecision(3));
