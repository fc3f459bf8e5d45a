// Renders Markdown as elements. While a text is streamed, only the first changed block and the blocks after it are
// replaced.

import { button, copyText, make } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])\s*(\1\s*){2,}$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const ROW = /^\s*\|.*\|\s*$/;
const DIVIDER = /^\s*\|(\s*:?-+:?\s*\|)+\s*$/;
const INLINE = new RegExp(
  [
    "(?<tick>`+)(?<code>.+?)\\k<tick>(?!`)",
    "\\*\\*(?<strong>\\S|\\S.*?\\S)\\*\\*",
    "(?<![\\w*])[*](?<em>[^\\s*]|[^\\s*].*?[^\\s*])[*](?![\\w*])",
    "(?<!\\w)_(?<em2>[^\\s_]|[^\\s_].*?[^\\s_])_(?!\\w)",
    "~~(?<del>\\S|\\S.*?\\S)~~",
    "\\[(?<label>[^\\]]+)\\]\\((?<url>https?://[^\\s)]+)\\)",
    "(?<bare>https?://[^\\s<>()]*[^\\s<>().,;:!?'\"])",
  ].join("|"),
  "s",
);

/** An element that shows growing Markdown. */
export class MarkdownText {
  constructor(properties) {
    this._blocks = [];
    this.element = make("div", properties);
  }

  show(text) {
    const blocks = blocksOf(text);
    let numUnchanged = 0;
    while (numUnchanged < blocks.length && blocks[numUnchanged] === this._blocks[numUnchanged]) numUnchanged += 1;
    while (this.element.children.length > numUnchanged) this.element.lastChild.remove();
    this.element.append(...blocks.slice(numUnchanged).map(elementOf));
    this._blocks = blocks;
    this.element.hidden = !text;
  }
}

/** Splits a text into blocks, each a string: code, lists, quotes, tables, headings, rules and paragraphs. */
export function blocksOf(text) {
  const blocks = [];
  let lines = [];
  let fence = null;
  let kind = null;
  const close = () => {
    if (lines.length) blocks.push(lines.join("\n"));
    lines = [];
    kind = null;
  };
  for (const line of text.split("\n")) {
    const mark = FENCE.exec(line)?.[1];
    if (fence) {
      lines.push(line);
      if (mark?.startsWith(fence) && line.trim() === mark) {
        fence = null;
        close();
      }
      continue;
    }
    if (mark) {
      close();
      fence = mark;
      lines.push(line);
      continue;
    }
    const lineKind = kindOf(line, kind);
    if (lineKind === "blank") {
      if (kind !== "list") close();
      else lines.push(line);
      continue;
    }
    if (lineKind !== kind || lineKind === "heading" || lineKind === "rule") close();
    kind = lineKind;
    lines.push(line);
  }
  close();
  return blocks.map((block) => (FENCE.test(block) ? block : block.trimEnd()));
}

function kindOf(line, previousKind) {
  if (!line.trim()) return "blank";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (ITEM.test(line) || (previousKind === "list" && /^\s/.test(line))) return "list";
  if (QUOTE.test(line)) return "quote";
  if (ROW.test(line)) return "table";
  return "paragraph";
}

/** Returns the element of a block. */
function elementOf(block) {
  const lines = block.split("\n");
  const fence = FENCE.exec(lines[0]);
  if (fence) return codeOf(lines, fence);
  const heading = HEADING.exec(lines[0]);
  if (heading) return make(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(heading[2]));
  if (RULE.test(lines[0])) return make("hr");
  if (ITEM.test(lines[0])) return listOf(lines);
  if (QUOTE.test(lines[0])) {
    const inner = blocksOf(lines.map((line) => line.replace(QUOTE, "")).join("\n"));
    return make("blockquote", {}, ...inner.map(elementOf));
  }
  if (lines.length > 1 && ROW.test(lines[0]) && DIVIDER.test(lines[1])) return tableOf(lines);
  return make("p", {}, ...inline(block));
}

function codeOf(lines, [, mark, language]) {
  const isClosed = lines.length > 1 && lines.at(-1).trim().startsWith(mark);
  const text = lines.slice(1, isClosed ? -1 : undefined).join("\n");
  const copy = button("Copy code", async () => {
    copy.textContent = (await copyText(text)) ? "Copied" : "Copy failed";
    setTimeout(() => (copy.textContent = "Copy code"), 1500);
  });
  const head = make("figcaption", {}, make("span", { textContent: language || "text" }), copy);
  const code = make("pre", { tabIndex: 0, "aria-label": `Code, ${language || "text"}` }, make("code", { textContent: text }));
  return make("figure", { class: "code-block" }, head, code);
}

function listOf(lines) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const list = make(/\d/.test(mark) ? "ol" : "ul");
  if (/\d/.test(mark)) list.start = Number.parseInt(mark, 10);
  let inner = [];
  let text = null;
  const close = () => {
    if (text === null) return;
    const blocks = blocksOf(inner.join("\n"));
    list.append(make("li", {}, ...inline(text), ...blocks.map(elementOf)));
    inner = [];
  };
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length) {
      close();
      text = item[3];
    } else {
      inner.push(line.replace(/^(\t| {1,4})/, ""));
    }
  }
  close();
  return list;
}

function tableOf(lines) {
  const cells = (line) => line.trim().slice(1, -1).split("|").map((cell) => cell.trim());
  const row = (line, tag) => make("tr", {}, ...cells(line).map((cell) => make(tag, {}, ...inline(cell))));
  const head = make("thead", {}, row(lines[0], "th"));
  const body = make("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  return make("div", { class: "table-box", tabIndex: 0 }, make("table", {}, head, body));
}

/** Returns the elements and strings of a text with inline markup. */
function inline(text) {
  const match = INLINE.exec(text);
  if (!match) return text ? [text] : [];
  const { code, strong, em, em2, del, label, url, bare } = match.groups;
  let element;
  if (code !== undefined) element = make("code", { textContent: code.trim() || code });
  else if (strong !== undefined) element = make("strong", {}, ...inline(strong));
  else if (del !== undefined) element = make("del", {}, ...inline(del));
  else if (url !== undefined) element = link(url, inline(label));
  else if (bare !== undefined) element = link(bare, [bare]);
  else element = make("em", {}, ...inline(em ?? em2));
  const before = text.slice(0, match.index);
  return [...(before ? [before] : []), element, ...inline(text.slice(match.index + match[0].length))];
}

const link = (href, children) => make("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...children);
