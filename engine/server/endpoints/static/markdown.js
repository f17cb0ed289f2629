// Markdown of an answer as elements: headings, lists, quotes, tables, formulas and code. It may be cut anywhere: it is streamed.

import { copyButton, element } from "./dom.js";
import { inline } from "./inline.js";

const MAX_DEPTH = 8;
const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const DASHES = /^:?-+:?$/;
const TASK = /^\[([ xX])\] +/;
const FORMULA = /^ {0,3}(\$\$|\\\[)/;
const CLOSERS = { "$$": /\$\$\s*$/, "\\[": /\\\]\s*$/ };

/** Show `text` in `parent`; blocks that are the same as before stay, and with them focus and selection. */
export function showMarkdown(parent, text) {
  const lines = text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n");
  const blocks = parse(lines, 0);
  blocks.forEach((block, index) => {
    const old = parent.children[index];
    if (old?.source === block.source) return;
    const made = block.show();
    made.source = block.source;
    if (old) old.replaceWith(made);
    else parent.append(made);
  });
  while (parent.children.length > blocks.length) parent.lastChild.remove();
}

/** The blocks of lines: each with its source, and a function that makes its element. */
function parse(lines, depth) {
  const blocks = [];
  for (let start = 0; start < lines.length; ) {
    if (!lines[start].trim()) {
      start++;
      continue;
    }
    const { end, show } = blockAt(lines, start, depth);
    blocks.push({ source: lines.slice(start, end).join("\n"), show });
    start = end;
  }
  return blocks;
}

const children = (lines, depth) => parse(lines, depth).map((block) => block.show());

