// What is said in words: problems, one partition, a comparison, and the lists.

import { html, useState } from "./vendor/preact.js";
import { useAnswer } from "./answers.js";
import { clock } from "./api.js";
import { Sharing } from "./sharing.js";

export function Problems({ log, state, figures, problem, isPast }) {
  const found = [];
  if (problem) found.push(problem);
  const reading = figures ? figures.problem : log.problem;
  if (reading && !isPast) found.push(reading);
  else if (log.problem && isPast && !log.complete) found.push(log.problem);
  const notes = log.note && isPast ? [log.note] : [];
  if (state && (!problem || state.live)) {
    for (const each of state.problems) found.push(each.text);
    for (const each of state.pauses) notes.push(each.text);
    notes.push(...state.notes);
  }
  const list = (texts, kind, label) =>
    texts.length > 0 && html`<div class="problems ${kind}" role="status" aria-label=${label}><ul>${texts.map((text) => html`<li key=${text}>${text}</li>`)}</ul></div>`;
  return html`${list(found, "", "What is wrong")}${list(notes, "soft", "Notes")}`;
}

// The message that the partition stands at, or another one of it: read when it is asked for, and not before.
function StoredMessage({ topic, partition, next, open }) {
  const [offset, setOffset] = useState(null);
  const [typed, setTyped] = useState("");
  const [found, problem] = useAnswer("message", offset === null ? null : { topic, partition, offset }, 0);
  const chosen = (event) => {
    event.preventDefault();
    if (/^[0-9]{1,19}$/.test(typed)) setOffset(typed);
  };
  const is = found && String(found.offset) === String(offset);
  return html`<div data-message><h2>Messages</h2>
    <form onSubmit=${chosen}>
      ${[open, next].filter((each) => each !== null).map((each) => html`<button type="button" key=${each} onClick=${() => setOffset(String(each))}>Show the one at ${each}</button> `)}
      <label>or at offset <input inputmode="numeric" size="10" value=${typed} onInput=${(event) => setTyped(event.target.value)} /></label> <button>Show</button>
    </form>
    ${problem && html`<p class="bad">${problem}</p>`}
    ${offset !== null && !is && !problem && html`<p class="quiet">…</p>`}
    ${is && !problem && html`<dl>
      <dt>offset</dt><dd>${found.offset}${found.committed ? "" : html` <span class="bad">of a transaction that was aborted or is not finished</span>`}</dd>
      <dt>time</dt><dd>${found.timestamp === null ? "none" : clock(found.timestamp, true)}</dd>
      <dt>key</dt><dd class="code">${found.key}</dd>
      ${found.headers.map(([name, value], index) => html`<dt key=${index}>${name}</dt><dd class="code">${value}</dd>`)}
      <dt>value</dt><dd>${found.form === "null" ? "null" : `${found.bytes.toLocaleString("en")} bytes, as ${found.form}`}</dd></dl>
      ${found.form !== "null" && html`<pre class="payload" tabindex="0">${found.value}</pre>`}
      ${found.cut > 0 && html`<p class="quiet">${found.cut.toLocaleString("en")} more bytes: kafka-marshal show ${topic}:${partition}:${found.offset} --max-bytes ${found.bytes}</p>`}`}
  </div>`;
}

export function Detail({ group, at, selected, owner, news, now, steer, setMoment, go, payloads }) {
  const title = selected && `${selected.topic}/${selected.partition}`;
  const [chosen, setChosen] = useState({}); // an open message
  const offset = chosen.title === title && chosen.group === group ? chosen.offset : null;
  const [found, problem] = useAnswer("partition", selected && group ? { group, at, ...selected } : null, news);
  if (!selected) {
    return html`<div class="panel"><h2>One partition</h2><p class="quiet">Choose one in the map: who had it, since when, and why that changed.</p></div>`;
  }
  if (!found || found.topic !== selected.topic || found.partition !== selected.partition) {
    return html`<div class="panel"><h2>${title}</h2><p class="quiet">${problem || "…"}</p></div>`;
  }
  const isNow = (each) => found.answers.some((answer) => answer.since_offset === each.since_offset && answer.keys[0] === each.keys[0]);
  return html`<div class="panel" data-partition=${title}>
    <h2>${title}</h2>
    ${problem && html`<p class="bad">${problem}</p>`}
    <p class="answer" aria-live="polite">${found.text}</p>
    ${now !== null && html`<${Sharing} group=${group} selected=${selected} isPast=${Boolean(at)} now=${now} steer=${steer} go=${go}
      offset=${offset} onChoose=${(each) => setChosen({ group, title, offset: each })} />`}
    ${owner && owner.hung && html`<p class="bad">${owner.client} beats, but gets nothing done: hung?</p>`}
    <dl>
      ${found.next && html`<dt>next</dt><dd>${position(found.next)}</dd>`}
      ${found.cp !== null && html`<dt>kept in</dt><dd>partition ${found.cp} of the log</dd>`}
      <dt>owners</dt><dd>${found.spans_in_all.toLocaleString("en")} so far</dd>
    </dl>
    <table aria-label="Owners of this partition"><thead><tr><th>since</th><th>owner</th><th class="number">epoch</th><th>ended</th></tr></thead>
      <tbody>${[...found.spans].reverse().slice(0, 25).map((each) => html`<tr class=${isNow(each) ? "now" : ""} key=${each.since_offset + "." + each.keys[0]}>
        <td class="time">${each.is_before ? "before" : html`<button class="link" onClick=${() => go({ at: `${found.cp}:${each.since_offset}` })}>${clock(each.since)}</button>`}</td>
        <td class="name" title=${each.client}>${each.client || html`<span class="quiet">${each.shared ? "shared" : "nobody"}</span>`}${each.place.includes("(") ? html` <span class="quiet">${each.place}</span>` : ""}</td>
        <td class="number">${each.epoch === null ? "" : each.epoch}</td><td>${each.ended || ""}</td></tr>`)}</tbody></table>
    ${payloads && html`<${StoredMessage} key=${title} topic=${selected.topic} partition=${selected.partition} next=${found.next ? found.next.offset : null} open=${found.next && found.next.offset === offset ? null : offset} />`}
    ${found.events.length > 0 && html`<h2>Its last records</h2><${Events} events=${found.events} go=${go} short />`}
  </div>`;
}

