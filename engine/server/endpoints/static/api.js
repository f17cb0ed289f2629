// HTTP client of the page: fetch with the API key, and server-sent events.

const KEY = "llmopt-api-key";
let keyPrompt = null;

/** fetch with the API key; prompts for it after a 401, once for all pending requests. */
export async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.status !== 401) return response;
    if (sessionStorage.getItem(KEY) === key) await askForKey(key !== null);
  }
}

function askForKey(wasWrong) {
  keyPrompt ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const text = document.getElementById("key-text");
    const field = document.getElementById("key");
    if (wasWrong) {
      text.textContent = "The server rejected that key. Try another.";
      text.className = "problem";
    }
    field.value = "";
    dialog.oncancel = (event) => event.preventDefault();
    dialog.onclose = () => {
      sessionStorage.setItem(KEY, field.value.trim());
      keyPrompt = null;
      resolve();
    };
    dialog.showModal();
  });
  return keyPrompt;
}

/** Yields the data of server-sent events, as text. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The message of an error response. */
export async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server returned status ${response.status}`;
  }
}
