// Formatting of numbers, durations and request ids.

export const decimal = (value) =>
  value >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(value >= 1 ? 3 : 2)));

export function seconds(value) {
  if (value < 1e-3) return `${decimal(value * 1e6)} µs`;
  if (value < 1) return `${decimal(value * 1e3)} ms`;
  return value < 120 ? `${decimal(value)} s` : `${decimal(value / 60)} min`;
}

export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

/** Short name of a sequence: the end of its request id, with prompt and choice index if not 0. */
export function shortName(id) {
  const parts = id.split("/");
  const [prompt, choice] = parts.slice(-2);
  const tail = parts[0].slice(-6);
  return prompt === "0" && choice === "0" ? tail : `${tail} ${prompt}.${choice}`;
}