// The offset to be read next; of a moment long past the history may have no more than a range.
function position(next) {
  const number = (value) => value.toLocaleString("en");
  if (next.offset !== null) return html`${number(next.offset)} <span class="quiet">(since ${clock(next.since)})</span>`;
  return html`between ${number(next.low)} and ${number(next.high)} <span class="quiet">(from ${clock(next.since)} to ${clock(next.until)}; exactly: <code>${next.exact}</code>)</span>`;
}

function Events({ events, go, short }) {
  if (events.length === 0) return html`<p class="quiet">Nothing up to this moment.</p>`;
  return html`<div class="scroll"><table aria-label="Records"><thead><tr><th>time</th>${!short && html`<th>who</th>`}<th>what</th><th>outcome</th></tr></thead>
    <tbody>${events.map((each) => html`<tr key=${each.at} class=${each.accepted ? "" : "rejected"}>
      <td class="time"><button class="link" title=${`partition:offset of the log ${each.at}`} onClick=${() => go({ at: each.at, ...(each.topic ? { p: `${each.topic}:${each.partition}` } : {}) })}>${clock(each.time)}</button></td>
      ${!short && html`<td class="name" title=${each.client}>${each.client}</td>`}
      <td>${short ? `${each.client} ` : ""}${each.what}</td>
      <td class="code">${each.code}${each.why ? html`<br /><span class="quiet">${each.why}</span>` : ""}</td></tr>`)}</tbody></table></div>`;
}

export function Diff({ diff, go }) {
  return html`<div class="panel" data-diff><h2>Compared with ${diff.from ? clock(diff.from.time, true) : "…"}</h2>
    <p>${diff.text}</p>
    ${diff.partitions.length > 0 && html`<div class="scroll"><table aria-label="What differs"><thead><tr><th>partition</th><th>before</th><th>after</th><th>how it ended</th></tr></thead>
      <tbody>${diff.partitions.slice(0, 200).map((each) => html`<tr key=${each.topic + each.partition}>
        <td><button class="link" onClick=${() => go({ p: `${each.topic}:${each.partition}` }, true)}>${each.topic}/${each.partition}</button></td>
        <td class="name" title=${each.before}>${each.before}</td><td class="name" title=${each.after}>${each.after}</td><td>${each.why}${each.changes > 1 ? html` <span class="quiet">${each.changes} changes</span>` : ""}</td></tr>`)}</tbody></table></div>`}
    ${diff.changed > 200 && html`<p class="quiet">The first 200 of ${diff.changed.toLocaleString("en")}.</p>`}
  </div>`;
}

const TABS = [["all", "What happened"], ["changed", "Changes"], ["rejected", "Rejected"], ["rebalances", "Rebalances"], ["checkpoints", "Checkpoints"], ["waiting", "Who waits"], ["members", "Members"]];

export function Lists({ group, at, tab, state, news, go }) {
  const isEvents = ["all", "changed", "rejected"].includes(tab);
  const name = isEvents ? "events" : tab === "checkpoints" ? "checkpoints" : "rebalances";
  const wanted = !group || (!isEvents && tab !== name) ? null : { group, at, ...(isEvents ? { only: tab } : {}), limit: 100 };
  const [found, problem] = useAnswer(name, wanted, news);
  const keys = (event) => {
    const index = TABS.findIndex(([each]) => each === tab);
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = TABS[(index + by + TABS.length) % TABS.length][0];
    go({ tab: next }, true);
    document.getElementById(`tab-${next}`).focus();
  };
  let body = html`<p class="quiet">${problem || "…"}</p>`;
  if (isEvents && found && found.events) body = html`<${Events} events=${found.events} go=${go} />`;
  else if (tab === "rebalances" && found && found.rebalances) body = html`<${Rebalances} rows=${found.rebalances} go=${go} />`;
  else if (tab === "checkpoints" && found && found.checkpoints) body = html`<${Checkpoints} found=${found} go=${go} />`;
  else if (tab === "waiting" && state) body = html`<${Waiting} state=${state} go=${go} />`;
  else if (tab === "members" && state) body = html`<${Members} state=${state} />`;
  return html`<div class="panel">
    <div role="tablist" aria-label="Lists" onKeyDown=${keys}>${TABS.map(([each, label]) => html`<button role="tab" id=${`tab-${each}`} key=${each}
      aria-selected=${String(each === tab)} aria-controls="list" tabindex=${each === tab ? 0 : -1} onClick=${() => go({ tab: each }, true)}>${label}</button>`)}</div>
    <div role="tabpanel" id="list" aria-labelledby=${`tab-${tab}`}>${body}</div>
  </div>`;
}

