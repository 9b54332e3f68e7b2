// Asking the server, and what the address says.

export class Refused extends Error {
  constructor(text, status) {
    super(text);
    this.status = status;
  }
}

export const token = () => sessionStorage.getItem("kafka-marshal-token") || "";

async function answered(response) {
  const found = await response.json().catch(() => ({ error: `${response.status} ${response.statusText}` }));
  if (!response.ok) throw new Refused(found.error, response.status);
  return found;
}

export async function ask(name, parameters = {}, signal = undefined) {
  const wanted = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(wanted).toString();
  const headers = token() ? { "X-Kafka-Marshal-Token": token() } : {};
  return answered(await fetch(`api/${name}${query ? "?" + query : ""}`, { signal, headers }));
}

// The log is not read so far yet (503): asked again, so much later.
export const RETRY_MS = 1000;
export const isLater = (error) => error.status === 503;

export async function send(name, body) {
  const headers = { "Content-Type": "application/json", "X-Kafka-Marshal-Token": token() };
  return answered(await fetch(`api/${name}`, { method: "POST", headers, body: JSON.stringify(body) }));
}

// Only the newest question counts: while one is under way, the last of the others waits.
export function newestOnly(answer) {
  let running = false;
  let next = null;
  return async function again(...parameters) {
    if (running) {
      next = parameters;
      return;
    }
    running = true;
    try {
      await answer(...parameters);
    } finally {
      running = false;
      if (next) {
        const waiting = next;
        next = null;
        again(...waiting);
      }
    }
  };
}

// The address: #group=delays&at=2026-11-21T04:50:12Z&from=…&p=flights:7&tab=rejected
const NAMES = ["group", "at", "from", "p", "tab"];

export function readAddress() {
  const found = new URLSearchParams(location.hash.slice(1));
  if (found.has("token")) {
    sessionStorage.setItem("kafka-marshal-token", found.get("token"));
    found.delete("token");
    history.replaceState(null, "", "#" + readable(found));
  }
  return Object.fromEntries(NAMES.map((name) => [name, found.get(name)]));
}

const readable = (parameters) => parameters.toString().replaceAll("%3A", ":").replaceAll("%2F", "/");

export function writeAddress(view, replace) {
  const found = new URLSearchParams(NAMES.filter((name) => view[name]).map((name) => [name, view[name]]));
  const hash = "#" + readable(found);
  if (hash === location.hash) return;
  if (replace) history.replaceState(null, "", hash);
  else history.pushState(null, "", hash);
}

export const iso = (ms) => new Date(ms).toISOString();

// Local time, to the second; with the day where it is not the last one of the history, or in full.
let lastDay = "";
export const setLastDay = (ms) => {
  lastDay = new Date(ms).toDateString();
};

export function clock(ms, inFull = false) {
  const moment = new Date(ms);
  const two = (n) => String(n).padStart(2, "0");
  const text = `${two(moment.getHours())}:${two(moment.getMinutes())}:${two(moment.getSeconds())}`;
  const day = `${two(moment.getMonth() + 1)}-${two(moment.getDate())}`;
  if (inFull) return `${moment.getFullYear()}-${day} ${text}.${String(moment.getMilliseconds()).padStart(3, "0")}`;
  return moment.toDateString() === lastDay ? text : `${day} ${text}`;
}
