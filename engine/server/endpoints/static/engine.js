// The live engine view: one stream of snapshots, open only while the page is visible.

import { events, refusal, request } from "./api.js";
import { BlockMap } from "./blocks.js";
import { drawColumns, drawLine, quantiles } from "./charts.js";
import { byId } from "./dom.js";
import { decimal, percent, seconds, shortName } from "./text.js";

const PARTS = { schedule: "schedule", model: "model and sampler", output: "output processing" };
const FOLDED = "llmopt-engine-folded";
const RATE_SECONDS = 120;
const WINDOW_SECONDS = 10;

export function startEngine(mine) {
  const map = new BlockMap(byId("blocks"), byId("tip"), (id) => name(id, mine));
  const history = [];
  const rates = [];
  let paused = false;
  let folded = localStorage.getItem(FOLDED) === "yes";
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
  byId("fold").onclick = () => {
    folded = !folded;
    localStorage.setItem(FOLDED, folded ? "yes" : "no");
    fold();
  };
  fold();

  /** Show the view, or leave its room to the chat. */
  function fold() {
    document.body.classList.toggle("folded", folded);
    byId("fold").ariaExpanded = String(!folded);
    byId("fold").textContent = folded ? "Show engine" : "Hide engine";
    follow();
  }

  /** Subscribe only while the view is visible, so that a hidden one costs the engine nothing. */
  function follow() {
    const wanted = !paused && !folded && document.visibilityState === "visible";
    if (wanted && !feed) watch((feed = new AbortController()));
    if (!wanted) {
      feed?.abort();
      feed = null;
      setState(folded ? "" : paused ? "paused" : "waiting", "unsure");
    }
  }

  async function watch(controller) {
    while (feed === controller) {
      try {
        const response = await request("/engine/state", { signal: controller.signal });
        if (!response.ok) throw new Error(await refusal(response));
        for await (const data of events(response)) {
          const state = JSON.parse(data);
          if (feed !== controller) return;
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

  /** Record the counters of the last WINDOW_SECONDS and the rates of the last RATE_SECONDS. */
  function note(state) {
    if (history.length && state.now < history.at(-1).now) history.length = rates.length = 0; // another server
    history.push({ now: state.now, ...state.counters, step_seconds: state.step_seconds });
    while (history[0].now < state.now - WINDOW_SECONDS) history.shift();
    const before = history.findLast((entry) => entry.now <= state.now - 0.9) ?? history[0];
    const passed = state.now - before.now;
    const rate = (counter) => (passed > 0 ? (state.counters[counter] - before[counter]) / passed : 0);
    rates.push({ x: state.now, y: rate("generation_tokens"), prompt: rate("prompt_tokens") });
    while (rates[0].x < state.now - RATE_SECONDS) rates.shift();
  }

  function show(state) {
    const { blocks, counters, engine, running } = state;
    byId("facts").textContent = facts(engine, blocks);
    byId("running").textContent = running.length;
    byId("running-note").textContent = `of at most ${engine.max_num_seqs}`;
    byId("waiting").textContent = state.num_waiting;
    byId("waiting-note").textContent = `${counters.finished.toLocaleString("en")} finished`;
    byId("rate").textContent = decimal(rates.at(-1).y);
    byId("rate-note").textContent = `${decimal(rates.at(-1).prompt)} prompt tokens/s`;
    byId("usage").textContent = percent(blocks.used, blocks.total);
    const evicted = counters.evicted_tokens ? `, ${counters.evicted_tokens.toLocaleString("en")} tokens evicted` : "";
    byId("usage-note").textContent = `${blocks.used.toLocaleString("en")} of ${blocks.total.toLocaleString("en")}${evicted}`;
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
      ...state.running.map((sequence) => sequenceRow(sequence, sequence.computed_tokens < sequence.prompt_tokens ? "prefill" : "decode")),
      ...state.waiting.map((sequence) => sequenceRow(sequence, sequence.preemptions ? "preempted" : "waiting")),
    ];
    if (!rows.length) rows.push(wideRow("no running or waiting sequences"));
    const unlisted = state.num_waiting - state.waiting.length;
    if (unlisted > 0) rows.push(wideRow(`and ${unlisted.toLocaleString("en")} more waiting`));
    byId("sequences").replaceChildren(...rows);
    byId("sequences-note").textContent = `${state.running.length} running, ${state.num_waiting} waiting`;
  }

  function sequenceRow(sequence, state) {
    const row = document.createElement("tr");
    const title = document.createElement("td");
    const swatch = document.createElement("i");
    swatch.className = "swatch";
    swatch.style.background = sequence.blocks ? map.color(sequence.id) : "var(--free)";
    const label = document.createElement("span");
    label.className = "name";
    label.textContent = shortName(sequence.id);
    title.append(swatch, label);
    for (const tag of [isMine(sequence.id, mine) ? "yours" : "", sequence.lora ?? ""].filter(Boolean)) {
      const mark = document.createElement("span");
      mark.className = "tag";
      mark.textContent = tag;
      title.append(mark);
    }
    row.classList.toggle("mine", isMine(sequence.id, mine));
    const prompt = sequence.cached_tokens ? `${sequence.prompt_tokens} (${sequence.cached_tokens} cached)` : sequence.prompt_tokens;
    const output = cell(`${sequence.output_tokens} of ${sequence.max_tokens}`);
    output.className = "progress";
    const bar = document.createElement("progress");
    bar.max = sequence.max_tokens;
    bar.value = sequence.output_tokens;
    bar.ariaLabel = `Output tokens of ${shortName(sequence.id)}`;
    output.append(bar);
    const count = sequence.blocks ? sequence.blocks.reduce((sum, length, i) => sum + (i % 2 ? length : 0), 0) : 0;
    const kept = sequence.computed_tokens - sequence.evicted_tokens;
    const blocks = sequence.evicted_tokens ? `${count} (${kept} of ${sequence.computed_tokens} tokens kept)` : count;
    row.append(title, cell(state), cell(prompt), output, cell(blocks), cell(seconds(sequence.seconds)));
    return row;
  }

  function showSplit() {
    const [first, last] = [history[0], history.at(-1)];
    const spent = Object.keys(PARTS).map((part) => last.step_seconds[part] - first.step_seconds[part]);
    const total = spent.reduce((a, b) => a + b, 0);
    const steps = last.steps - first.steps;
    byId("step-note").textContent = steps ? `${seconds(total / steps)} per step, ${decimal(steps / (last.now - first.now))} steps/s` : "idle";
    const shares = Object.entries(PARTS).map(([part, label], i) => ({ part, label, share: total ? spent[i] / total : 0, perStep: steps ? spent[i] / steps : 0 }));
    byId("split").ariaLabel = shares.map((entry) => `${entry.label} ${percent(entry.share, 1)}`).join(", ");
    byId("split").replaceChildren(...shares.map((entry) => {
      const bar = document.createElement("i");
      bar.className = `part-${entry.part}`;
      bar.style.width = `${100 * entry.share}%`;
      return bar;
    }));
    byId("split-legend").replaceChildren(...shares.map((entry) => {
      const item = document.createElement("li");
      const swatch = document.createElement("i");
      swatch.className = `swatch part-${entry.part}`;
      item.append(swatch, `${entry.label} ${entry.perStep ? seconds(entry.perStep) : "–"}`);
      return item;
    }));
  }
}

function showPreemptions(preemptions) {
  const items = preemptions.map((preemption) => {
    const item = document.createElement("li");
    const label = document.createElement("span");
    label.className = "name";
    label.textContent = shortName(preemption.id);
    const when = document.createElement("span");
    when.className = "when";
    when.textContent = `${seconds(preemption.seconds_ago)} ago`;
    item.append(label, `${preemption.tokens} tokens to recompute`, when);
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
    engine.speculation === "off" ? "" : `speculative decoding: ${engine.speculation}`,
    engine.num_lora_adapters === "0" ? "" : `${engine.num_lora_adapters} LoRA adapters`,
    engine.tensor_parallel_size === "1" ? "" : `tensor parallel ${engine.tensor_parallel_size}`,
  ];
  return [
    `${engine.dtype} on ${engine.device}`,
    `context ${engine.max_model_len.toLocaleString("en")}`,
    `${engine.kv_cache_dtype} KV cache, block size ${blocks.size}`,
    ...on.filter(Boolean),
  ].join(" · ");
}

function setState(text, tone) {
  const element = byId("state");
  if (element.textContent !== text) element.textContent = text;
  element.dataset.tone = tone;
  byId("engine").classList.toggle("stale", tone === "bad");
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
