// The live view of the engine: one stream of states, shown while somebody looks.

import { events, refusal, request } from "./api.js";
import { BlockMap } from "./blocks.js";
import { drawColumns, drawLine, quantiles } from "./charts.js";
import { decimal, percent, seconds, shortName } from "./text.js";

const byId = (id) => document.getElementById(id);
const PARTS = { schedule: "schedule", model: "model and sampler", output: "tokens to text" };
const RATE_SECONDS = 120;
const WINDOW_SECONDS = 10;

export function startEngine(mine) {
  const map = new BlockMap(byId("blocks"), byId("tip"), (id) => name(id, mine));
  const history = [];
  const rates = [];
  let paused = false;
  let feed = null;
  let latest = null;

  byId("pause").onclick = () => {
    paused = !paused;
    byId("pause").ariaPressed = String(paused);
    byId("pause").textContent = paused ? "Resume view" : "Pause view";
    follow();
  };
  document.addEventListener("visibilitychange", follow);
  const again = () => latest && show(latest);
  document.addEventListener("scheme", again);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  addEventListener("resize", again);
  follow();

  /** Watch while the page is in view; the engine then spends nothing on a page that nobody sees. */
  function follow() {
    const wanted = !paused && document.visibilityState === "visible";
    if (wanted && !feed) watch((feed = new AbortController()));
    if (!wanted) {
      feed?.abort();
      feed = null;
      setState(paused ? "paused" : "waiting", "unsure");
    }
  }

  async function watch(own) {
    while (feed === own) {
      try {
        const response = await request("/engine/state", { signal: own.signal });
        if (!response.ok) throw new Error(await refusal(response));
        for await (const data of events(response)) {
          const state = JSON.parse(data);
          if (feed !== own) return;
          if (state.unavailable) setState(state.unavailable, "bad");
          else {
            setState("serving", "good");
            note(state);
            show((latest = state));
          }
        }
      } catch (error) {
        if (error.name === "AbortError") return;
        setState("no connection", "bad");
      }
      await new Promise((resolve) => setTimeout(resolve, 1500));
    }
  }

  /** Keep the counters of the last seconds, and the rates of the last minutes. */
  function note(state) {
    if (history.length && state.now < history.at(-1).now) history.length = rates.length = 0; // another server
    history.push({ now: state.now, ...state.counters, step_seconds: state.step_seconds });
    while (history[0].now < state.now - WINDOW_SECONDS) history.shift();
    const before = history.findLast((one) => one.now <= state.now - 0.9) ?? history[0];
    const passed = state.now - before.now;
    const rate = (counter) => (passed > 0 ? (state.counters[counter] - before[counter]) / passed : 0);
    rates.push({ x: state.now, y: rate("generation_tokens"), prompt: rate("prompt_tokens") });
    while (rates[0].x < state.now - RATE_SECONDS) rates.shift();
  }

  function show(state) {
    const { blocks, counters, engine, running } = state;
    byId("facts").textContent = facts(engine, blocks);
    byId("running").textContent = running.length;
    byId("running-note").textContent = `of ${engine.max_num_seqs} at once`;
    byId("waiting").textContent = state.num_waiting;
    byId("waiting-note").textContent = `${counters.finished.toLocaleString("en")} finished`;
    byId("rate").textContent = decimal(rates.at(-1).y);
    byId("rate-note").textContent = `${decimal(rates.at(-1).prompt)} of prompts`;
    byId("usage").textContent = percent(blocks.used, blocks.total);
    byId("usage-note").textContent = `${blocks.used.toLocaleString("en")} of ${blocks.total.toLocaleString("en")}`;
    byId("hits").textContent = percent(counters.prefix_hits, counters.prefix_queries);
    byId("hits-note").textContent = `${counters.prefix_hits.toLocaleString("en")} tokens`;
    byId("num-preemptions").textContent = counters.preemptions.toLocaleString("en");
    byId("preemptions-note").textContent = counters.draft_tokens
      ? `${percent(counters.accepted_tokens, counters.draft_tokens)} of draft tokens accepted` : "";
    byId("blocks-note").textContent = map.draw(blocks, running);
    showSequences(state);
    drawLine(byId("rate-chart"), rates);
    drawColumns(byId("ttft"), state.ttft);
    drawColumns(byId("itl"), state.itl);
    byId("ttft-note").textContent = quantiles(state.ttft);
    byId("itl-note").textContent = quantiles(state.itl);
    showSplit();
    showPreemptions(state.preemptions);
  }

  function showSequences(state) {
    const rows = [
      ...state.running.map((one) => sequenceRow(one, one.computed_tokens < one.prompt_tokens ? "prefill" : "decode")),
      ...state.waiting.map((one) => sequenceRow(one, one.preemptions ? "preempted" : "waiting")),
    ];
    if (!rows.length) rows.push(wideRow("nothing runs and nothing waits"));
    const unlisted = state.num_waiting - state.waiting.length;
    if (unlisted > 0) rows.push(wideRow(`and ${unlisted.toLocaleString("en")} more wait`));
    byId("sequences").replaceChildren(...rows);
    byId("sequences-note").textContent = `${state.running.length} running, ${state.num_waiting} waiting`;
  }

  function sequenceRow(one, state) {
    const row = document.createElement("tr");
    const title = document.createElement("td");
    const swatch = document.createElement("i");
    swatch.className = "swatch";
    swatch.style.background = one.blocks ? map.color(one.id) : "var(--free)";
    const label = document.createElement("span");
    label.className = "name";
    label.textContent = shortName(one.id);
    title.append(swatch, label);
    for (const tag of [isMine(one.id, mine) ? "yours" : "", one.lora ?? ""].filter(Boolean)) {
      const mark = document.createElement("span");
      mark.className = "tag";
      mark.textContent = tag;
      title.append(mark);
    }
    row.classList.toggle("mine", isMine(one.id, mine));
    const prompt = one.cached_tokens ? `${one.prompt_tokens} (${one.cached_tokens} cached)` : one.prompt_tokens;
    const answer = cell(`${one.output_tokens} of ${one.max_tokens}`);
    answer.className = "progress";
    const bar = document.createElement("progress");
    bar.max = one.max_tokens;
    bar.value = one.output_tokens;
    bar.ariaLabel = `Tokens of the answer of ${shortName(one.id)}`;
    answer.append(bar);
    const count = one.blocks ? one.blocks.reduce((sum, length, i) => sum + (i % 2 ? length : 0), 0) : 0;
    row.append(title, cell(state), cell(prompt), answer, cell(count), cell(seconds(one.seconds)));
    return row;
  }

  function showSplit() {
    const [first, last] = [history[0], history.at(-1)];
    const spent = Object.keys(PARTS).map((part) => last.step_seconds[part] - first.step_seconds[part]);
    const total = spent.reduce((a, b) => a + b, 0);
    const steps = last.steps - first.steps;
    byId("step-note").textContent = steps ? `${seconds(total / steps)} a step, ${decimal(steps / (last.now - first.now))} steps/s` : "idle";
    const shares = Object.entries(PARTS).map(([part, label], i) => ({ part, label, share: total ? spent[i] / total : 0, each: steps ? spent[i] / steps : 0 }));
    byId("split").ariaLabel = shares.map((one) => `${one.label} ${percent(one.share, 1)}`).join(", ");
    byId("split").replaceChildren(...shares.map((one) => {
      const bar = document.createElement("i");
      bar.className = `part-${one.part}`;
      bar.style.width = `${100 * one.share}%`;
      return bar;
    }));
    byId("split-legend").replaceChildren(...shares.map((one) => {
      const item = document.createElement("li");
      const swatch = document.createElement("i");
      swatch.className = `swatch part-${one.part}`;
      item.append(swatch, `${one.label} ${one.each ? seconds(one.each) : "–"}`);
      return item;
    }));
  }
}

