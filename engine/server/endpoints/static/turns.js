// A turn of the conversation as elements: a message with its pictures, or a response that may still be streamed.

import { button, copyButton, element } from "./dom.js";
import { showMarkdown } from "./markdown.js";
import { thumbnail } from "./pictures.js";

/** Element of a user's turn; `send(text)` asks again with another text. */
export function showMessage({ text, pictures }, send) {
  const turn = element("div", "turn user", element("p", "who", "You"));
  if (pictures.length) turn.append(element("div", "pictures", ...pictures.map(thumbnail)));
  const shown = element("div", "text", text);
  shown.hidden = !text;
  const edit = button("quiet edit", "Edit", () => {
    const editor = showEditor(text, send, () => {
      editor.replaceWith(shown, tools);
      edit.focus();
    });
    shown.remove();
    tools.replaceWith(editor);
    editor.firstChild.focus();
  });
  const tools = element("div", "tools", edit);
  turn.append(shown, tools);
  return turn;
}

/** A field with a sent message, to send it again or to leave it. */
function showEditor(text, send, close) {
  const field = element("textarea");
  field.value = text;
  field.rows = Math.min(8, text.split("\n").length + 1);
  field.ariaLabel = "Edit the message";
  const again = () => field.value.trim() && send(field.value.trim());
  field.onkeydown = (event) => {
    if (event.isComposing || (event.key !== "Escape" && (event.key !== "Enter" || event.shiftKey))) return;
    event.preventDefault();
    if (event.key === "Escape") close();
    else again();
  };
  const actions = element("div", "actions", element("p", "hint", "What came after it is replaced."));
  actions.append(button("quiet", "Cancel", close), button("primary", "Send again", again));
  return element("div", "editor", field, actions);
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
    this.#limit.textContent = isLive ? "" : whyEnded({ text, reasoning, end }, limit);
  }
}

/** Why a completion is cut or empty; nothing where the model ended what it wrote. */
export function whyEnded({ text, reasoning, end }, limit) {
  if (end === "length") return whyLimited(limit);
  if (!end || text.trim()) return "";
  return reasoning.trim()
    ? "The model ended after its reasoning, without an answer."
    : "The model ended its answer at once: its first token was an end of text.";
}

function whyLimited(limit) {
  return limit
    ? `Stopped by the limit of ${limit.toLocaleString("en")} tokens: raise Max tokens under Settings, or leave it empty.`
    : "Stopped by the limit: the context is full.";
}
