// SVG charts: a time series as a line, a histogram as columns.

import { decimal, seconds } from "./text.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
const BOTTOM = 18;
const TOP = 6;

/** Line chart of points {x, y}, x in ascending seconds; the last one is now. */
export function drawLine(svg, points) {
  const now = points.at(-1).x;
  const span = Math.max(20, now - points[0].x);
  const { width, height } = fit(svg);
  const most = niceAbove(Math.max(...points.map((point) => point.y), 1));
  const x = (value) => width * (1 - (now - value) / span);
  const y = (value) => TOP + (height - TOP) * (1 - value / most);
  const path = points.map((point, i) => `${i ? "L" : "M"}${x(point.x).toFixed(1)} ${y(point.y).toFixed(1)}`).join("");
  const area = `${path}L${x(points.at(-1).x).toFixed(1)} ${height}L${x(points[0].x).toFixed(1)} ${height}Z`;
  svg.replaceChildren(
    rule(0, y(most), width), rule(0, y(most / 2), width), rule(0, height, width),
    make("path", { class: "area", d: area }),
    make("path", { class: "line", d: path }),
    label(0, y(most) + 12, decimal(most)), label(0, y(most / 2) + 12, decimal(most / 2)),
    label(0, height + 14, `${seconds(span)} ago`), label(width, height + 14, "now", "end"),
  );
  svg.ariaLabel = `Tokens per second: ${decimal(points.at(-1).y)} now, at most ${decimal(Math.max(...points.map((point) => point.y)))}`;
}

/** Histogram of seconds, from its first non-empty bucket to its last. */
export function drawColumns(svg, histogram) {
  const { width, height } = fit(svg);
  const { bounds, counts } = histogram;
  const filled = counts.flatMap((count, i) => (count ? [i] : []));
  if (!filled.length) {
    svg.replaceChildren(rule(0, height, width), label(width / 2, height / 2, "nothing yet", "middle"));
    return;
  }
  const first = Math.max(0, filled[0] - 1);
  const last = Math.min(bounds.length, Math.max(filled.at(-1) + 1, first + 5));
  const most = Math.max(...counts);
  const step = width / (last - first + 1);
  const marks = [];
  for (let i = first; i <= last; i++) {
    const left = (i - first) * step;
    const tall = counts[i] ? Math.max(2, ((height - TOP) * counts[i]) / most) : 0;
    const column = make("rect", { class: "column", x: left + 1, y: height - tall, width: Math.max(1, step - 2), height: tall, rx: 2 });
    column.append(make("title", {}, `${counts[i].toLocaleString("en")} up to ${i < bounds.length ? seconds(bounds[i]) : "more"}`));
    marks.push(column);
    const hasSpace = step > 46 || (i - first) % Math.ceil(46 / step) === 0;
    if (i < last && i < bounds.length && hasSpace) marks.push(label(left + step, height + 14, seconds(bounds[i]), "middle"));
  }
  svg.replaceChildren(rule(0, height, width), ...marks);
  svg.ariaLabel = `${svg.id === "ttft" ? "Time to first token" : "Inter-token latency"}: ${quantiles(histogram)}`;
}

/** p50, p90 and p99 of a histogram, as text. */
export function quantiles(histogram) {
  const total = histogram.counts.reduce((a, b) => a + b, 0);
  if (!total) return "";
  return [0.5, 0.9, 0.99].map((q) => `p${q * 100} ${seconds(quantile(histogram, q, total))}`).join(" · ");
}

/** Linear interpolation within a bucket, as Prometheus' histogram_quantile does. */
function quantile({ bounds, counts }, q, total) {
  let below = 0;
  for (let i = 0; i < bounds.length; i++) {
    if (below + counts[i] >= q * total) {
      const from = i ? bounds[i - 1] : 0;
      return from + ((bounds[i] - from) * (q * total - below)) / counts[i];
    }
    below += counts[i];
  }
  return bounds.at(-1);
}

function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 7.5, 10].map((digit) => digit * power).find((bound) => bound >= value);
}

function fit(svg) {
  const { width, height } = svg.getBoundingClientRect();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  return { width, height: height - BOTTOM };
}

function make(kind, attributes, text) {
  const element = document.createElementNS(NAMESPACE, kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

const rule = (x, y, width) => make("line", { class: "axis", x1: x, x2: x + width, y1: y, y2: y });
const label = (x, y, text, anchor = "start") => make("text", { x, y, "text-anchor": anchor }, text);
