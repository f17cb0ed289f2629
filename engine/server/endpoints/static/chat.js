// The chat: sends the conversation, streams the completions, aborts them, and makes them again.

import { events, refusal, request } from "./api.js";
import { lastChat, listChats, newChat, rememberOpen, save } from "./chats.js";
import { button, byId } from "./dom.js";
import { collectPictures } from "./pictures.js";
import { decimal, seconds } from "./text.js";
import { ResponseView, showMessage, whyEnded } from "./turns.js";

const TO_CONTINUE = ["Once upon a time there was a fox", "Tell me a story about a big red ball", "Why was Lily happy?"];
const TO_ANSWER = ["Explain how a hash table works, with an example", "What is 17 × 24? Show the steps.", "Write a haiku about the sea"];
const log = byId("log");

/** Set up the chat; `mine` collects the ids of its requests for the engine view. */
export function startChat(mine) {
  let chat = newChat();
  let running = null;
  const pictures = collectPictures(byId("form"), byId("message"), byId("chooser"), byId("tray"), (problem) => {
    byId("picture-problem").textContent = problem;
  });
  const list = listChats(turnTo, () => chat);
  listen();
  open(lastChat());
  return {
    /** Suit a model: pictures if it takes them, and samples for one that answers or only continues. */
    suit({ takesPictures, isChat }) {
      byId("samples").replaceChildren(...(isChat ? TO_ANSWER : TO_CONTINUE).map((text) => button("", text, () => send(text))));
      if (!takesPictures) return;
      pictures.allow();
      byId("choose").hidden = byId("picture-hint").hidden = false;
    },
  };

  function listen() {
    byId("form").onsubmit = (event) => {
      event.preventDefault();
      const text = byId("message").value.trim();
      if ((!text && !pictures.count) || running) return;
      byId("message").value = "";
      send(text, pictures.empty());
    };
    byId("message").onkeydown = (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        byId("form").requestSubmit();
      }
    };
    document.addEventListener("keydown", (event) => {
      // The list of conversations and the dialog take their Escape themselves.
      if (event.key === "Escape" && !event.defaultPrevented) running?.abort();
    });
    byId("stop").onclick = () => running?.abort();
    byId("clear").onclick = () => turnTo(newChat());
    addEventListener("pagehide", () => running && save(chat));
  }

  /** Show a conversation; what is still generated in another ends there. */
  function open(other) {
    running?.abort();
    running = null;
    setBusy(false);
    chat = other;
    rememberOpen(chat);
    list.close();
    for (const turn of log.querySelectorAll(".turn")) turn.remove();
    for (const turn of chat.turns) {
      if (turn.role === "user") addMessage(turn);
      else addResponse(turn).show(false);
    }
    byId("empty").hidden = chat.turns.length > 0;
    log.scrollTop = log.scrollHeight;
  }

  function turnTo(other) {
    open(other);
    byId("message").focus();
  }

  /** Show a message; sent again with another text, it takes the place of what came after it. */
  function addMessage(turn) {
    log.append(showMessage(turn, (text) => {
      if (running) return;
      const index = chat.turns.indexOf(turn);
      chat.turns.length = index;
      for (const old of [...log.querySelectorAll(".turn")].slice(index)) old.remove();
      send(text, turn.pictures);
      byId("message").focus();
    }));
  }

  function addResponse(turn) {
    const view = new ResponseView(turn, () => {
      if (running) return;
      chat.turns.pop();
      view.element.remove();
      byId("message").focus();
      respond();
    });
    log.append(view.element);
    return view;
  }

  function send(text, urls = []) {
    if (running) return;
    const turn = { role: "user", text, pictures: urls };
    chat.turns.push(turn);
    byId("empty").hidden = true;
    addMessage(turn);
    respond();
  }

  /** Generate the response to the conversation as it stands. */
  async function respond() {
    const [talk, controller] = [chat, new AbortController()];
    const limit = byId("max-tokens").valueAsNumber || null;
    const turn = { role: "assistant", model: byId("model").value, parts: [], limit };
    const body = requestBody(talk.turns, limit);
    const view = addResponse(turn);
    const reply = { began: performance.now(), first: null, tokens: 0, usage: null, ended: "" };
    running = controller;
    setBusy(true);
    talk.turns.push(turn);
    view.show(true);
    keep(talk);
    log.scrollTop = log.scrollHeight;
    try {
      await stream(body, turn, view, reply, controller.signal);
    } catch (error) {
      reply.ended = error.name === "AbortError" ? "stopped" : "failed";
      if (reply.ended === "failed") turn.problem = error.message;
    }
    turn.meta = summary(reply);
    keep(talk);
    following(() => view.show(false));
    if (running !== controller) return;
    running = null;
    setBusy(false);
    byId("announce").textContent = announcement(turn, reply);
  }

  function keep(talk) {
    const isKept = save(talk);
    byId("kept-problem").textContent = isKept ? "" : "This conversation is too large for the browser: it is not kept.";
  }

  async function stream(body, turn, view, reply, signal) {
    const headers = { "Content-Type": "application/json" };
    const response = await request("/v1/chat/completions", { method: "POST", signal, headers, body: JSON.stringify(body) });
    if (!response.ok) throw new Error(await refusal(response));
    for await (const data of events(response)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      mine.add(event.id);
      reply.usage = event.usage ?? reply.usage;
      for (const choice of event.choices) {
        reply.first ??= performance.now();
        reply.tokens += 1;
        reply.last = performance.now();
        for (let i = turn.parts.length; i <= choice.index; i++) turn.parts.push({ text: "", reasoning: "", end: "" });
        const part = turn.parts[choice.index];
        part.text += choice.delta.content ?? "";
        part.reasoning += choice.delta.reasoning_content ?? "";
        part.end = choice.finish_reason ?? part.end;
      }
      const isBelow = isAtEnd();
      view.changed(() => isBelow && (log.scrollTop = log.scrollHeight));
    }
    throw new Error("the connection closed before the response was complete");
  }
}

