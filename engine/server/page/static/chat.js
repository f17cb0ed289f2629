// The conversation: sends it, shows the answers as they come, and stops them.

import { events, refusal, request } from "./api.js";
import { decimal, seconds } from "./text.js";

const SAMPLES = ["Once upon a time there was a fox", "Tell me a story about a big red ball", "Why was Lily happy?"];
const byId = (id) => document.getElementById(id);

/** Wire the conversation up; `mine` collects the ids of its requests for the view of the engine. */
export function startChat(mine) {
  const messages = [];
  let running = null;

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
    if (text && !running) {
      byId("message").value = "";
      send(text);
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

  async function send(text) {
    if (running) return;
    running = new AbortController();
    setBusy(true);
    messages.push({ role: "user", content: text });
    addTurn("user", "You").append(paragraph(text));
    const turn = addTurn("assistant", byId("model").value || "Model");
    const answer = { texts: [], began: performance.now(), first: null, tokens: 0, usage: null, ended: "" };
    const meta = document.createElement("p");
    meta.className = "meta";
    try {
      await stream(turn, answer, running.signal);
    } catch (error) {
      if (error.name === "AbortError") answer.ended = "stopped";
      else {
        const problem = paragraph(error.message, "p");
        problem.className = "problem";
        turn.append(problem);
        answer.ended = "failed";
      }
    }
    for (const part of turn.querySelectorAll(".live")) part.classList.remove("live");
    meta.textContent = summary(answer);
    turn.append(meta);
    messages.push({ role: "assistant", content: answer.texts[0] ?? "" });
    byId("announce").textContent = `Answer ${answer.ended || "complete"}: ${answer.texts[0] ?? ""}`;
    running = null;
    setBusy(false);
    scroll();
  }

  async function stream(turn, answer, signal) {
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
      answer.usage = event.usage ?? answer.usage;
      for (const choice of event.choices) {
        answer.first ??= performance.now();
        answer.tokens += 1;
        answer.last = performance.now();
        if (!parts[choice.index]) {
          parts[choice.index] = paragraph("");
          parts[choice.index].classList.add("live");
          turn.append(parts[choice.index]);
          answer.texts[choice.index] = "";
        }
        const text = choice.delta.content ?? "";
        // A model without a template of its own begins with the space between two words.
        parts[choice.index].append(answer.texts[choice.index] ? text : text.trimStart());
        answer.texts[choice.index] += text;
        if (choice.finish_reason) parts[choice.index].classList.remove("live");
      }
      scroll();
    }
    throw new Error("the connection ended before the answer did");
  }
}

function summary(answer) {
  if (answer.first === null) return answer.ended;
  const tokens = answer.usage?.completion_tokens ?? answer.tokens;
  const cached = answer.usage?.prompt_tokens_details?.cached_tokens ?? 0;
  const took = (answer.last - answer.first) / 1000;
  return [
    answer.ended,
    `first token after ${seconds((answer.first - answer.began) / 1000)}`,
    took > 0 && tokens > 1 ? `${decimal((tokens - 1) / took)} tokens/s` : "",
    `${tokens} ${tokens === 1 ? "token" : "tokens"}`,
    cached ? `${cached} of the prompt from the cache` : "",
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
