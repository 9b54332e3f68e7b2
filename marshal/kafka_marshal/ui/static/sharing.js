// One partition as it is now: who shares it, and its open messages.

import { html } from "./vendor/preact.js";
import { useAnswer } from "./answers.js";
import { clock } from "./api.js";

const span = (first, last) => (first === last ? String(first) : `${first}-${last}`);
const times = (amount) => `${amount} ${amount === 1 ? "delivery" : "deliveries"}`;
const more = (amount, what) => amount > 0 && html`<p class="quiet">${amount.toLocaleString("en")} more ${what}</p>`;

// now: changes with each picture of the present. offset: the open message that is looked into. steer: null: not allowed here.
export function Sharing({ group, selected, isPast, now, steer, go, offset, onChoose }) {
  const [found, problem] = useAnswer("sharing", { group, ...selected }, now);
  if (!found || found.topic !== selected.topic || found.partition !== selected.partition) {
    return problem ? html`<p class="bad">${problem}</p>` : null;
  }
  if (found.mode === "whole" && !found.open) return null;
  return html`<div data-sharing>
    ${isPast && html`<p class="warn">What follows is of now, not of the moment shown: the history keeps who shared a partition, but neither batches nor open messages. Its records say who set aside, redrove or discarded what.</p>`}
    ${found.mode !== "whole" && html`<h2>Sharers</h2><${Sharers} found=${found} steer=${steer} group=${group} />`}
    ${found.open && html`<h2>Open messages</h2><p>${found.open}</p>`}
    ${found.messages.length > 0 && html`<${Messages} found=${found} offset=${offset} onChoose=${onChoose} />`}
    ${more(found.more_messages, html`in <code>${found.command}</code>`)}
    ${offset !== null && html`<${OpenMessage} group=${group} selected=${selected} offset=${offset} steer=${steer} go=${go}
      news=${JSON.stringify(found.messages.find((each) => each.first === offset) || null)} />`}
  </div>`;
}

function Sharers({ found, steer, group }) {
  const byKeys = found.mode === "keys";
  const has = (each) => {
    if (byKeys) return each.keys;
    if (each.batches.length === 0) return html`<span class="quiet">none</span>`;
    const told = each.batches.map(({ first, last, deliveries }) => span(first, last) + (deliveries > 1 ? ` (delivery ${deliveries})` : ""));
    return told.join(", ") + (each.more_batches ? ` and ${each.more_batches.toLocaleString("en")} more` : "");
  };
  return html`<div class="scroll"><table aria-label="Sharers"><thead><tr><th>member</th><th>${byKeys ? "keys" : "batches in flight"}</th><th>state</th></tr></thead>
      <tbody>${found.sharers.map((each) => html`<tr key=${each.client + each.instance + each.keys}>
        <td class="name" title=${each.where ? `${each.client}, ${each.where}` : each.client}>${each.client === null ? html`<span class="bad">no holder</span>` : each.client}</td><td>${has(each)}</td>
        <td class=${each.state === "gone" ? "bad" : each.state === "silent" ? "warn" : ""} title=${each.heard && `heard ${each.heard}`}>${each.state}${steer && each.client
          ? html` <button class="link" onClick=${() => steer({ group, action: "drain", member: each.client })}>Drain …</button>` : ""}</td></tr>`)}</tbody></table></div>
    ${more(found.more_sharers, "sharers")}`;
}

function Messages({ found, offset, onChoose }) {
  return html`<div class="scroll"><table aria-label="Open messages"><thead><tr><th class="number">offset</th><th>state</th><th class="number">deliveries</th><th>reason</th></tr></thead>
    <tbody>${found.messages.map((each) => html`<tr key=${each.first} class=${each.first === offset ? "now" : ""}>
      <td class="number">${each.first === each.last ? html`<button class="link" aria-pressed=${String(each.first === offset)} onClick=${() => onChoose(each.first === offset ? null : each.first)}>${each.first}</button>` : span(each.first, each.last)}</td>
      <td>${each.state}</td><td class="number">${each.deliveries}</td><td>${each.reason || "-"}</td></tr>`)}</tbody></table></div>`;
}

// One of them, with what is read for it alone: since when, by whom, its key.
function OpenMessage({ group, selected, offset, steer, go, news }) {
  const [found, problem] = useAnswer("open-message", { group, ...selected, offset }, news);
  const button = (label, action, kind) => html`<button class=${kind} onClick=${() => steer({ group, action, ...selected, offset })}>${label}</button>`;
  const is = found && found.offset === offset && !problem;
  return html`<div data-open-message aria-live="polite"><h2>${selected.topic}/${selected.partition}, offset ${offset}</h2>
    ${problem && html`<p class="bad">${problem}</p>`}
    ${!is && !problem && html`<p class="quiet">…</p>`}
    ${is && html`<dl>
      <dt>state</dt><dd>${found.state}, ${times(found.deliveries)}</dd>
      ${found.reason && html`<dt>reason</dt><dd>${found.reason}</dd>`}
      <dt>since</dt><dd>${found.time === null ? "its record was pruned" : html`<button class="link" title=${`partition:offset of the log ${found.at}`} onClick=${() => go({ at: found.at })}>${clock(found.time, true)}</button>`}</dd>
      ${found.client && html`<dt>by</dt><dd>${found.client}</dd>`}
      ${found.key !== null && html`<dt>key</dt><dd class="code">${found.key}</dd>`}</dl>
      ${found.gone && html`<p class="bad">Retention removed it from the topic: it can't be delivered. A redrive counts it as done.</p>`}
      ${found.unread && html`<p class="bad">Its key could not be read: ${found.unread}</p>`}
      ${steer && html`<div class="buttons">${["parked", "later"].includes(found.state) && button("Redrive …", "redrive", "")} ${found.state !== "acquired" && button("Discard …", "discard", "danger")}</div>`}`}
  </div>`;
}
