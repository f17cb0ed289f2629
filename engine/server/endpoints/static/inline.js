// Markdown within a line, as nodes: code, emphasis, links and formulas. Linear in the length, whatever a model writes.

import { element } from "./dom.js";
import { math } from "./math.js";

const MAX_DEPTH = 6;
const MAX_FORMULA = 4000;
const SPECIAL = /[\\`*_~[!<h&$]/g;
const ESCAPED = /\\[!-/:-@[-`{-~]/y;
const ADDRESS = /https?:\/\/[^\s<>"'`|]+/y;
const BRACKETED = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const TARGET = /\(\s*(?:<([^<>\n]*)>|([^\s()]*(?:\([^\s()]*\)[^\s()]*)*))(?:\s+(?:"([^"]*)"|'([^']*)'))?\s*\)/y;
const EMPHASIS = { "**": "strong", "__": "strong", "~~": "del", "*": "em", _: "em" };
const ENTITY = /&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|([A-Za-z]{2,6}));/y;
const NAMED = new Map(Object.entries({
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", reg: "®", trade: "™", hellip: "…", ndash: "–",
  mdash: "—", lsquo: "‘", rsquo: "’", ldquo: "“", rdquo: "”", laquo: "«", raquo: "»", times: "×", divide: "÷", plusmn: "±",
  minus: "−", deg: "°", middot: "·", bull: "•", euro: "€", pound: "£", larr: "←", rarr: "→", harr: "↔", le: "≤", ge: "≥",
  ne: "≠", asymp: "≈", infin: "∞",
}));
const WORD = /[\p{L}\p{N}_]/u;

/** Nodes of one block's text; what is not understood, HTML above all, is text. */
export function inline(text, depth = 0) {
  const nodes = [];
  const reader = new Reader(text, depth);
  let shown = 0;
  let at = 0;
  for (;;) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text);
    if (!found) break;
    const piece = reader.at(found.index);
    at = piece?.end ?? found.index + 1;
    if (!piece) continue;
    if (shown < found.index) nodes.push(text.slice(shown, found.index));
    nodes.push(...piece.nodes);
    shown = at;
  }
  if (shown < text.length) nodes.push(text.slice(shown));
  return nodes;
}

class Reader {
  #text;
  #depth;
  /** Where the next closer of each kind stands: every closer is looked for once. */
  #next = new Map();

  constructor(text, depth) {
    this.#text = text;
    this.#depth = depth;
  }

  /** The piece that begins at a special character: its nodes and its end; null if it is plain text. */
  at(index) {
    switch (this.#text[index]) {
      case "\\": {
        const formula = this.#text[index + 1] === "(" ? this.#math(index, "\\(", "\\)")
          : this.#text[index + 1] === "[" ? this.#math(index, "\\[", "\\]") : null;
        if (formula) return formula;
        const escaped = this.#match(ESCAPED, index);
        return escaped && { nodes: [escaped[0][1]], end: index + 2 };
      }
      case "`":
        return this.#code(index);
      case "[":
        return this.#link(index, index);
      case "!":
        return this.#text[index + 1] === "[" ? this.#link(index + 1, index) : null;
      case "<": {
        const found = this.#match(BRACKETED, index);
        return found && { nodes: [anchor(found[1], "", [found[1]])], end: index + found[0].length };
      }
      case "h":
        return this.#address(index);
      case "&":
        return this.#entity(index);
      case "$":
        return this.#text[index + 1] === "$" ? this.#math(index, "$$", "$$") : this.#dollars(index);
      default:
        return this.#emphasis(index);
    }
  }

  #match(pattern, index) {
    pattern.lastIndex = index;
    return pattern.exec(this.#text);
  }

