// The chat: sends the conversation, streams the completions, and aborts them.

import { events, refusal, request } from "./api.js";
import { collectPictures, thumbnail } from "./pictures.js";
import { decimal, seconds } from "./text.js";

const SAMPLES = ["Once upon a time there was a fox", "Tell me a story about a big red ball", "Why was Lily happy?"];
const byId = (id) => document.getElementById(id);

/** Set up the chat; `mine` collects the ids of its requests for the engine view. */
export function startChat(mine) {
  const messages = [];
  let running = null;
  const pictures = collectPictures(byId("form"), byId("message"), byId("chooser"), byId("tray"), (problem) => {
    byId("picture-problem").textContent = problem;
  });

  for (const text of SAMPLES) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.onclick = () => send(text);
    byId("samples").append(button);
  }
  byId("form").onsubmit = (event) => {
    event.preventDefault();
    const text = byId("message").value.trim();
    if ((text || pictures.count) && !running) {
      byId("message").value = "";
      send(text, pictures.take());
    }
  };
  byId("message").onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("form").requestSubmit();
    }
  };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  byId("stop").onclick = () => running?.abort();
  byId("clear").onclick = () => {
    running?.abort();
    messages.length = 0;
    for (const turn of byId("log").querySelectorAll(".turn")) turn.remove();
    byId("empty").hidden = false;
    byId("message").focus();
  };

  async function send(text, urls = []) {
    if (running) return;
    running = new AbortController();
    setBusy(true);
    messages.push({ role: "user", content: content(text, urls) });
    addTurn("user", "You").append(...shown(text, urls));
    const turn = addTurn("assistant", byId("model").value || "Model");
    const reply = { texts: [], began: performance.now(), first: null, tokens: 0, usage: null, ended: "" };
    const meta = document.createElement("p");
    meta.className = "meta";
    try {
      await stream(turn, reply, running.signal);
    } catch (error) {
      if (error.name === "AbortError") reply.ended = "stopped";
      else {
        const problem = paragraph(error.message, "p");
        problem.className = "problem";
        turn.append(problem);
        reply.ended = "failed";
      }
    }
    for (const part of turn.querySelectorAll(".live")) part.classList.remove("live");
    meta.textContent = summary(reply);
    turn.append(meta);
    // A message that was refused is no part of the conversation: it would be refused again with the next.
    if (reply.ended === "failed" && !reply.texts.length) messages.pop();
    else messages.push({ role: "assistant", content: reply.texts[0] ?? "" });
    byId("announce").textContent = `Response ${reply.ended || "complete"}: ${reply.texts[0] ?? ""}`;
    running = null;
    setBusy(false);
    scroll();
  }

  async function stream(turn, reply, signal) {
    const system = byId("system").value.trim();
    const response = await request("/v1/chat/completions", {
      method: "POST",
      signal,
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        model: byId("model").value || undefined,
        messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
        temperature: byId("temperature").valueAsNumber,
        max_tokens: byId("max-tokens").valueAsNumber,
        n: byId("copies").valueAsNumber,
        stream: true,
        stream_options: { include_usage: true },
      }),
    });
    if (!response.ok) throw new Error(await refusal(response));
    const parts = [];
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
        if (!parts[choice.index]) {
          parts[choice.index] = paragraph("");
          parts[choice.index].classList.add("live");
          turn.append(parts[choice.index]);
          reply.texts[choice.index] = "";
        }
        const text = choice.delta.content ?? "";
        // A model without a chat template begins with the space between two words.
        parts[choice.index].append(reply.texts[choice.index] ? text : text.trimStart());
        reply.texts[choice.index] += text;
        if (choice.finish_reason) parts[choice.index].classList.remove("live");
      }
      scroll();
    }
    throw new Error("the connection closed before the response was complete");
  }
}

function content(text, urls) {
  if (!urls.length) return text;
  const images = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return [...images, { type: "text", text }];
}

function shown(text, urls) {
  if (!urls.length) return [paragraph(text)];
  const row = document.createElement("div");
  row.className = "pictures";
  row.append(...urls.map(thumbnail));
  return text ? [row, paragraph(text)] : [row];
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

function addTurn(role, name) {
  byId("empty").hidden = true;
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  const who = paragraph(name, "p");
  who.className = "who";
  turn.append(who);
  byId("log").append(turn);
  scroll();
  return turn;
}

function paragraph(text, kind = "div") {
  const element = document.createElement(kind);
  element.className = "text";
  element.textContent = text;
  return element;
}

function scroll() {
  const log = byId("log");
  log.scrollTop = log.scrollHeight;
}

function setBusy(busy) {
  byId("send").disabled = busy;
  byId("stop").hidden = !busy;
}
