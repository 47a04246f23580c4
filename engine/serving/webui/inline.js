// The inline part of Markdown as DOM nodes: code, emphasis, links, line breaks. The time is proportional to the length of the
// text, and the depth of the elements is bounded, whatever the text is.
import { el } from "./dom.js";

const DEEPEST = 32; // open marks of emphasis, and open brackets
const LONGEST_ADDRESS = 2000;
const ESCAPED = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const ADDRESS = /https?:\/\/[^\s<>"`]+/y;
const ENTITY = /&(amp|lt|gt|quot|#39|nbsp);/y;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', "#39": "'", nbsp: "\u00a0" };
const PLAIN = /[^\\`*_~[\]!<&\nh]+/y; // what surely begins nothing

// The nodes of a text.
export function inline(text) {
  const items = []; // nodes, texts, and marks {mark, n, opens, closes}
  const brackets = []; // places in items of "[" and "!["
  const unclosed = new Set(); // lengths of runs of backticks that no later run closes
  let at = 0, found;
  const push = (value) => {
    if (typeof value === "string" && typeof items.at(-1) === "string") items.push(items.pop() + value);
    else items.push(value);
  };
  while (at < text.length) {
    const c = text[at];
    PLAIN.lastIndex = at;
    const plain = PLAIN.exec(text);
    if (plain) {
      push(plain[0]);
      at += plain[0].length;
    } else if (c === "\\" && text[at + 1] === "\n") {
      push(el("br"));
      at += 2;
    } else if (c === "\\" && at + 1 < text.length && ESCAPED.test(text[at + 1])) {
      push(text[at + 1]);
      at += 2;
    } else if (c === "\n") {
      push(el("br"));
      at += 1;
    } else if (c === "`") {
      const n = run(text, at);
      const end = unclosed.has(n) ? -1 : closing(text, at + n, n);
      if (end < 0) {
        unclosed.add(n);
        push(text.slice(at, at + n));
        at += n;
      } else {
        let code = text.slice(at + n, end).replaceAll("\n", " ");
        if (code.startsWith(" ") && code.endsWith(" ") && code.trim()) code = code.slice(1, -1);
        push(el("code", { text: code }));
        at = end + n;
      }
    } else if (c === "*" || c === "_" || c === "~") {
      const n = run(text, at);
      const before = text[at - 1] ?? " ", after = text[at + n] ?? " ";
      const opens = !/\s/.test(after) && (c !== "_" || !WORD.test(before));
      const closes = !/\s/.test(before) && (c !== "_" || !WORD.test(after));
      // Longer runs are rulers; a single "~" is a tilde.
      if (n > 3 || (c === "~" && n !== 2) || !(opens || closes)) push(text.slice(at, at + n));
      else items.push({ mark: c, n, opens, closes });
      at += n;
    } else if (c === "[" || (c === "!" && text[at + 1] === "[")) {
      if (brackets.length < DEEPEST) brackets.push(items.length);
      items.push(c === "!" ? "![" : "[");
      items.push(""); // so that the text after it stays apart
      at += c === "!" ? 2 : 1;
    } else if (c === "]" && brackets.length) {
      const begin = brackets.pop();
      const target = text[at + 1] === "(" ? destination(text, at + 2) : null;
      const url = target && safe(target.address);
      if (url) {
        const inner = emphasized(items.splice(begin).slice(1));
        push(link(url, inner.length ? inner : [url]));
        at = target.end;
      } else {
        push("]");
        at += 1;
      }
    } else if ((c === "h" || c === "<") && (found = address(text, at))) {
      push(found.url ? link(found.url, [found.shown]) : found.shown);
      at = found.end;
    } else {
      ENTITY.lastIndex = at;
      const entity = c === "&" ? ENTITY.exec(text) : null;
      push(entity ? ENTITIES[entity[1]] : c);
      at += entity ? entity[0].length : 1;
    }
  }
  return emphasized(items);
}

// The length of the run of one character at a place.
function run(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

// Where the next run of exactly n backticks begins, or -1.
function closing(text, from, n) {
  for (let at = text.indexOf("`", from); at >= 0; at = text.indexOf("`", at)) {
    const length = run(text, at);
    if (length === n) return at;
    at += length;
  }
  return -1;
}

// The address in `address "title")`, and the place after the parenthesis.
function destination(text, from) {
  let at = from, depth = 0;
  const most = Math.min(text.length, from + LONGEST_ADDRESS);
  while (at < most && !/\s/.test(text[at]) && !(text[at] === ")" && depth === 0)) {
    if (text[at] === "(" && ++depth > 3) return null;
    if (text[at] === ")") depth -= 1;
    at += 1;
  }
  const address = text.slice(from, at).replace(/^<|>$/g, "");
  const title = /\s{1,8}(?:"[^"\n]{0,400}"|'[^'\n]{0,400}')\s{0,8}\)/y;
  title.lastIndex = at;
  if (text[at] === ")") return { address, end: at + 1 };
  return title.test(text) ? { address, end: title.lastIndex } : null;
}

// The address of a web page that stands at a place, with or without angle brackets around it; null if there is none.
function address(text, at) {
  const angle = text[at] === "<" ? 1 : 0;
  ADDRESS.lastIndex = at + angle;
  const match = WORD.test(text[at - 1] ?? " ") ? null : ADDRESS.exec(text);
  if (!match || (angle && text[ADDRESS.lastIndex] !== ">")) return null;
  // What ends a sentence is no part of it.
  const shown = angle ? match[0] : match[0].replace(/[.,:;!?)\]}'*_~]{1,8}$/, "");
  return { shown, url: shown.length <= LONGEST_ADDRESS ? safe(shown) : null, end: at + shown.length + 2 * angle };
}

// An address of a web page; null if it is anything else, such as a script.
function safe(address) {
  try {
    const url = new URL(address);
    return url.protocol === "https:" || url.protocol === "http:" ? url.href : null;
  } catch {
    return null;
  }
}

function link(url, inner) {
  // A link within a link, such as an image in one, leaves the outer one.
  for (const node of inner) if (node instanceof Element) node.querySelectorAll("a").forEach((a) => a.replaceWith(...a.childNodes));
  const nodes = inner.flatMap((node) => (node instanceof Element && node.tagName === "A" ? [...node.childNodes] : [node]));
  return el("a", { href: url, rel: "noopener noreferrer", target: "_blank" }, nodes);
}

// Nodes and texts, with each pair of marks as an element around what is between them.
function emphasized(items) {
  const out = [], open = []; // open: places in out
  const settled = (list) => list.map((item) => (item.mark ? item.mark.repeat(item.n) : item)).filter((item) => item !== "");
  for (const item of items) {
    if (!item.mark) {
      out.push(item);
      continue;
    }
    const mark = { ...item };
    while (mark.closes && mark.n) {
      let k = open.length - 1;
      while (k >= 0 && out[open[k]].mark !== mark.mark) k -= 1;
      if (k < 0) break;
      const opener = out[open[k]];
      const n = Math.min(opener.n, mark.n, 2);
      const inner = settled(out.splice(open[k] + 1));
      opener.n -= n;
      mark.n -= n;
      open.length = k + 1;
      if (!opener.n) {
        out.pop();
        open.pop();
      }
      out.push(el(mark.mark === "~" ? "del" : n === 2 ? "strong" : "em", {}, inner));
    }
    if (!mark.n) continue;
    if (mark.opens && open.length < DEEPEST) open.push(out.length);
    out.push(mark.opens && open.at(-1) === out.length ? mark : mark.mark.repeat(mark.n));
  }
  return settled(out);
}
