// Lag and rate over time (uPlot), and the strip above the slider: what changed, what was rejected, pauses.

import { html, useEffect, useRef } from "./vendor/preact.js";
import { clock } from "./api.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// [seconds], [rate], [lag] of a timeline within a window of time. The rate is what the log says, in buckets that are
// over; only beyond these, while the log is still being read, it is what was seen live.
export function points(timeline, begin, end) {
  const rows = new Map();
  const step = Math.max(1, Math.ceil((end - begin) / timeline.width / 700));
  const width = timeline.width * step;
  const over = timeline.done.length > 0 ? Math.floor((timeline.end - timeline.begin) / width) : 0;
  const known = over > 0 ? timeline.begin + over * width : 0;
  for (let at = Math.max(0, Math.floor((begin - timeline.begin) / width)); at < over; at++) {
    const time = timeline.begin + at * width;
    if (time > end) break;
    const sum = timeline.done.slice(at * step, (at + 1) * step).reduce((all, each) => all + each, 0);
    rows.set(time / 1000, [(sum * 1000) / width, null]);
  }
  for (const [time, lag, rate] of timeline.lag) {
    if (time < begin || time > end) continue;
    const row = rows.get(time / 1000) || [null, null];
    rows.set(time / 1000, [time < known ? row[0] : rate, lag]);
  }
  const times = [...rows.keys()].sort((a, b) => a - b);
  return [times, times.map((time) => rows.get(time)[0]), times.map((time) => rows.get(time)[1])];
}

export function Chart({ timeline, begin, end, moment, theme, onPick }) {
  const place = useRef(null);
  const plot = useRef(null);
  const now = useRef(moment);
  now.current = moment;
  useEffect(() => {
    if (!timeline || !place.current) return undefined;
    const axis = { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") } };
    const hasLag = timeline.lag.length > 0;
    const text = (show) => (self, value, series, index) => {
      if (index !== null && index !== undefined) return show(value); // what the cursor is on
      const found = newest(self.data, series, now.current);
      return show(series === 0 && now.current !== null ? now.current / 1000 : found);
    };
    const short = (self, values) => values.map((value) => (value === null ? "" : brief(value)));
    const chart = new uPlot(
      {
        width: place.current.clientWidth,
        height: 170,
        cursor: { y: false, drag: { setScale: false }, hover: { skip: [null] } },
        scales: { x: { range: [begin / 1000, end / 1000] }, rate: { range: from0 }, lag: { range: from0 } },
        axes: [
          { ...axis, values: (self, ticks) => ticks.map((tick) => clock(tick * 1000)), space: 90 },
          { ...axis, scale: "rate", values: short, size: 50 },
          { ...axis, scale: "lag", side: 1, values: short, size: 50, grid: { show: false }, show: hasLag },
        ],
        series: [
          { value: text((value) => (value === null ? "-" : clock(value * 1000))) },
          { label: "done, msg/s", scale: "rate", stroke: css("--rate"), width: 1.5, fill: css("--rate") + "22", spanGaps: true, value: text(figure) },
          { label: hasLag ? "lag" : "lag (only of what this page saw live)", scale: "lag", stroke: css("--lag"), width: 1.5, dash: [5, 3], spanGaps: true, value: text(figure) },
        ],
        hooks: {
          draw: [
            (self) => {
              if (now.current === null) return;
              const x = self.valToPos(now.current / 1000, "x", true);
              self.ctx.save();
              self.ctx.fillStyle = css("--focus");
              self.ctx.fillRect(x - 1, self.bbox.top, 2, self.bbox.height);
              self.ctx.restore();
            },
          ],
        },
      },
      points(timeline, begin, end),
      place.current,
    );
    chart.over.addEventListener("click", () => {
      if (chart.cursor.left >= 0) onPick(Math.round(chart.posToVal(chart.cursor.left, "x") * 1000));
    });
    plot.current = chart;
    const observer = new ResizeObserver(() => chart.setSize({ width: place.current.clientWidth, height: 170 }));
    observer.observe(place.current);
    return () => {
      observer.disconnect();
      chart.destroy();
      plot.current = null;
    };
  }, [timeline, begin, end, theme]);
  useEffect(() => {
    if (!plot.current) return;
    plot.current.redraw(false);
    plot.current.setLegend({}, false);
  }, [moment]);
  return html`<div class="chart" ref=${place} role="img" aria-label="Messages done a second, and lag, over time"></div>`;
}

const from0 = (self, low, high) => [0, high > 0 ? high * 1.1 : 1];
const figure = (value) => (value === null || value === undefined ? "-" : brief(value));

// The last value of a series, up to a moment (ms) where one is chosen; null: there is none.
function newest(data, series, moment) {
  for (let at = data[0].length - 1; at >= 0; at--) {
    if (data[series][at] !== null && (moment === null || data[0][at] * 1000 <= moment)) return data[series][at];
  }
  return null;
}

function brief(value) {
  for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= unit) return `${+(value / unit).toFixed(1)} ${name}`;
  }
  return `${+value.toFixed(value < 10 ? 1 : 0)}`;
}