function blockAt(lines, start, depth) {
  const line = lines[start];
  const heading = HEADING.exec(line);
  if (FENCE.test(line)) return codeAt(lines, start);
  if (heading) {
    // The page's own headings are of the first and second level.
    const kind = `h${Math.min(6, heading[1].length + 2)}`;
    return { end: start + 1, show: () => element(kind, "", ...inline(heading[2])) };
  }
  if (RULE.test(line)) return { end: start + 1, show: () => element("hr") };
  if (isTable(lines, start)) return tableAt(lines, start);
  if (FORMULA.test(line)) {
    const end = formulaEnd(lines, start);
    if (end) return { end, show: () => element("p", "formula", ...inline(lines.slice(start, end).join("\n"))) };
  }
  if (depth < MAX_DEPTH && QUOTE.test(line)) return quoteAt(lines, start, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return listAt(lines, start, depth);
  return paragraphAt(lines, start, depth);
}

function codeAt(lines, start) {
  const [, indent, mark, info] = FENCE.exec(lines[start]);
  let end = start + 1;
  const closes = (line) => FENCE.exec(line)?.[2].startsWith(mark) && !FENCE.exec(line)[3].trim();
  while (end < lines.length && !closes(lines[end])) end++;
  const code = lines.slice(start + 1, end).map((line) => unindented(line, indent.length)).join("\n");
  const language = info.trim().split(/\s/, 1)[0];
  return { end: Math.min(end + 1, lines.length), show: () => codeBlock(code, language) };
}

function codeBlock(code, language) {
  const block = element("div", "code");
  const head = element("div", "code-head", element("span", "", language));
  head.append(copyButton(language ? `Copy the ${language} code` : "Copy the code", () => code));
  const body = element("pre", "", element("code", "", code));
  body.tabIndex = 0;
  block.append(head, body);
  return block;
}

/** The line after a formula of its own lines; 0 if it does not end, which is looked for once. */
function formulaEnd(lines, start) {
  const mark = FORMULA.exec(lines[start])[1];
  if (lines[start].trim().length > mark.length && CLOSERS[mark].test(lines[start])) return start + 1;
  lines.closers ??= new Map();
  let close = lines.closers.get(mark) ?? -1;
  if (close <= start) {
    close = lines.findIndex((line, index) => index > start && CLOSERS[mark].test(line));
    lines.closers.set(mark, close < 0 ? Infinity : close);
  }
  return close > start && close < Infinity ? close + 1 : 0;
}

function quoteAt(lines, start, depth) {
  let [end, isCode] = [start, false];
  for (; end < lines.length; end++) {
    if (!QUOTE.test(lines[end]) && (isCode || !continuesQuote(lines, end))) break;
    if (FENCE.test(lines[end].replace(QUOTE, ""))) isCode = !isCode;
  }
  const inner = lines.slice(start, end).map((line) => line.replace(QUOTE, ""));
  return { end, show: () => element("blockquote", "", ...children(inner, depth + 1)) };
}

/** Whether a line without the mark goes on with the paragraph that ends the quote. */
function continuesQuote(lines, index) {
  const before = [lines[index - 1].replace(QUOTE, "")];
  return lines[index].trim() && before[0].trim() && !interrupts(before, 0) && !startsBlock(lines, index);
}

function listAt(lines, start, depth) {
  const [, , marker] = ITEM.exec(lines[start]);
  const isOrdered = /\d/.test(marker);
  const level = indentOf(lines[start]);
  const items = [];
  let end = start;
  while (end < lines.length) {
    const found = RULE.test(lines[end]) ? null : ITEM.exec(lines[end]);
    if (!found || /\d/.test(found[2]) !== isOrdered || found[1].length > level + 1) break;
    const after = itemEnd(lines, end, level);
    const width = found[0].length;
    const first = lines[end].slice(width);
    items.push([first, ...lines.slice(end + 1, after).map((line) => unindented(line, width))]);
    end = after;
    const next = nextFilled(lines, end);
    if (next < lines.length && ITEM.test(lines[next])) end = next;
  }
  return { end, show: () => showList(items, isOrdered, parseInt(marker, 10), depth) };
}

/** The line after an item: it goes on with lines further in, and with the unfinished lines of its paragraph. */
function itemEnd(lines, start, level) {
  let end = start + 1;
  while (end < lines.length) {
    const next = nextFilled(lines, end);
    if (next === lines.length) break;
    const isInner = indentOf(lines[next]) >= level + 2;
    const goesOn = next === end && !ITEM.test(lines[next]) && !interrupts(lines, next);
    if (!isInner && !goesOn) break;
    end = next + 1;
  }
  return end;
}

function showList(items, isOrdered, first, depth) {
  const list = element(isOrdered ? "ol" : "ul");
  if (isOrdered) list.start = first;
  for (const item of items) {
    const task = TASK.exec(item[0]);
    if (task) item[0] = `${task[1] === " " ? "☐" : "☑"} ${item[0].slice(task[0].length)}`;
    list.append(element("li", task ? "task" : "", ...children(item, depth + 1)));
  }
  return list;
}

function paragraphAt(lines, start, depth) {
  let end = start + 1;
  while (end < lines.length && lines[end].trim() && !(depth < MAX_DEPTH && startsBlock(lines, end))) end++;
  return { end, show: () => element("p", "", ...inline(lines.slice(start, end).join("\n"))) };
}

/** Whether a line ends the paragraph before it; of numbered lists only one from 1 does, as a line may begin with a year. */
function startsBlock(lines, index) {
  const item = ITEM.exec(lines[index]);
  return interrupts(lines, index) || (item !== null && item[3] !== "" && !/^(?!1[.)])\d/.test(item[2]));
}

function interrupts(lines, index) {
  const line = lines[index];
  return [FENCE, HEADING, RULE, QUOTE].some((pattern) => pattern.test(line)) || isTable(lines, index);
}

function isTable(lines, index) {
  if (!lines[index].includes("|") || !lines[index + 1]?.includes("-")) return false;
  const marks = cellsOf(lines[index + 1]);
  return marks.every((mark) => DASHES.test(mark)) && marks.length === cellsOf(lines[index]).length;
}

function tableAt(lines, start) {
  let end = start + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  const aligns = cellsOf(lines[start + 1]).map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : "left"));
  const row = (line, kind) => element("tr", "", ...aligns.map((align, index) => (
    element(kind, align, ...inline(cellsOf(line)[index] ?? ""))
  )));
  const show = () => {
    const head = element("thead", "", row(lines[start], "th"));
    const body = element("tbody", "", ...lines.slice(start + 2, end).map((line) => row(line, "td")));
    const wrapper = element("div", "table", element("table", "", head, body));
    wrapper.tabIndex = 0;
    return wrapper;
  };
  return { end, show };
}

function cellsOf(line) {
  const cells = line.trim().replace(/^\|/, "").split(/(?<!\\)\|/);
  if (cells.length > 1 && !cells.at(-1).trim()) cells.pop();
  return cells.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function nextFilled(lines, index) {
  while (index < lines.length && !lines[index].trim()) index++;
  return index;
}

const indentOf = (line) => line.length - line.trimStart().length;
const unindented = (line, width) => line.slice(Math.min(width, indentOf(line)));