function showPreemptions(preemptions) {
  const items = preemptions.map((one) => {
    const item = document.createElement("li");
    const label = document.createElement("span");
    label.className = "name";
    label.textContent = shortName(one.id);
    const when = document.createElement("span");
    when.className = "when";
    when.textContent = `${seconds(one.seconds_ago)} ago`;
    item.append(label, `${one.tokens} tokens to compute again`, when);
    return item;
  });
  if (!items.length) {
    const none = document.createElement("li");
    none.className = "none";
    none.textContent = "none so far";
    items.push(none);
  }
  byId("preemptions").replaceChildren(...items);
}

const isMine = (id, mine) => mine.has(id.split("/")[0]);
const name = (id, mine) => shortName(id) + (isMine(id, mine) ? " (yours)" : "");

function facts(engine, blocks) {
  const on = [
    engine.prefix_caching === "on" ? "prefix cache" : "",
    engine.speculation === "off" ? "" : `speculation by ${engine.speculation}`,
    engine.num_lora_adapters === "0" ? "" : `${engine.num_lora_adapters} adapters`,
    engine.tensor_parallel_size === "1" ? "" : `${engine.tensor_parallel_size} processes`,
  ];
  return [
    `${engine.dtype} on ${engine.device}`,
    `context ${engine.max_model_len.toLocaleString("en")}`,
    `${engine.kv_cache_dtype} KV in blocks of ${blocks.size}`,
    ...on.filter(Boolean),
  ].join(" · ");
}

function setState(text, tone) {
  const element = byId("state");
  if (element.textContent !== text) element.textContent = text;
  element.dataset.tone = tone;
}

function cell(text) {
  const element = document.createElement("td");
  element.append(String(text));
  return element;
}

function wideRow(text) {
  const row = document.createElement("tr");
  row.className = "none";
  const only = cell(text);
  only.colSpan = 6;
  row.append(only);
  return row;
}
