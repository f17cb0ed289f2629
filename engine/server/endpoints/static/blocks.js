// Map of the KV-cache blocks: one cell per block, or per group of adjacent blocks if there are too many.

const MAX_CELLS = 4096;
const MIN_PITCH = 9;
const MAX_PITCH = 22;
const GOLDEN_ANGLE = 137.508;

export class BlockMap {
  #canvas;
  #tip;
  #name;
  #order = new Map();
  #cells = [];
  #grid = { columns: 1, pitch: 1, group: 1 };

  constructor(canvas, tip, name) {
    this.#canvas = canvas;
    this.#tip = tip;
    this.#name = name;
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => (tip.hidden = true));
  }

  /** The colour of a sequence, stable while the page is open. */
  color(id) {
    if (!this.#order.has(id)) this.#order.set(id, this.#order.size);
    return `oklch(.66 .16 ${(255 + this.#order.get(id) * GOLDEN_ANGLE) % 360})`;
  }

  /** Draw the blocks; returns a summary in words. */
  draw(blocks, running) {
    const group = Math.ceil(blocks.total / MAX_CELLS);
    const cells = Array.from({ length: Math.ceil(blocks.total / group) }, () => ({ holders: [], kept: false }));
    let shared = 0;
    for (const sequence of running) {
      for (const block of expandRuns(sequence.blocks)) {
        const { holders } = cells[Math.floor((block - 1) / group)];
        if (!holders.includes(sequence.id)) holders.push(sequence.id);
      }
    }
    const kept = [...expandRuns(blocks.kept)];
    for (const block of kept) cells[Math.floor((block - 1) / group)].kept = true;
    for (const cell of cells) shared += cell.holders.length > 1;
    this.#cells = cells;
    this.#paint(group);
    const words = [
      `${blocks.used.toLocaleString("en")} of ${blocks.total.toLocaleString("en")} in use`,
      group === 1 ? `${shared.toLocaleString("en")} shared` : "",
      `${kept.length.toLocaleString("en")} cached`,
      group === 1 ? "" : `${group} blocks per cell`,
    ].filter(Boolean).join(", ");
    this.#canvas.ariaLabel = `KV blocks: ${words}`;
    return words;
  }

  #paint(group) {
    const canvas = this.#canvas;
    const width = canvas.parentElement.clientWidth;
    const count = this.#cells.length;
    // The largest cells with which the map's height stays below a third of its width.
    const pitch = Math.max(MIN_PITCH, Math.min(MAX_PITCH, Math.floor(Math.sqrt((width * width * 0.32) / count))));
    const columns = Math.max(1, Math.floor(width / pitch));
    const height = Math.ceil(count / columns) * pitch;
    const scale = devicePixelRatio || 1;
    this.#grid = { columns, pitch, group };
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    // Canvas cannot resolve light-dark(); a probe element can.
    const probe = document.createElement("i");
    canvas.parentElement.append(probe);
    const resolve = (name) => ((probe.style.color = `var(--${name})`), getComputedStyle(probe).color);
    const [free, kept, ink] = [resolve("free"), resolve("kept"), resolve("ink")];
    probe.remove();
    const size = pitch - (pitch > 12 ? 2 : 1);
    this.#cells.forEach((cell, index) => {
      const x = (index % columns) * pitch;
      const y = Math.floor(index / columns) * pitch;
      const [first, second] = cell.holders;
      pen.fillStyle = first ? this.color(first) : cell.kept ? kept : free;
      pen.fillRect(x, y, size, size);
      if (!second) return;
      pen.fillStyle = this.color(second);
      pen.beginPath();
      pen.moveTo(x + size, y);
      pen.lineTo(x + size, y + size);
      pen.lineTo(x, y + size);
      pen.fill();
      pen.strokeStyle = ink;
      pen.lineWidth = size > 9 ? 2 : 1;
      pen.strokeRect(x + pen.lineWidth / 2, y + pen.lineWidth / 2, size - pen.lineWidth, size - pen.lineWidth);
    });
  }

  #point(event) {
    const { columns, pitch, group } = this.#grid;
    const index = Math.floor(event.offsetY / pitch) * columns + Math.floor(event.offsetX / pitch);
    const cell = this.#cells[index];
    this.#tip.hidden = !cell || event.offsetX >= columns * pitch;
    if (this.#tip.hidden) return;
    const first = index * group + 1;
    const what = cell.holders.length
      ? cell.holders.slice(0, 4).map(this.#name).join(", ") + (cell.holders.length > 4 ? ` and ${cell.holders.length - 4} more` : "")
      : cell.kept ? "cached prefix" : "free";
    this.#tip.textContent = `${group === 1 ? `block ${first}` : `blocks ${first} to ${first + group - 1}`}: ${what}`;
    const left = Math.min(event.offsetX + 12, this.#canvas.clientWidth - this.#tip.offsetWidth);
    this.#tip.style.left = `${Math.max(0, left)}px`;
    this.#tip.style.top = `${event.offsetY + 16}px`;
  }
}

/** Decode run-length encoded ids: start, length, start, length ... */
function* expandRuns(runs) {
  for (let i = 0; i < runs.length; i += 2) for (let k = 0; k < runs[i + 1]; k++) yield runs[i] + k;
}
