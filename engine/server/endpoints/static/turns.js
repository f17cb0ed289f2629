// A turn of the conversation as elements: a message with its pictures, or a response that may still be streamed.

import { button, copyButton, element } from "./dom.js";
import { showMarkdown } from "./markdown.js";
import { thumbnail } from "./pictures.js";

/** Element of a user's turn. */
export function showMessage({ text, pictures }) {
  const turn = element("div", "turn user", element("p", "who", "You"));
  if (pictures.length) turn.append(element("div", "pictures", ...pictures.map(thumbnail)));
  if (text) turn.append(element("div", "text", text));
  return turn;
}

/** Shows a response, of one part for each completion: its reasoning folded, its text as Markdown, why it ended. */
export class ResponseView {
  element;
  #turn;
  #parts = [];
  #problem = element("p", "problem");
  #meta = element("p", "meta");
  #tools;
  #frame = null;

  constructor(turn, regenerate) {
    this.#turn = turn;
    this.#tools = element("div", "tools", copyButton("Copy the response", () => turn.parts[0].text.trim()));
    const again = button("quiet regenerate", "Regenerate", regenerate);
    this.#tools.append(again);
    this.element = element("div", "turn assistant", element("p", "who", turn.model || "Model"));
    this.element.append(this.#problem, this.#meta, this.#tools);
  }

  /** Show what has come, at the next frame: a frame may hold many tokens. */
  changed(afterwards) {
    this.#frame ??= requestAnimationFrame(() => {
      this.show(true);
      afterwards();
    });
  }

  show(isLive) {
    if (this.#frame !== null) cancelAnimationFrame(this.#frame);
    this.#frame = null;
    const { parts, problem, meta, limit } = this.#turn;
    parts.forEach((part, index) => {
      this.#parts[index] ??= this.#addPart();
      this.#parts[index].show(part, limit, isLive && !part.end);
    });
    this.#problem.textContent = problem ?? "";
    this.#meta.textContent = meta ?? "";
    this.#tools.hidden = isLive;
    this.#tools.firstChild.hidden = !parts[0]?.text;
  }

  #addPart() {
    const part = new PartView();
    this.#problem.before(part.element);
    return part;
  }
}

class PartView {
  element;
  #reasoning = element("details", "reasoning");
  #summary = element("summary");
  #thoughts = element("div", "thoughts");
  #text = element("div", "text markdown");
  #limit = element("p", "limit");

  constructor() {
    this.#reasoning.append(this.#summary, this.#thoughts);
    this.element = element("div", "part", this.#reasoning, this.#text, this.#limit);
  }

  show({ text, reasoning, end }, limit, isLive) {
    const answer = text.trimStart();
    this.#reasoning.hidden = !reasoning;
    this.#reasoning.classList.toggle("live", isLive && !answer);
    this.#summary.textContent = isLive && !answer ? "Reasoning …" : "Reasoning";
    this.#thoughts.textContent = reasoning.trim();
    showMarkdown(this.#text, answer);
    this.#text.classList.toggle("live", isLive && (!reasoning || answer !== ""));
    this.#limit.textContent = end === "length" ? whyLimited(limit) : "";
  }
}

export function whyLimited(limit) {
  return limit
    ? `Stopped by the limit of ${limit.toLocaleString("en")} tokens: raise Max tokens under Settings, or leave it empty.`
    : "Stopped by the limit: the context is full.";
}
