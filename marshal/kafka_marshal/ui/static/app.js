// The page: one state, what the address says, and the newest answers.

import { html, render, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact.js";
import { ask, clock, isLater, iso, newestOnly, readAddress, RETRY_MS, setLastDay, token, writeAddress } from "./api.js";
import { Chart, Strip } from "./charts.js";
import { OwnershipMap } from "./map.js";
import { Detail, Diff, Lists, Problems } from "./panels.js";
import { Steer, SteerBar } from "./steer.js";

const WINDOWS = [["all", "whole history", 0], ["24h", "24 hours", 86_400_000], ["1h", "1 hour", 3_600_000], ["10m", "10 minutes", 600_000], ["1m", "1 minute", 60_000]];

function useAddress() {
  const [view, setView] = useState(readAddress);
  useEffect(() => {
    const changed = () => setView(readAddress());
    addEventListener("hashchange", changed);
    addEventListener("popstate", changed);
    return () => {
      removeEventListener("hashchange", changed);
      removeEventListener("popstate", changed);
    };
  }, []);
  const go = useCallback((change, replace = false) => {
    setView((before) => {
      const after = { ...before, ...change };
      writeAddress(after, replace);
      return after;
    });
  }, []);
  return [view, go];
}

function useTheme() {
  const [theme, setTheme] = useState(0);
  useEffect(() => {
    const media = matchMedia("(prefers-color-scheme: dark)");
    const changed = () => setTheme((before) => before + 1);
    media.addEventListener("change", changed);
    return () => media.removeEventListener("change", changed);
  }, []);
  return theme;
}

// What there is: asked often while the log is being read.
function useLog() {
  const [log, setLog] = useState(null);
  const [lost, setLost] = useState("");
  useEffect(() => {
    let timer = 0;
    let ended = false;
    const look = async () => {
      let wait = 1000;
      try {
        const found = await ask("log");
        setLastDay(found.end || Date.now());
        setLog(found);
        setLost("");
        wait = found.complete ? 5000 : found.groups.length ? 1000 : 300;
      } catch (error) {
        setLost("The server does not answer: kafka-marshal ui was ended, or this address is not its own.");
      }
      if (!ended) timer = setTimeout(look, wait);
    };
    look();
    return () => {
      ended = true;
      clearTimeout(timer);
    };
  }, []);
  return [log, lost];
}

// The state at the moment, or the newest by server-sent events.
function useState_(group, at, log) {
  const [state, setState] = useState(null);
  const [figures, setFigures] = useState(null);
  const [news, setNews] = useState(0);
  const [problem, setProblem] = useState("");
  const [tries, setTries] = useState(0);
  const fetchState = useMemo(
    () =>
      newestOnly(async (name, moment) => {
        try {
          setState(await ask("state", { group: name, at: moment }));
          setProblem("");
        } catch (error) {
          setProblem(error.message);
          if (isLater(error)) setTimeout(() => setTries((before) => before + 1), RETRY_MS);
        }
      }),
    [],
  );
  const isLive = log !== null && log.live;
  const hasGroup = log !== null && log.groups.includes(group);
  // Before the page is painted, not after it: a frame sooner.
  useLayoutEffect(() => {
    if (!group || (!at && isLive && !hasGroup)) return undefined;
    fetchState(group, at);
    if (at || !isLive) return undefined;
    const source = new EventSource(`api/live?group=${encodeURIComponent(group)}`);
    source.addEventListener("state", (event) => {
      setState(JSON.parse(event.data));
      setProblem("");
    });
    source.addEventListener("figures", (event) => setFigures(JSON.parse(event.data)));
    source.addEventListener("happened", () => setNews((before) => before + 1));
    return () => source.close();
  }, [group, at, isLive, hasGroup, log === null || log.complete || isLive ? 0 : log.read, at ? tries : 0]);
  return { state, figures, news, problem };
}

function App() {
  const [view, go] = useAddress();
  const [log, lost] = useLog();
  const theme = useTheme();
  const [dragged, setDragged] = useState(null);
  const group = view.group || (log && log.groups[0]) || null;
  const at = dragged === null ? view.at : iso(dragged);
  const { state, figures, news, problem } = useState_(group, at, log);
  const [timeline, setTimeline] = useState(null);
  const [diff, setDiff] = useState(null);
  const [wish, setWish] = useState(null);
  const [steered, setSteered] = useState(0);
  const [size, setSize] = useState("all");
  const refresh = log ? `${log.complete}${log.reached}` : "";
  useEffect(() => {
    if (!group) return undefined;
    const look = () => ask("timeline", { group }).then(setTimeline, () => {});
    look();
    const timer = log && log.live ? setInterval(look, 5000) : 0;
    return () => clearInterval(timer);
  }, [group, refresh, log && log.live]);
  useEffect(() => {
    if (!view.from || !group) {
      setDiff(null);
      return;
    }
    ask("diff", { group, from: view.from, to: view.at }).then(setDiff, (error) => setDiff({ text: error.message, partitions: [] }));
  }, [group, view.from, view.at, news]);
  const changed = useMemo(() => new Set(diff ? diff.partitions.map((each) => `${each.topic}:${each.partition}`) : []), [diff]);
  const moment = dragged !== null ? dragged : timeOf(view.at, state);
  const setMoment = useCallback((time, replace = false) => {
    setDragged(null);
    go({ at: time === null ? null : iso(time) }, replace);
  }, []);
  if (!log) return html`<p class="pad quiet" role="status">${lost || "Reading …"}</p>`;
  const [begin, end] = windowOf(log, size, moment);
  const selected = selectedPlace(view.p);
  const owner = ownerOf(state, view.p);
  const isPast = Boolean(at);
  return html`
    <${Header} log=${log} group=${group} go=${go} state=${state} isPast=${isPast} />
    <main>
      ${lost && html`<div class="problems" role="alert">${lost}</div>`}
      <${Problems} log=${log} state=${state} figures=${figures} problem=${problem} isPast=${isPast} />
      ${log.groups.length === 0 && html`<p class="quiet pad" role="status">${log.complete ? "The log knows no group." : `Reading the log … ${share(log)}`}</p>`}
      <div class="columns">
        <section>
          <div class="panel">
            <h2 id="map-title">Who owns what</h2>
            ${state && html`<${Map_} state=${state} selected=${view.p} changed=${changed} theme=${theme} onSelect=${(id) => go({ p: id }, true)} />`}
          </div>
          <div class="panel"><h2>Done and lag</h2>
            ${timeline && html`<${Chart} timeline=${timeline} begin=${begin} end=${end} moment=${moment} theme=${theme} onPick=${setMoment} />`}
          </div>
          <${Lists} group=${group} at=${view.at} tab=${view.tab || "all"} state=${state} news=${news} go=${go} />
        </section>
        <aside>
          ${log.steering && html`<div class="panel"><h2>Steering</h2><${SteerBar} actions=${log.steering} group=${group} topics=${state ? state.topics.map((each) => each.topic) : []}
            selected=${selected} owner=${owner && owner.client} marked=${markedRange(diff, moment, log)} onWish=${setWish} /></div>`}
          <${Detail} group=${group} at=${view.at} selected=${selected} owner=${owner} news=${news} setMoment=${setMoment} go=${go} payloads=${log.payloads}
            now=${log.live ? `${figures ? figures.now : ""} ${steered}` : null} steer=${log.steering && token() ? setWish : null} />
          ${diff && html`<${Diff} diff=${diff} go=${go} />`}
        </aside>
      </div>
    </main>
    <${Slider} log=${log} begin=${begin} end=${end} size=${size} onSize=${setSize} group=${group} view=${view} timeline=${timeline} moment=${moment} theme=${theme}
      pinned=${diff && diff.from ? diff.from.time : null} onDrag=${setDragged} onPick=${setMoment} go=${go} />
    <${Steer} wish=${wish} onClose=${() => { setWish(null); setSteered((before) => before + 1); }} />`;
}

// An offset of the log is a time as soon as the server has said which.
function timeOf(at, state) {
  if (!at) return null;
  const time = /^[0-9]+:[0-9]+$/.test(at) ? NaN : Date.parse(at);
  if (!Number.isNaN(time)) return time;
  return state && !state.live ? state.at.time : null;
}

// The times between the moments that are compared, as the command takes them.
function markedRange(diff, moment, log) {
  if (!diff || !diff.from) return "";
  const [first, last] = [diff.from.time, moment === null ? log.end : moment].sort((a, b) => a - b);
  return `${iso(first)}..${iso(last)}`;
}

const counted = (amount, one) => `${amount.toLocaleString("en")} ${one}${amount === 1 ? "" : "s"}`;

const share = (log) => (log.to_read ? `${Math.floor((100 * log.read) / log.to_read)} %` : "");

function selectedPlace(text) {
  const found = /^(.+):([0-9]+)$/.exec(text || "");
  return found ? { topic: found[1], partition: Number(found[2]) } : null;
}

function ownerOf(state, id) {
  for (const topic of state && id ? state.topics : []) {
    const index = topic.partitions.findIndex((partition) => `${topic.topic}:${partition}` === id);
    if (index >= 0 && topic.owners[index] >= 0 && !(topic.sharers && topic.sharers[index])) return state.members[topic.owners[index]];
  }
  return null;
}

function Header({ log, group, go, state, isPast }) {
  const choose = (name) => go({ group: name, p: null, from: null });
  const problems = (name) => counted(log.problems[name], "problem");
  const others = log.groups.filter((name) => name !== group && log.problems[name]);
  return html`<header>
    <h1>kafka-marshal</h1>
    <label>Group <select value=${group} onChange=${(event) => choose(event.target.value)} aria-label="Group">
      ${log.groups.map((name) => html`<option value=${name} key=${name}>${name}${log.problems[name] ? ` (${problems(name)})` : ""}</option>`)}
    </select></label>
    ${others.length > 0 && html`<span class="others"><button class="link bad" onClick=${() => choose(others[0])}>${others[0]}: ${problems(others[0])}</button>${others.length > 1 ? ` and ${others.length - 1} more` : ""}</span>`}
    ${isPast ? html`<span class="badge past">as it was ${state && state.at ? clock(state.at.time, true) : ""}</span>`
      : log.live ? html`<span class="badge live">live</span>` : html`<span class="badge past">end of the dump</span>`}
    ${state && html`<span class="quiet">${state.headline || ""}</span>`}
    <span class="grow"></span>
    ${!log.complete && html`<span class="quiet" role="status">history: ${share(log) || "…"} read</span>`}
    <span class="quiet">${log.topic}</span>
  </header>`;
}

function Map_({ state, selected, changed, theme, onSelect }) {
  const canvas = useRef(null);
  const map = useRef(null);
  const [spoken, setSpoken] = useState("");
  const [hovered, setHovered] = useState("");
  useLayoutEffect(() => {
    map.current = new OwnershipMap(canvas.current);
    const observer = new ResizeObserver(() => map.current.draw());
    observer.observe(canvas.current.parentElement);
    return () => observer.disconnect();
  }, []);
  useLayoutEffect(() => {
    const began = performance.now();
    map.current.show(state, selected, changed);
    performance.measure("map", { start: began, end: performance.now() });
    const cell = map.current.find(selected);
    setSpoken(cell ? map.current.text(cell) : "");
  }, [state, selected, changed, theme]);
  const keys = (event) => {
    const cell = map.current.next(event.key);
    if (cell === null) return;
    event.preventDefault();
    onSelect(cell.id);
    const rect = map.current.rects.find((each) => each.cell === cell);
    const top = canvas.current.getBoundingClientRect().top + rect.y;
    if (top < 40 || top > innerHeight - 190) scrollBy({ top: top - innerHeight / 2 });
  };
  const under = (event) => map.current.hit(event.offsetX, event.offsetY);
  const amount = state.topics.reduce((sum, topic) => sum + topic.owners.length, 0);
  const hung = state.members.filter((member) => member.hung).length;
  return html`
    <ul class="legend" aria-label="What the colours mean">
      <li><i class="seen"></i>seen</li><li><i class="silent"></i>silent</li><li><i class="gone"></i>gone</li>
      <li><i class="free"></i>nobody's</li>${changed.size > 0 && html`<li><i class="changed"></i>differs</li>`}
      ${state.topics.some((topic) => topic.parked && Object.keys(topic.parked).length > 0) && html`<li><i class="parked"></i>messages set aside</li>`}
      ${hung > 0 && html`<li><span class="bad">hung?</span> beats, but gets nothing done: ${hung.toLocaleString("en")}</li>`}
    </ul>
    <div><canvas class="map" ref=${canvas} tabindex="0" role="application" aria-labelledby="map-title" aria-describedby="map-cell"
      onKeyDown=${keys} onMouseMove=${(event) => { const cell = under(event); setHovered(cell ? map.current.text(cell) : ""); }}
      onMouseLeave=${() => setHovered("")} onClick=${(event) => { const cell = under(event); if (cell) onSelect(cell.id); }}></canvas></div>
    <p class="quiet" id="map-cell" aria-live="polite">${hovered || spoken || `${counted(amount, "partition")}, ${counted(state.members.length, "member")}${hung > 0 ? `, ${hung.toLocaleString("en")} hung?` : ""}. Arrow keys, or a click, choose one.`}</p>`;
}

// What slider and chart cover: all, or so much around the moment, in steps, so that it does not slide along with it.
function windowOf(log, size, moment) {
  const width = WINDOWS.find(([name]) => name === size)[2];
  if (!width) return [log.begin, log.end];
  const step = width / 4;
  const middle = Math.ceil(((moment === null ? log.end : moment) + width / 2) / step) * step;
  const end = Math.min(log.end, Math.max(log.begin + width, middle));
  return [Math.max(log.begin, end - width), end];
}

function Slider({ log, begin, end, size, onSize, group, view, timeline, moment, theme, pinned, onDrag, onPick, go }) {
  const last = log.end;
  const centre = moment === null ? last : moment;
  const [text, setText] = useState("");
  const [seeks, setSeeks] = useState(""); // where to, while the log is read there
  const acts = useRef(0); // what somebody does meanwhile prevails over an answer that comes late
  const near = async (direction) => {
    const act = ++acts.current;
    let answer = null;
    setSeeks(direction);
    while (answer === null && act === acts.current) {
      answer = await ask("near", { group, at: view.at, direction }).catch((error) => (isLater(error) ? null : {}));
      if (answer === null) await new Promise((done) => setTimeout(done, RETRY_MS));
    }
    if (act !== acts.current) return;
    setSeeks("");
    const { event } = answer;
    if (event) go({ at: event.at, ...(event.topic ? { p: `${event.topic}:${event.partition}` } : {}) });
    else if (event === null && direction === "on") onPick(null);
  };
  const bounded = (time) => (time >= last ? null : Math.max(log.begin, time));
  const reached = useRef(centre); // keys may come faster than the page is drawn
  reached.current = centre;
  const step = (share) => {
    const time = bounded(reached.current + Math.round((end - begin) * share));
    reached.current = time === null ? last : time;
    onPick(time);
  };
  const stopSeeking = () => {
    acts.current += 1;
    setSeeks("");
  };
  const keys = (event) => {
    stopSeeking();
    const steps = { ArrowLeft: -1 / 500, ArrowDown: -1 / 500, ArrowRight: 1 / 500, ArrowUp: 1 / 500, PageDown: -1 / 20, PageUp: 1 / 20 };
    if (event.key in steps) step(steps[event.key]);
    else if (event.key === "Home") onPick(log.begin);
    else if (event.key === "End") onPick(null);
    else if (event.key === "[") near("back");
    else if (event.key === "]") near("on");
    else return;
    event.preventDefault();
  };
  const jump = (event) => {
    event.preventDefault();
    const place = /^\s*([0-9]+:[0-9]+)\s*$/.exec(text);
    const time = Date.parse(text);
    if (place && Number(place[1].split(":")[1]) >= 0 && !/^[0-9]{1,2}:[0-9]{2}$/.test(place[1])) go({ at: place[1] });
    else if (!Number.isNaN(time)) onPick(time);
    else if (/^[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?$/.test(text.trim())) {
      const [hour, minute, second] = text.trim().split(":").map(Number);
      onPick(new Date(last).setHours(hour, minute, second || 0, 0));
    } else event.target.querySelector("input").setAttribute("aria-invalid", "true");
  };
  return html`<nav class="timeline" aria-label="History"><div>
    <div class="controls">
      <span class="moment">${moment === null ? (log.live ? "now" : "end") : clock(moment, true)}</span>
      <button onClick=${() => near("back")} title="The change of an owner before ( [ )" aria-label="Previous change">${seeks === "back" ? "…" : "◀"} change</button>
      <button onClick=${() => near("on")} title="The next change of an owner ( ] )" aria-label="Next change">change ${seeks === "on" ? "…" : "▶"}</button>
      <button onClick=${() => { stopSeeking(); onPick(null); }} disabled=${!view.at}>${log.live ? "Live" : "End"}</button>
      ${view.from ? html`<button onClick=${() => go({ from: null })}>End comparison</button>`
        : html`<button onClick=${() => go({ from: view.at || iso(last) })} title="Compare other moments with this one">Compare from here</button>`}
      <select aria-label="How much the slider covers" value=${size} onChange=${(event) => onSize(event.target.value)}>
        ${WINDOWS.map(([name, label]) => html`<option value=${name} key=${name}>${label}</option>`)}
      </select>
      <form onSubmit=${jump}><input type="text" size="12" placeholder="03:14, or CP:offset" aria-label="Go to a time, or an offset of the log"
        value=${text} onInput=${(event) => setText(event.target.value)} /></form>
    </div>
    <${Strip} timeline=${timeline} begin=${begin} end=${end} moment=${moment} pinned=${pinned} theme=${theme}
      reached=${log.complete ? null : log.reached} onPick=${(time) => onPick(bounded(time))} onCheckpoint=${(at) => go({ at, tab: "checkpoints" })} />
    <input type="range" aria-label="Moment of the history" min=${begin} max=${end} step="1" value=${centre}
      aria-valuetext=${moment === null ? "now" : clock(moment, true)} onKeyDown=${keys}
      onInput=${(event) => onDrag(Number(event.target.value))} onChange=${(event) => onPick(bounded(Number(event.target.value)))} />
    <div class="ends"><span>${clock(begin)}</span><span>${clock(end)}</span></div>
  </div></nav>`;
}

const page = document.getElementById("page");
page.textContent = "";
render(html`<${App} />`, page);
page.removeAttribute("aria-busy");
