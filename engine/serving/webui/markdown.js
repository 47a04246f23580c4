// Markdown as DOM nodes, without a detour over HTML: headings, paragraphs, code, lists, quotes, tables, rulers.
import { button, copy, el } from "./dom.js";
import { inline } from "./inline.js";

const DEEPEST = 12; // levels of lists and quotes
const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const TOP = 2; // levels of headings above those of an answer

// An element whose content is the Markdown that was last given to `show`. Blocks that stay the same keep their elements, so
// that a selection, or a button that has the focus, survives while an answer grows.
export class Markdown {
  constructor() {
    this.element = el("div", { class: "markdown" });
    this.shown = [];
  }

  show(text) {
    const found = parse(linesOf(text), 0);
    let same = 0;
    while (same < found.length && same < this.shown.length && found[same].source === this.shown[same].source) same += 1;
    for (const block of this.shown.splice(same)) block.element.remove();
    for (const block of found.slice(same)) {
      block.element = block.make();
      this.element.append(block.element);
      this.shown.push(block);
    }
  }
}

// A line that begins code: its marks, and what follows them; null if it is another line.
function fenceOf(line) {
  const found = FENCE.exec(line);
  return found && found[1][0] === "`" && found[2].includes("`") ? null : found;
}

// The lines of a text. Tabs indent by four spaces, but stay in code, which somebody may copy.
function linesOf(text) {
  let open = null; // the fence of the code that a line is in
  return text.replaceAll("\r\n", "\n").split("\n").map((line) => {
    const fence = fenceOf(line.trimStart());
    if (open) {
      if (fence?.[1].startsWith(open) && !fence[2].trim()) open = null;
      return line;
    }
    if (fence) [, open] = fence;
    return line.replaceAll("\t", "    ");
  });
}

// The blocks of some lines: {source, make}; `make` returns an element.
function parse(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [end, make] = block(lines, at, depth);
    blocks.push({ source: lines.slice(at, end).join("\n"), make });
    at = end;
  }
  return blocks;
}

const elements = (lines, depth) => parse(lines, depth).map((each) => each.make());

