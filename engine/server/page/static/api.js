// Requests to this server: with the key where it asks for one, and answers as streams of events.

const KEY = "llmopt-api-key";
let asking = null;

/** fetch with the key; asks for it, once for all who wait, where the server wants one. */
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
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const text = document.getElementById("key-text");
    const field = document.getElementById("key");
    if (wasWrong) {
      text.textContent = "The server does not know that key. Try another.";
      text.className = "problem";
    }
    field.value = "";
    dialog.oncancel = (event) => event.preventDefault();
    dialog.onclose = () => {
      sessionStorage.setItem(KEY, field.value.trim());
      asking = null;
      resolve();
    };
    dialog.showModal();
  });
  return asking;
}

/** The data of server-sent events, as text. */
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

/** What a refusal says, in words. */
export async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with ${response.status}`;
  }
}