function Rebalances({ rows, go }) {
  if (rows.length === 0) return html`<p class="quiet">None up to this moment.</p>`;
  return html`<div class="scroll"><table aria-label="Rebalances"><thead><tr><th>time</th><th>why</th><th class="number">moved</th><th class="number optional">members</th><th class="number optional">nobody, at most</th></tr></thead>
    <tbody>${rows.map((each) => html`<tr key=${each.at}><td class="time"><button class="link" onClick=${() => go({ at: each.at })}>${clock(each.time)}</button>${each.until && clock(each.until) !== clock(each.time) ? ` – ${clock(each.until)}` : ""}</td>
      <td>${each.generation === null ? "" : html`<span class="quiet">generation ${each.generation}: </span>`}${each.why}</td>
      <td class="number">${each.moved.toLocaleString("en")}</td><td class="number optional">${each.members}</td><td class="number optional">${each.vacant || "-"}</td></tr>`)}</tbody></table></div>`;
}

function Checkpoints({ found, go }) {
  if (found.checkpoints.length === 0) return html`<p class="quiet">None up to this moment, or the group takes none.</p>`;
  const [newest] = found.checkpoints;
  return html`<h2>Cuts in checkpoint ${newest.checkpoint}</h2>
    <div class="scroll"><table aria-label="Cuts"><thead><tr><th>partition</th><th class="number">cut for</th><th class="number">next</th></tr></thead>
      <tbody>${found.pieces.map((each) => html`<tr key=${each.topic + each.place}><td><button class="link" onClick=${() => go({ p: `${each.topic}:${each.partition}` }, true)}>${each.topic}/${each.place}</button></td>
        <td class="number">${each.cut === null ? html`<span class="quiet">nothing yet</span>` : each.cut}</td><td class="number">${each.next}</td></tr>`)}</tbody></table></div>
    <h2>Checkpoints</h2>
    <div class="scroll"><table aria-label="Checkpoints"><thead><tr><th>time</th><th class="number">checkpoint</th><th>what happened</th></tr></thead>
      <tbody>${found.checkpoints.map((each) => html`<tr key=${each.at}><td class="time"><button class="link" onClick=${() => go({ at: each.at })}>${clock(each.time)}</button></td>
        <td class="number">${each.checkpoint}</td><td>${each.text}</td></tr>`)}</tbody></table></div>`;
}

function Waiting({ state, go }) {
  const idle = (state.idle || []).filter((each) => each.waits);
  if (state.waiting.length + idle.length === 0) return html`<p class="quiet">Nobody waits for anybody.</p>`;
  return html`<ul>${state.waiting.map((each) => html`<li key=${each.text}><button class="link" onClick=${() => go({ p: `${each.topic}:${each.partition}` }, true)}>${each.topic}/${each.partition}</button>: ${each.text}</li>`)}
    ${idle.map((each) => html`<li key=${each.client + each.instance}>${each.client}: ${each.doing} <span class="quiet">(heard ${each.heard})</span></li>`)}</ul>`;
}

function Members({ state }) {
  const idle = state.idle || [];
  if (state.members.length + idle.length === 0) return html`<p class="quiet">Nobody holds anything.</p>`;
  const place = (each) => html`<td class="name" title=${each.client}>${each.client}</td><td class="optional">${each.where || each.instance}</td><td class="optional">${each.release || "-"}</td>`;
  return html`<div class="scroll"><table aria-label="Members"><thead><tr><th>member</th><th class="optional">runs at</th><th class="optional">release</th><th class="number">holds</th><th class="number">lag</th><th>state</th></tr></thead>
    <tbody>${state.members.map((each) => html`<tr key=${each.client + each.instance}>${place(each)}
      <td class="number">${each.held}</td><td class="number">${each.lag === undefined || each.lag === null ? "-" : each.lag.toLocaleString("en")}</td>
      <td class=${each.state === "gone" || each.hung ? "bad" : each.state === "silent" ? "warn" : ""}>${each.hung ? "hung?" : each.state}${each.draining ? ", hands over" : ""}${each.evicted ? `, ${each.evicted}` : ""}</td></tr>`)}
    ${idle.map((each) => html`<tr key=${each.client + each.instance}>${place(each)}<td class="number">0</td><td class="number">-</td>
      <td class=${each.silent ? "bad" : ""} title=${`heard ${each.heard}`}>${each.doing}</td></tr>`)}</tbody></table></div>`;
}