// The block that begins at a line: the line after it, and what makes its element.
function block(lines, at, depth) {
  const line = lines[at];
  const fence = fenceOf(line);
  if (fence) return code(lines, at, fence);
  const marks = /^ {0,3}(#{1,6})(?= |$)/.exec(line);
  if (marks) {
    let text = line.slice(marks[0].length).trim();
    const bare = text.replace(/#{1,20}$/, "");
    if (!bare || bare.endsWith(" ")) text = bare.trim();
    const level = Math.min(6, marks[1].length + TOP);
    return [at + 1, () => el(`h${level}`, {}, inline(text))];
  }
  if (ruler(line)) return [at + 1, () => el("hr")];
  if (depth < DEEPEST && /^ {0,3}>/.test(line)) return quote(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return list(lines, at, depth);
  const aligns = line.includes("|") && at + 1 < lines.length ? alignments(lines[at + 1]) : null;
  if (aligns && cells(line).length === aligns.length) return table(lines, at, aligns);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines[end], depth)) end += 1;
  // Spaces at the beginning of a line stay: models that know no Markdown indent code with them.
  const text = lines.slice(at, end).map((each) => each.trimEnd()).join("\n");
  return [end, () => el("p", {}, inline(text))];
}

function ruler(line) {
  const bare = line.replaceAll(" ", "");
  return bare.length >= 3 && "-*_".includes(bare[0]) && bare === bare[0].repeat(bare.length);
}

// Whether a line ends the paragraph before it.
function interrupts(line, depth) {
  const item = depth < DEEPEST && ITEM.exec(line);
  // A number begins a list within a paragraph only if it is 1, and no item is empty there.
  if (item && item[3] && (!/\d/.test(item[2]) || parseInt(item[2]) === 1)) return true;
  return fenceOf(line) !== null || /^ {0,3}(#{1,6} |>)/.test(line) || ruler(line);
}

function code(lines, at, fence) {
  const [, marks, info] = fence;
  const indent = lines[at].length - lines[at].trimStart().length;
  let end = at + 1;
  const closes = (line) => {
    const bare = line.trim();
    return bare.length >= marks.length && bare === marks[0].repeat(bare.length) && !line.startsWith("    ");
  };
  while (end < lines.length && !closes(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, line.search(/[^ ]|$/)))).join("\n");
  const language = info.trim().split(" ")[0].slice(0, 30);
  const make = () => {
    const label = el("span", { text: language || "text" });
    const bar = el("div", { class: "bar" }, label, button("Copy", () => copy(text), { "aria-label": "Copy the code" }));
    const name = `Code${language ? ` in ${language}` : ""}`;
    // A box that scrolls must be within reach of the keyboard.
    const pre = el("pre", { tabindex: "0", role: "region", "aria-label": name }, el("code", { text }));
    return el("div", { class: "code" }, bar, pre);
  };
  return [Math.min(lines.length, end + 1), make];
}

function quote(lines, at, depth) {
  let end = at;
  const inner = [];
  while (end < lines.length && lines[end].trim()) {
    if (/^ {0,3}>/.test(lines[end])) inner.push(lines[end].replace(/^ {0,3}> ?/, ""));
    else if (inner.at(-1)?.trim() && !interrupts(lines[end], depth)) inner.push(lines[end]);
    else break;
    end += 1;
  }
  return [end, () => el("blockquote", {}, elements(inner, depth + 1))];
}

function list(lines, at, depth) {
  const [, , first] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(first);
  const kind = first.at(-1);
  const items = []; // lists of lines
  let end = at, width = 0, loose = false, blank = false, fenced = false;
  while (end < lines.length) {
    const line = lines[end];
    const item = ITEM.exec(line);
    const indent = line.length - line.trimStart().length;
    if (!line.trim()) {
      blank = true;
      items.at(-1).push("");
    } else if (item && indent < (width || Infinity)) {
      if (item[2].at(-1) !== kind || /\d/.test(item[2]) !== ordered || ruler(line)) break;
      const space = item[3].length > 4 || !item[3] ? 1 : item[3].length;
      width = item[1].length + item[2].length + space;
      loose ||= blank;
      blank = fenced = false;
      items.push([line.slice(width)]);
    } else if (indent >= width || (!blank && !interrupts(line, depth))) {
      loose ||= blank && !fenced;
      blank = false;
      items.at(-1).push(line.slice(Math.min(width, indent)));
    } else break;
    if (fenceOf(line.trim())) fenced = !fenced;
    end += 1;
  }
  const make = () => {
    const start = ordered && parseInt(first) !== 1 ? String(parseInt(first)) : null;
    return el(ordered ? "ol" : "ul", { start }, items.map((each) => item(each, depth, loose)));
  };
  return [end, make];
}

function item(lines, depth, loose) {
  const task = /^\[([ xX])\] /.exec(lines[0]);
  const nodes = elements(task ? [lines[0].slice(4), ...lines.slice(1)] : lines, depth + 1);
  // The paragraphs of a list without blank lines are just texts.
  const inner = loose ? nodes : nodes.flatMap((node) => (node.tagName === "P" ? [...node.childNodes] : [node]));
  return el("li", {}, task && (task[1] === " " ? "☐ " : "☑ "), inner);
}

// The cells of a row; "\|" and bars in code are text.
function cells(line) {
  const found = [""];
  let ticks = false;
  for (let at = 0, bare = line.trim(); at < bare.length; at += 1) {
    if (bare[at] === "\\" && bare[at + 1] === "|") found.push(found.pop() + bare[++at]);
    else if (bare[at] === "|" && !ticks) found.push("");
    else {
      if (bare[at] === "`") ticks = !ticks;
      found.push(found.pop() + bare[at]);
    }
  }
  if (!found[0].trim()) found.shift();
  if (found.length && !found.at(-1).trim()) found.pop();
  return found.map((each) => each.trim());
}

// The alignment of each column that a line of dashes gives; null if it is another line.
function alignments(line) {
  const found = line.includes("-") && line.includes("|") ? cells(line) : [];
  if (!found.length || !found.every((each) => /^:?-+:?$/.test(each))) return null;
  return found.map((each) => (each.endsWith(":") ? (each.startsWith(":") ? "center" : "right") : null));
}

function table(lines, at, aligns) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const rows = lines.slice(at, end).map(cells);
  const row = (tag, texts) =>
    el("tr", {}, aligns.map((align, i) => el(tag, { class: align, scope: tag === "th" ? "col" : null }, inline(texts[i] ?? ""))));
  const make = () => {
    const head = el("thead", {}, row("th", rows[0]));
    const body = el("tbody", {}, rows.slice(2).map((texts) => row("td", texts)));
    return el("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "Table" }, el("table", {}, head, body));
  };
  return [end, make];
}