// The strip above the slider.
export function Strip({ timeline, begin, end, moment, pinned, reached, theme, onPick, onCheckpoint }) {
  const canvas = useRef(null);
  useEffect(() => {
    const element = canvas.current;
    const draw = () => drawStrip(element, { timeline, begin, end, moment, pinned, reached });
    draw();
    const observer = new ResizeObserver(draw);
    observer.observe(element);
    return () => observer.disconnect();
  }, [timeline, begin, end, moment, pinned, reached, theme]);
  const pick = (event) => {
    const width = canvas.current.clientWidth;
    const found = checkpointAt(timeline, event.offsetX, (time) => ((time - begin) / Math.max(1, end - begin)) * width);
    if (found) onCheckpoint(`${timeline.home}:${found[1]}`);
    else onPick(Math.round(begin + (event.offsetX / width) * (end - begin)));
  };
  return html`<canvas ref=${canvas} onClick=${pick} aria-hidden="true"></canvas>`;
}

// The checkpoint within a few pixels of x, the nearest one; null: there is none.
const REACH = 4;
function checkpointAt(timeline, x, place) {
  let best = null;
  for (const each of (timeline && timeline.checkpoints) || []) {
    const far = Math.abs(place(each[0]) - x);
    if (far <= REACH && (best === null || far <= best[0])) best = [far, each];
  }
  return best && best[1];
}

function drawStrip(canvas, { timeline, begin, end, moment, pinned, reached }) {
  const ratio = Math.min(2, window.devicePixelRatio || 1);
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const x = (time) => ((time - begin) / Math.max(1, end - begin)) * width;
  context.fillStyle = css("--line");
  context.fillRect(0, height - 1, width, 1);
  if (timeline) {
    context.fillStyle = css("--silent") + "33";
    for (const [since, until] of timeline.pauses) context.fillRect(x(since), 0, Math.max(1, x(until) - x(since)), height);
    bars(context, timeline, "changed", x, width, css("--accent"), height - 1, (height - 2) * 0.62, -1);
    bars(context, timeline, "rejected", x, width, css("--gone"), 0, (height - 2) * 0.36, 1);
    context.fillStyle = css("--lag");
    for (const [time] of timeline.checkpoints || []) {
      const at = x(time);
      context.beginPath();
      for (const [dx, dy] of [[0, -4], [4, 0], [0, 4], [-4, 0]]) context.lineTo(at + dx, height / 2 + dy);
      context.fill();
    }
  }
  if (reached && reached < end) {
    context.fillStyle = css("--unknown") + "55";
    context.fillRect(Math.max(0, x(reached)), height - 5, width, 4);
  }
  for (const [time, colour] of [[pinned, css("--mark")], [moment, css("--focus")]]) {
    if (time === null || time === undefined) continue;
    context.fillStyle = colour;
    context.fillRect(x(time) - 1, 0, 2, height);
  }
}

function bars(context, timeline, name, x, width, colour, base, room, direction) {
  const columns = new Float64Array(Math.max(1, Math.ceil(width / 2)));
  timeline[name].forEach((amount, index) => {
    const at = Math.floor(x(timeline.begin + (index + 0.5) * timeline.width) / 2);
    if (amount && at >= 0 && at < columns.length) columns[at] += amount;
  });
  const most = Math.max(...columns);
  context.fillStyle = colour;
  columns.forEach((amount, index) => {
    if (!amount) return;
    const high = Math.max(2, (Math.log1p(amount) / Math.log1p(most)) * room);
    context.fillRect(index * 2, direction < 0 ? base - high : base, 2, high);
  });
}