  /** The next place from `from` on that `isCloser` takes, remembered under `kind`. */
  #find(kind, mark, from, isCloser) {
    let found = this.#next.get(kind) ?? -1;
    if (found !== Infinity && found < from) {
      found = this.#text.indexOf(mark, from);
      while (found >= 0 && !isCloser(found)) found = this.#text.indexOf(mark, found + 1);
      if (found < 0) found = Infinity;
      this.#next.set(kind, found);
    }
    return found;
  }

  #code(index) {
    const text = this.#text;
    let end = index;
    while (text[end] === "`") end++;
    const mark = "`".repeat(end - index);
    const close = this.#find(mark, mark, end, (at) => text[at - 1] !== "`" && text[at + mark.length] !== "`");
    if (close === Infinity) return { nodes: [mark], end };
    const inner = text.slice(end, close);
    const padded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
    return { nodes: [element("code", "", padded ? inner.slice(1, -1) : inner)], end: close + mark.length };
  }

  #emphasis(index) {
    const text = this.#text;
    const character = text[index];
    const mark = text[index + 1] === character ? character + character : character;
    const kind = EMPHASIS[mark];
    const start = index + mark.length;
    if (!kind || this.#depth >= MAX_DEPTH || !/\S/.test(text[start] ?? "")) return plain(mark, start);
    // Underscores within a word are part of a name.
    const isWord = (at) => character === "_" && WORD.test(text[at] ?? "");
    if (isWord(index - 1)) return plain(mark, start);
    let close = this.#find(mark, mark, start + 1, (at) => (
      /\S/.test(text[at - 1]) && !isWord(at + mark.length)
      && (mark.length === 2 || (text[at - 1] !== character && text[at + 1] !== character))
    ));
    if (close === Infinity) return plain(mark, start);
    if (mark.length === 2) while (text[close + 2] === character) close++;
    const inner = inline(text.slice(start, close), this.#depth + 1);
    return { nodes: [element(kind, "", ...inner)], end: close + mark.length };
  }

  /** A link, or a picture, which is shown as a link: fetching it would tell its host about the conversation. */
  #link(open, index) {
    const text = this.#text;
    const close = this.#find("](", "](", open, () => true);
    if (close === Infinity || this.#depth >= MAX_DEPTH || text.lastIndexOf("[", close) !== open) return null;
    const target = this.#match(TARGET, close + 1);
    if (!target) return null;
    const [whole, bracketed, bare, double, single] = target;
    const address = bracketed ?? bare;
    const label = inline(text.slice(open + 1, close), MAX_DEPTH - 1);
    return { nodes: [anchor(address, double ?? single ?? "", label.length ? label : [address])], end: close + 1 + whole.length };
  }

  #entity(index) {
    const [whole, decimal, hexadecimal, name] = this.#match(ENTITY, index) ?? [];
    const code = decimal ? Number(decimal) : hexadecimal ? parseInt(hexadecimal, 16) : 0;
    const isCharacter = code > 0 && code <= 0x10ffff && (code < 0xd800 || code > 0xdfff);
    const shown = isCharacter ? String.fromCodePoint(code) : NAMED.get(name);
    return shown ? { nodes: [shown], end: index + whole.length } : null;
  }

  /** A formula between dollars; as in pandoc, spaces at its ends or a digit after it make it an amount of money. */
  #dollars(index) {
    const text = this.#text;
    if (!/\S/.test(text[index + 1] ?? "")) return null;
    const close = this.#find("$", "$", index + 2, (at) => text[at - 1] !== "\\");
    const isFormula = close < Infinity && /\S/.test(text[close - 1]) && !/[\dA-Z_$]/.test(text[close + 1] ?? "");
    return !isFormula ? null : this.#formula(index, index + 1, close, close + 1, false);
  }

  #math(index, open, mark) {
    const close = this.#find(mark, mark, index + open.length, () => true);
    const end = close + mark.length;
    return close === Infinity ? null : this.#formula(index, index + open.length, close, end, mark !== "\\)");
  }

  /** What is no formula that is understood is shown as it was written. */
  #formula(index, start, close, end, isDisplay) {
    const made = close - start <= MAX_FORMULA ? math(this.#text.slice(start, close), isDisplay) : null;
    return { nodes: [made ?? this.#text.slice(index, end)], end };
  }

  #address(index) {
    const found = this.#match(ADDRESS, index);
    if (!found || WORD.test(this.#text[index - 1] ?? "")) return null;
    let address = found[0];
    while (/[.,;:!?*_~\])]/.test(address.at(-1)) && !(address.endsWith(")") && address.includes("("))) address = address.slice(0, -1);
    return { nodes: [anchor(address, "", [address])], end: index + address.length };
  }
}

const plain = (mark, end) => ({ nodes: [mark], end });

/** A link to another site; an address of any other kind, `javascript:` above all, leaves the label alone. */
function anchor(address, title, label) {
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!["http:", "https:", "mailto:"].includes(url?.protocol)) return element("span", "", ...label);
  const made = element("a", "", ...label);
  made.href = url.href;
  made.title = title || url.href;
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  return made;
}
