// The ownership map: members × partitions on a canvas, from one partition to tens of thousands.
//
// Few partitions: a matrix, one column each, so that a partition stays in its place when it moves. Many: each member's
// partitions as a block of cells. A state has a colour and a shape.

const NOBODY = "nobody";
const WIDE = 620;
const MOST_NAMES = 5; // of members that share a partition, in words
const COLOURS = {
  seen: "--seen", silent: "--silent", gone: "--gone", free: "--free",
  "never claimed": "--free", "not assigned": "--free", unknown: "--unknown",
};

export class OwnershipMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.rects = [];
    this.cells = [];
    this.lines = [];
    this.selected = null; // "topic:place"
    this.changed = new Set();
    this.colours = {};
  }

  // state: an answer of api/state.
  show(state, selected, changed) {
    this.state = state;
    this.selected = selected;
    this.changed = changed || new Set();
    const cells = [];
    state.topics.forEach((topic) => {
      topic.owners.forEach((owner, index) => {
        const place = topic.places[index] || String(topic.partitions[index]);
        cells.push({
          id: `${topic.topic}:${topic.partitions[index]}`,
          key: `${topic.topic}:${place}`,
          topic: topic.topic,
          partition: topic.partitions[index],
          place,
          owner,
          state: state.states[topic.states[index]],
          // Of a partition shared by batches: a cell for each of its members.
          held: ((topic.sharers && topic.sharers[index]) || [[owner, topic.states[index]]]).map(([member, code]) => ({ owner: member, state: state.states[code] })),
          parked: (topic.parked && topic.parked[index]) || 0,
          lag: topic.lags ? topic.lags[index] : null,
          next: topic.nexts ? topic.nexts[index] : null,
          stuck: (topic.stuck && topic.stuck[index]) || "", // one message holds it back, or it can't be read
        });
      });
    });
    this.cells = cells;
    this.draw();
  }

  text(cell) {
    const lag = cell.lag === null ? "" : `, lag ${cell.lag.toLocaleString("en")}`;
    const parked = cell.parked ? `, ${cell.parked.toLocaleString("en")} set aside` : "";
    const rest = `${lag}${parked}${cell.stuck ? `, ${cell.stuck}` : ""}`;
    const names = cell.held.map(({ owner, state }) => [owner < 0 ? NOBODY : this.state.members[owner].client, state]);
    if (names.length > 1) {
      const more = names.length > MOST_NAMES ? ` and ${names.length - MOST_NAMES} more` : "";
      return `${cell.topic}/${cell.place}: shared by batches by ${names.slice(0, MOST_NAMES).map(([name, state]) => `${name} (${state})`).join(", ")}${more}${rest}`;
    }
    return `${cell.topic}/${cell.place}: ${names[0][0]}, ${cell.state}${this.isHung(cell.owner) ? ", hung?" : ""}${rest}`;
  }

  isHung(owner) {
    return owner >= 0 && Boolean(this.state.members[owner].hung);
  }

  find(id) {
    return this.cells.find((cell) => cell.id === id) || null;
  }

  layout(width) {
    const rows = new Map();
    this.state.members.forEach((member, index) => rows.set(index, []));
    this.cells.forEach((cell, column) => {
      for (const { owner, state } of cell.held) {
        if (!rows.has(owner)) rows.set(owner, []);
        rows.get(owner).push([cell, column, state]);
      }
    });
    const wide = width >= WIDE;
    const left = wide ? 170 : 0;
    const room = width - left - 2;
    const matrix = this.cells.length > 0 && room / this.cells.length >= 9;
    let size = 0;
    if (matrix) size = Math.min(22, Math.floor(room / this.cells.length));
    else size = this.cells.length > 4000 ? 8 : this.cells.length > 1000 ? 10 : 13;
    // Nobody first. Where members are many, those that hang, are gone or silent come next: not all fit on a screen.
    const bad = (owner) => (matrix || owner < 0 ? 0 : this.isHung(owner) ? -3 : -["seen", "silent", "gone"].indexOf(this.state.members[owner].state));
    const order = [...rows.keys()].sort((a, b) => (a < 0 || b < 0 ? a - b : bad(a) - bad(b) || a - b));
    const perLine = Math.max(1, Math.floor(room / size));
    this.rects = [];
    this.lines = [];
    let y = matrix && this.state.topics.length > 0 ? 16 : 4;
    this.top = y;
    for (const owner of order) {
      const found = rows.get(owner);
      const label = owner < 0 ? NOBODY : this.state.members[owner].client;
      const height = Math.max(matrix ? 1 : Math.ceil(found.length / perLine), 1) * size;
      const head = wide ? 0 : 15;
      this.lines.push({ owner, label, held: found.length, y, head, height });
      found.forEach(([cell, column, state], index) => {
        const x = left + (matrix ? column * size : (index % perLine) * size);
        const line = matrix ? 0 : Math.floor(index / perLine);
        this.rects.push({ cell, owner, state, x, y: y + head + line * size, size });
      });
      y += head + height + (wide ? (size < 14 ? 6 : 3) : 5);
    }
    this.matrix = matrix;
    this.left = left;
    this.size = size;
    return Math.max(y, 30);
  }

  readColours() {
    const style = getComputedStyle(this.canvas);
    for (const name of ["--seen", "--silent", "--gone", "--free", "--unknown", "--ink", "--quiet", "--line", "--focus", "--mark", "--paper", "--bad"]) {
      this.colours[name] = style.getPropertyValue(name).trim();
    }
    this.font = style.fontFamily;
  }

  draw() {
    if (!this.state) return;
    this.readColours();
    const width = this.canvas.parentElement.clientWidth;
    const height = this.layout(width);
    const ratio = Math.min(2, window.devicePixelRatio || 1);
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    this.drawLabels(context, width);
    this.drawCells(context);
    this.drawMarks(context);
  }

  drawLabels(context, width) {
    const { colours } = this;
    context.textBaseline = "middle";
    if (this.matrix) {
      context.font = `11px ${this.font}`;
      context.fillStyle = colours["--quiet"];
      let column = 0;
      for (const topic of this.state.topics) {
        const x = this.left + column * this.size;
        column += topic.owners.length;
        context.fillText(fitted(context, topic.topic, topic.owners.length * this.size - 4), x, 7);
      }
    }
    for (const line of this.lines) {
      context.font = `12px ${this.font}`;
      const lost = line.owner < 0;
      context.fillStyle = lost ? colours["--gone"] : colours["--ink"];
      const y = line.y + (line.head ? line.head / 2 : Math.min(line.height, 16) / 2);
      const mark = this.isHung(line.owner) ? ", hung?" : "";
      const room = (this.left ? this.left - 44 : width - 60) - context.measureText(mark).width;
      const label = fitted(context, line.label, room);
      context.fillText(label, 0, y);
      if (mark) {
        context.fillStyle = colours["--bad"];
        context.fillText(mark, context.measureText(label).width, y);
      }
      context.fillStyle = colours["--quiet"];
      context.textAlign = "right";
      context.fillText(line.held.toLocaleString("en"), this.left ? this.left - 10 : width - 2, y);
      context.textAlign = "left";
      if (this.matrix) {
        context.fillStyle = colours["--line"];
        context.fillRect(this.left, line.y + line.head + line.height + 1, width - this.left, 1);
      }
    }
  }

  // State by state: setting a colour costs more than a rectangle.
  drawCells(context) {
    const { colours } = this;
    const gap = this.size > 9 ? 2 : 1;
    const side = this.size - gap;
    const byState = new Map();
    for (const rect of this.rects) {
      const { owner, state } = rect;
      const kind = owner < 0 ? (state === "free" ? "nobody" : "never") : state;
      if (!byState.has(kind)) byState.set(kind, []);
      byState.get(kind).push(rect);
    }
    for (const [kind, rects] of byState) {
      if (kind === "nobody" || kind === "never") {
        context.strokeStyle = colours[kind === "nobody" ? "--gone" : "--free"];
        context.lineWidth = 1;
        for (const { x, y } of rects) context.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
        continue;
      }
      context.fillStyle = colours[COLOURS[kind] || "--unknown"];
      for (const { x, y } of rects) context.fillRect(x, y, side, side);
      if (kind === "silent") {
        context.fillStyle = colours["--paper"];
        for (const { x, y } of rects) context.fillRect(x, y + side / 2 - 1, side, Math.max(1, side / 6));
      } else if (kind === "gone") {
        context.strokeStyle = colours["--paper"];
        context.lineWidth = Math.max(1, side / 7);
        context.beginPath();
        for (const { x, y } of rects) {
          context.moveTo(x + 1, y + 1);
          context.lineTo(x + side - 1, y + side - 1);
          context.moveTo(x + side - 1, y + 1);
          context.lineTo(x + 1, y + side - 1);
        }
        context.stroke();
      }
    }
  }

  drawMarks(context) {
    for (const { cell, x, y, size } of this.rects) {
      const side = size - (size > 9 ? 2 : 1);
      if (cell.stuck) {
        context.fillStyle = this.colours["--paper"];
        context.fillRect(x, y, side, side / 2);
        context.fillStyle = this.colours["--bad"];
        context.fillRect(x, y, side, Math.max(1, side / 3));
      }
      if (cell.parked) {
        context.fillStyle = this.colours["--paper"];
        context.fillRect(x + side - 7, y, 7, 7);
        context.fillStyle = this.colours["--ink"];
        context.fillRect(x + side - 6, y, 6, 6);
      }
      if (this.changed.has(cell.id)) {
        context.strokeStyle = this.colours["--mark"];
        context.lineWidth = 2;
        context.strokeRect(x + 1, y + 1, side - 2, side - 2);
      }
      if (cell.id === this.selected) {
        context.strokeStyle = this.colours["--paper"];
        context.lineWidth = 4;
        context.strokeRect(x - 1, y - 1, side + 2, side + 2);
        context.strokeStyle = this.colours["--focus"];
        context.lineWidth = 2;
        context.strokeRect(x - 1, y - 1, side + 2, side + 2);
      }
    }
  }

  // The cell at this place of the canvas.
  hit(x, y) {
    const found = this.rects.find((rect) => x >= rect.x && x < rect.x + rect.size && y >= rect.y && y < rect.y + rect.size);
    if (found || !this.matrix) return found ? found.cell : null;
    const column = Math.floor((x - this.left) / this.size); // a column of the matrix is one partition
    return x >= this.left ? this.cells[column] || null : null;
  }

  // The cell that a key leads to from the selected one; null: not one of our keys.
  next(key) {
    const keys = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End", "PageUp", "PageDown"];
    if (!keys.includes(key) || this.rects.length === 0) return null;
    const all = this.matrix ? this.cells.map((cell) => this.rects.find((rect) => rect.cell === cell)) : this.rects;
    const met = new Set(); // a shared partition has several
    const order = all.filter((rect) => !met.has(rect.cell.id) && met.add(rect.cell.id));
    const index = order.findIndex((rect) => rect.cell.id === this.selected);
    if (key === "End") return order[order.length - 1].cell;
    if (key === "Home" || index < 0) return order[0].cell;
    if (key === "ArrowLeft") return order[Math.max(0, index - 1)].cell;
    if (key === "ArrowRight") return order[Math.min(order.length - 1, index + 1)].cell;
    const here = order[index];
    const up = key === "ArrowUp" || key === "PageUp";
    const steps = key.startsWith("Page") ? 10 : 1;
    const ys = [...new Set(this.rects.map((rect) => rect.y))].sort((a, b) => a - b);
    const at = ys.indexOf(here.y) + (up ? -steps : steps);
    const y = ys[Math.max(0, Math.min(ys.length - 1, at))];
    const line = this.rects.filter((rect) => rect.y === y);
    return line.reduce((best, rect) => (Math.abs(rect.x - here.x) < Math.abs(best.x - here.x) ? rect : best)).cell;
  }
}

function fitted(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let end = text.length;
  while (end > 1 && context.measureText(text.slice(0, end) + "…").width > room) end -= 1;
  return text.slice(0, end) + "…";
}