/** The body of a request; what is left empty is the server's and the model's choice. */
function requestBody(turns, limit) {
  const system = byId("system").value.trim();
  const temperature = byId("temperature").valueAsNumber;
  return {
    model: byId("model").value || undefined,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messagesOf(turns)],
    temperature: Number.isNaN(temperature) ? undefined : temperature,
    max_tokens: limit ?? undefined,
    n: byId("copies").valueAsNumber || 1,
    stream: true,
    stream_options: { include_usage: true },
  };
}

/** The messages of turns, but for those that were refused: they would be refused again with the next. */
function messagesOf(turns) {
  return turns.flatMap((turn, index) => {
    const response = turn.role === "user" ? turns[index + 1] : turn;
    if (response?.problem && !response.parts.length) return [];
    if (turn.role === "assistant") return [{ role: "assistant", content: turn.parts[0]?.text ?? "" }];
    const images = turn.pictures.map((url) => ({ type: "image_url", image_url: { url } }));
    return [{ role: "user", content: images.length ? [...images, { type: "text", text: turn.text }] : turn.text }];
  });
}

function summary(reply) {
  if (reply.first === null) return reply.ended;
  const tokens = reply.usage?.completion_tokens ?? reply.tokens;
  const cached = reply.usage?.prompt_tokens_details?.cached_tokens ?? 0;
  const took = (reply.last - reply.first) / 1000;
  return [
    reply.ended,
    `first token after ${seconds((reply.first - reply.began) / 1000)}`,
    took > 0 && tokens > 1 ? `${decimal((tokens - 1) / took)} tokens/s` : "",
    `${tokens} ${tokens === 1 ? "token" : "tokens"}`,
    cached ? `${cached} prompt tokens cached` : "",
  ].filter(Boolean).join(" · ");
}

/** The response for those who hear the page, once it is whole. */
function announcement({ parts, problem, limit }, reply) {
  const [first] = parts;
  const why = first ? ` ${whyEnded(first, limit)}` : "";
  return `Response ${reply.ended || "complete"}: ${first?.text ?? problem ?? ""}${why}`;
}

const isAtEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 60;

/** Make a change, and stay at the end of the conversation if it was in view. */
function following(change) {
  const isBelow = isAtEnd();
  change();
  if (isBelow) log.scrollTop = log.scrollHeight;
}

function setBusy(busy) {
  byId("send").disabled = busy;
  byId("stop").hidden = !busy;
  log.classList.toggle("busy", busy);
}
