// Conversations kept in this browser: an entry of localStorage each, so that no tab overwrites another's.

import { button, byId, element } from "./dom.js";

const PREFIX = "llmopt-chat-";
const OPEN = "llmopt-open-chat";

export function newChat() {
  return { id: `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`, at: 0, turns: [] };
}

/** The conversation that this tab showed before it was loaded again, or a new one. */
export function lastChat() {
  return read(PREFIX + sessionStorage.getItem(OPEN)) ?? newChat();
}

export function rememberOpen(chat) {
  sessionStorage.setItem(OPEN, chat.id);
}

/** Keep a conversation; the oldest others make room for it. Returns whether it is kept. */
export function save(chat) {
  if (chat.isDeleted) return true;
  chat.at = Date.now();
  for (;;) {
    try {
      localStorage.setItem(PREFIX + chat.id, JSON.stringify(chat));
      return true;
    } catch {
      const oldest = savedChats().filter((other) => other.id !== chat.id).at(-1);
      if (!oldest) return false;
      localStorage.removeItem(PREFIX + oldest.id);
    }
  }
}

/** The kept conversations, the newest first. */
function savedChats() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  return keys.map(read).filter(Boolean).sort((a, b) => b.at - a.at);
}

/** A kept conversation; null for what is none, as another page of this address may have written it. */
function read(key) {
  try {
    const { at, turns } = JSON.parse(localStorage.getItem(key));
    const isOne = turns.every(({ role, text, pictures, parts }) => (
      role === "user" ? typeof text === "string" && pictures.every((url) => url.startsWith("data:image/"))
        : role === "assistant" && parts.every((part) => typeof (part.text + part.reasoning) === "string")
    ));
    return isOne ? { id: key.slice(PREFIX.length), at: Number(at), turns } : null;
  } catch {
    return null;
  }
}

const titleOf = (chat) => chat.turns.find((turn) => turn.text)?.text.slice(0, 120) || "Picture";

/** The list of conversations under its button: `open(chat)` shows one, `current()` is the one that is shown. */
export function listChats(open, current) {
  const [toggle, panel, list] = [byId("chats-toggle"), byId("chats"), byId("chat-list")];

  function show(isShown) {
    panel.hidden = !isShown;
    toggle.ariaExpanded = String(isShown);
    if (!isShown) return;
    const rows = savedChats().map(row);
    list.replaceChildren(...(rows.length ? rows : [element("li", "none", "No conversations yet: they are kept in this browser alone.")]));
  }

  function row(chat) {
    const opens = button("chat-title", titleOf(chat), () => {
      show(false);
      open(chat);
    });
    if (chat.id === current().id) opens.ariaCurrent = "true";
    const deletes = button("quiet", "Delete", () => {
      // The first press asks, the second deletes.
      if (deletes.textContent === "Delete") return arm(deletes, "Sure?");
      remove(chat);
    });
    const arm = (deleting, word) => {
      deleting.textContent = word;
      deleting.ariaLabel = `${word} ${titleOf(chat)}`;
    };
    arm(deletes, "Delete");
    deletes.onblur = () => arm(deletes, "Delete");
    return element("li", "", opens, deletes);
  }

  function remove(chat) {
    localStorage.removeItem(PREFIX + chat.id);
    if (chat.id === current().id) {
      current().isDeleted = true;
      open(newChat());
    }
    show(true);
    (list.querySelector("button") ?? toggle).focus();
  }

  toggle.onclick = () => show(panel.hidden);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || panel.hidden) return;
    event.preventDefault();
    show(false);
    toggle.focus();
  });
  return { close: () => show(false) };
}
