// Entry point: colour scheme, model list, chat and engine view.

import { startChat } from "./chat.js";
import { startEngine } from "./engine.js";
import { request } from "./api.js";

const SCHEMES = { auto: "light dark", light: "light", dark: "dark" };
const NAMES = { auto: "Auto", light: "Light", dark: "Dark" };
const mine = new Set();

function useScheme(name) {
  const button = document.getElementById("theme");
  document.documentElement.style.colorScheme = SCHEMES[name];
  button.textContent = NAMES[name];
  button.ariaLabel = `${NAMES[name]} colours`;
  button.onclick = () => {
    const names = Object.keys(SCHEMES);
    const next = names[(names.indexOf(name) + 1) % names.length];
    localStorage.setItem("llmopt-scheme", next);
    useScheme(next);
    document.dispatchEvent(new Event("scheme"));
  };
}

async function listModels(chat) {
  const response = await request("/v1/models");
  const select = document.getElementById("model");
  const cards = (await response.json()).data;
  for (const card of cards) {
    const option = new Option(card.parent ? `${card.id} (adapter)` : card.id, card.id);
    select.append(option);
  }
  chat.suit({
    takesPictures: cards.some((card) => card.input_modalities.includes("image")),
    isChat: cards[0].chat_template.source !== "plain",
  });
  document.getElementById("served").textContent = cards[0].id;
  document.title = `${cards[0].id} · llmopt`;
}

const saved = localStorage.getItem("llmopt-scheme");
useScheme(saved in SCHEMES ? saved : "auto");
const chat = startChat(mine);
startEngine(mine);
listModels(chat);
